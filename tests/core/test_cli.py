"""The command line: exit codes, one paragraph that names the mend, and nothing half-written on bad input."""

import json
import resource
import shutil
import subprocess
import sys

import pytest

from draftsmith.core import cli
from draftsmith.core.errors import StageFailed
from draftsmith.core.run import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_engine(monkeypatch):
    """Reaching the engine is the failure: what is refused must be refused before."""

    def start(*args, **kwargs):
        raise AssertionError("the engine was started")

    monkeypatch.setattr("draftsmith.data.stage.regenerate", start)
    monkeypatch.setattr("draftsmith.hidden_state_capture.local.in_engine_processes", start)
    monkeypatch.setattr("draftsmith.eval.stage.serve", start)


STAGES = ("prepare", "capture", "train", "eval", "export")

# ---- bad configs and input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [*STAGES, "summary"])
def test_a_missing_config_is_refused_by_every_command(refused, tmp_path, stage):
    message = refused(stage, "--config", tmp_path / "none.yaml")
    assert "none.yaml: no such config file" in message and "configs/quickstart.yaml" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", STAGES)
def test_an_unknown_key_is_refused_before_anything_is_written(refused, config_file, make_config, tmp_path, stage):
    file = config_file(make_config())
    message = refused(stage, "--config", file, "train.epoch=3")
    assert "override `train.epoch=3`: unknown key `train.epoch`. Did you mean `train.epochs`?" in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("stage", "needed"), [("train", "draftsmith capture"), ("export", "draftsmith train"), ("eval", "draftsmith train")]
)
def test_a_stage_out_of_order_names_the_one_to_run(refused, config_file, make_config, tmp_path, stage, needed):
    message = refused(stage, "--config", config_file(make_config()))
    assert f"Run `{needed} --config " in message and f"`{'export' if stage == 'eval' else stage}` needs" in message
    assert not (tmp_path / "runs").exists()


def test_a_summary_of_no_run_is_refused(refused, config_file, make_config):
    assert "no such run" in refused("summary", "--config", config_file(make_config()))


def test_capture_alone_names_prepare(make_config, tmp_path):
    from draftsmith.core.errors import UserError
    from draftsmith.hidden_state_capture.stage import capture

    with pytest.raises(UserError, match=r"`capture` needs the output of `prepare`.*Run `draftsmith prepare`"):
        capture(make_config())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("stage", ["prepare", "capture"])
@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "no such file"),
        ("", "gives no conversation"),
        ("\n \n", "gives no conversation"),
        ("{\n", "line 1: not_json"),
        ('{"prompt": "a"}\n{"prompt": ""}\n', "1 of 2 rows cannot be used"),
    ],
)
def test_a_bad_source_is_refused_before_anything_is_written(
    refused, no_engine, config_file, make_config, tmp_path, stage, text, named
):
    source = tmp_path / "prompts.jsonl"
    if text is not None:
        source.write_text(text)
    file = config_file(make_config(data={"sources": [{"path": str(source)}]}))
    message = refused(stage, "--config", file)
    assert named in message and "prompts.jsonl" in message
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return {"sources": [{"path": str(file)}]}


@pytest.mark.parametrize("stage", ["prepare", "capture"])
def test_a_target_without_a_chat_template_is_refused(
    refused, no_engine, config_file, make_config, prompts, tiny_target, tmp_path, stage
):
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    message = refused(stage, "--config", config_file(make_config(target={"path": str(folder)}, data=prompts)))
    assert "no chat template" in message and "Set target.chat_template" in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("stage", STAGES[:2])
def test_a_target_that_is_nowhere_is_refused(refused, no_engine, config_file, make_config, prompts, tmp_path, stage):
    message = refused(stage, "--config", config_file(make_config(target={"path": "/nowhere"}, data=prompts)))
    assert "target.path: `/nowhere`" in message and not (tmp_path / "runs").exists()


def test_layer_ids_out_of_range_are_refused_before_the_engine_makes_samples(
    refused, no_engine, config_file, make_config, prompts, tmp_path
):
    file = config_file(make_config(data=prompts, capture={"layer_ids": [2, 3, 60]}))
    assert "[60] is outside 0..5" in refused("capture", "--config", file)
    assert not (tmp_path / "runs").exists()


def test_everything_that_a_config_names_and_is_not_there_is_said_at_once(refused, no_engine, make_config, config_file):
    sources = [{"path": "path/to/prompts.jsonl"}, {"path": "other.parquet"}]
    config = make_config(
        target={"path": "path/to/your/model", "chat_template": "none.jinja"},
        data={"sources": sources, "contamination": {"sets": ["bench.jsonl"]}},
    )
    for command in ("prepare", "capture", "plan"):
        message = refused(command, "--config", config_file(config))
        for name in ("path/to/your/model", "none.jinja", "path/to/prompts.jsonl", "other.parquet", "bench.jsonl"):
            assert f"`{name}`" in message or f": {name} does not exist" in message
        assert message.count("Check data.sources") == 1
        first, second, *others = message.removeprefix("error: ").splitlines()
        assert "your/model" in first and first.endswith("use the embedded `smollm2-135m-instruct`.")
        assert "none.jinja" in second and second.endswith("Give the path of a Jinja file, or null.")
        assert len(others) == 3 and "Check data.sources" in others[-1]  # which is for all three


# ---- an existing run stays as it was ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "override", "named"),
    [
        ("capture", "capture.layer_ids=[2,3,60]", "[60] is outside 0..5"),
        ("capture", "capture.layer_ids=[0,1,2]", "layer_ids is [3, 4, 5] there and [0, 1, 2] in the config"),
        ("capture", "data.max_length=63", "data.max_length is 64 there and 63 in the config"),
        ("prepare", "data.max_length=63", "data.max_length is 64 there and 63 in the config"),
        ("prepare", "run.seed=1", "seed is 0 there and 1"),
        ("train", "draft.head_dim=15", "rotary embeddings need an even one"),
        ("export", "run.seed=0", "Run `draftsmith train --config"),
    ],
)
def test_a_refused_command_leaves_the_run_as_it_was(
    refused, no_engine, config_file, synthetic_run, tree_of, stage, override, named
):
    root = RunFolder.of(synthetic_run).root
    before = tree_of(root)
    assert named in refused(stage, "--config", config_file(synthetic_run), override)
    assert tree_of(root) == before


def test_a_refused_fresh_command_keeps_the_old_output(refused, no_engine, config_file, synthetic_run, tree_of):
    root = RunFolder.of(synthetic_run).root
    before = tree_of(root)
    refused("capture", "--fresh", "--config", config_file(synthetic_run), "capture.layer_ids=[2,3,60]")
    assert tree_of(root) == before


def test_a_refused_fresh_training_keeps_the_old_one(refused, config_file, trained_run, tree_of):
    run = RunFolder.of(trained_run)
    before = tree_of(run.root)
    assert "no GPU" in refused("train", "--fresh", "--config", config_file(trained_run), "train.kernels=fused")
    assert tree_of(run.root) == before  # config.yaml too


@pytest.mark.parametrize("linked", [False, True])
def test_a_refused_fresh_capture_keeps_the_old_states(refused, config_file, synthetic_run, tree_of, tmp_path, linked):
    root = RunFolder.of(synthetic_run).root
    if linked:  # states on another disk
        (root / "hidden_states").rename(tmp_path / "large")
        (root / "hidden_states").symlink_to(tmp_path / "large")
    before = tree_of(root), tree_of(root / "hidden_states")
    for override in ("data.max_length=63", "capture.server=http://127.0.0.1:9"):
        refused("capture", "--fresh", "--config", config_file(synthetic_run), override)
        after = tree_of(root), tree_of(root / "hidden_states")
        assert [{k: v for k, v in t.items() if k != "config.yaml"} for t in after] == [
            {k: v for k, v in t.items() if k != "config.yaml"} for t in before
        ]


def test_states_that_a_killed_command_left_aside_are_given_back(run_cli, config_file, synthetic_run, tree_of):
    root = RunFolder.of(synthetic_run).root
    before = tree_of(root)
    (root / "hidden_states").rename(root / ".old-hidden_states")
    code, out, _ = run_cli("capture", "--config", config_file(synthetic_run))
    assert code == 0 and "(already there)" in out and tree_of(root) == before


def test_a_fresh_capture_lets_the_old_states_go_before_it_writes(config_file, synthetic_run, monkeypatch):
    """The disk may have no room for both."""
    run = RunFolder.of(synthetic_run)
    seen = []

    def engines(work):
        seen.append(sorted(p.name for p in run.root.iterdir() if "hidden_states" in p.name))
        raise StageFailed("the engine died.")

    monkeypatch.setattr("draftsmith.hidden_state_capture.local.in_engine_processes", engines)
    monkeypatch.setattr(sys, "argv", ["draftsmith", "capture", "--fresh", "--config", config_file(synthetic_run)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1 and seen == [["hidden_states"]]


def test_what_is_there_already_is_said_and_exit_code_is_0(run_cli, no_engine, config_file, synthetic_run):
    file = config_file(synthetic_run)
    for stage in ("prepare", "capture"):
        code, out, error = run_cli(stage, "--config", file)
        assert (code, error) == (0, "") and "(already there)" in out


def test_the_stages_run_one_after_another(run_cli, no_engine, config_file, synthetic_run):
    file = config_file(synthetic_run)
    for stage, said in [("train", "draft: 11 steps"), ("export", "proven"), ("summary", "not made yet")]:
        code, out, error = run_cli(stage, "--config", file)
        assert (code, error) == (0, "") and said in out


def test_fresh_makes_the_output_again(run_cli, config_file, trained_run):
    file, run = config_file(trained_run), RunFolder.of(trained_run)
    code, out, _ = run_cli("train", "--fresh", "--config", file, "train.learning_rate=2e-3")
    assert code == 0 and "draft: 11 steps" in out
    assert "learning_rate: 0.002" in (run.root / "config.yaml").read_text()


# ---- failures and interruptions --------------------------------------------------------------------------------------


def test_a_failed_proof_is_exit_code_1(run_cli, config_file, trained_run):
    code, _, error = run_cli("export", "--config", config_file(trained_run), "export.max_logit_error=1e-9")
    assert code == 1 and error.startswith("failed: ") and "Traceback" not in error
    assert not RunFolder.of(trained_run).export.exists()


@pytest.fixture
def small_disk():
    """No file can grow beyond 100 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_exit_code_1_and_leaves_nothing_half_written(run_cli, config_file, synthetic_run, small_disk):
    code, _, error = run_cli("train", "--config", config_file(synthetic_run))
    assert code == 1 and error.startswith("failed: ") and "Free space" in error
    assert list(RunFolder.of(synthetic_run).checkpoints.iterdir()) == []


def test_a_run_folder_inside_a_file_is_refused(refused, no_engine, config_file, make_config, prompts, tmp_path):
    (tmp_path / "runs").write_text("a file is in the way")
    file = config_file(make_config(data=prompts, run={"dir": f"{tmp_path}/runs"}))
    assert f"run.dir: {tmp_path / 'runs'} is a file" in refused("prepare", "--config", file)


def test_an_interruption_says_how_to_go_on(run_cli, config_file, synthetic_run, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("draftsmith.train.stage.train", interrupt)
    code, _, error = run_cli("train", "--config", config_file(synthetic_run))
    assert code == 130 and "run the stage again to go on" in error


# ---- commands about the project --------------------------------------------------------------------------------------


def test_the_schema_file_is_current(run_cli):
    assert run_cli("schema", "--check") == (0, "", "")


def test_an_outdated_schema_is_exit_code_1(run_cli, monkeypatch, tmp_path):
    (tmp_path / "schema.json").write_text("{}")
    monkeypatch.setattr(cli, "files", lambda package: tmp_path)
    code, _, error = run_cli("schema", "--check")
    assert code == 1 and "write it with `draftsmith schema`" in error
    assert run_cli("schema")[0] == 0 and run_cli("schema", "--check")[0] == 0


@pytest.mark.parametrize("arguments", [["--help"], *[[s, "--help"] for s in STAGES]], ids=" ".join)
def test_help_is_exit_code_0(run_cli, arguments):
    code, out, _ = run_cli(*arguments)
    assert code == 0 and "Usage:" in out


def test_the_help_of_a_stages_commands_is_their_own(run_cli):
    code, out, _ = run_cli("capture", "merge", "--help")
    assert code == 0 and "--no-verify" in out and "on this host" not in out
    code, out, _ = run_cli("capture", "serve-args", "--help")
    assert code == 0 and "vllm serve" in out and "on this host" not in out
    code, out, _ = run_cli("capture", "--help")
    assert code == 0 and "merge" in out and "serve-args" in out and "--shard i/n" in out


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "--confg", "x"]], ids=" ".join)
def test_a_wrong_command_line_is_exit_code_2(run_cli, arguments):
    assert run_cli(*arguments)[0] == 2


# ---- as a process ----------------------------------------------------------------------------------------------------


def draftsmith(*arguments):
    return subprocess.run([sys.executable, "-m", "draftsmith", *arguments], capture_output=True, text=True)


def test_a_bad_config_as_a_process(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("trian: {}\n")
    done = draftsmith("train", "--config", str(file))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"error: {file}, line 1: unknown key `trian`. Did you mean `train`? "
        "See configs/schema.json for every key, its type and its meaning.\n"
    )


def test_doctor_finds_this_machine_able():
    done = draftsmith("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "This machine can run every stage" in done.stdout


def test_a_run_that_another_process_works_on_is_refused(refused, config_file, make_config):
    config = make_config()
    with RunFolder.of(config).lock():
        message = refused("train", "--config", config_file(config))
    assert "another draftsmith works on" in message


def test_an_alias_inside_itself_is_refused(refused, tmp_path):
    (tmp_path / "odd.yaml").write_text("&a {run: *a}")
    assert "odd.yaml" in refused("train", "--config", tmp_path / "odd.yaml")


def test_a_second_run_trains_on_links_to_the_firsts_samples_and_states(run_cli, no_engine, config_file, trained_run):
    """As README.md says: both drafts stay."""
    file, first = config_file(trained_run), RunFolder.of(trained_run)
    second = first.root.with_name("b")
    second.mkdir()
    for name in ("samples", "vocab_mapping.safetensors", "hidden_states"):
        (second / name).symlink_to(f"../{first.root.name}/{name}")
    for stage in ("prepare", "capture", "train", "export"):
        code, _, error = run_cli(stage, "--config", file, "run.name=b", "train.learning_rate=0.002")
        assert code == 0, error
    assert (second / "export/manifest.json").is_file() and len(first.complete_checkpoints()) > 0
    assert run_cli("train", "--config", file)[0] == 0  # the first is as it was
    code, _, error = run_cli("export", "--config", file, "run.name=b")
    assert code == 2 and "`train.learning_rate=0.002`" in error
