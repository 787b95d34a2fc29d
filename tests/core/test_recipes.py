"""Every shipped config: loads, plans as its head says, dry-runs its stages, and its draft is as large as stated."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from draftsmith.core.cli import app
from draftsmith.core.cli_dry import dry_run
from draftsmith.core.config import TargetConfig
from draftsmith.core.config_io import load_config
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_shape import resolve_shape
from draftsmith.core.embedded import NAME
from draftsmith.core.errors import UserError
from draftsmith.core.plan import target_shape
from draftsmith.core.target import resolve_layer_ids, resolve_target

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
NAMES = sorted(p.stem for p in CONFIGS.glob("*.yaml"))
# Those without a target of their own in their head.
PLAIN = ("quickstart", "own_target")
RECIPES = [name for name in NAMES if name not in PLAIN]
STAGES = ("prepare", "capture", "train", "eval", "export")


def head(name):
    """The comment at the top of a recipe."""
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    return [line for line in lines if line.startswith("#")]


def planned(name):
    """Words of the plan's command in a recipe's head, and the lines beneath it."""
    lines = head(name)
    (at,) = [i for i, line in enumerate(lines) if line.startswith("#   draftsmith plan ")]
    beneath = []
    for line in lines[at + 1 :]:
        if not line.startswith("#   "):
            break
        beneath.append(line[4:])
    return shlex.split(lines[at][4:])[1:], beneath


def target_config(name):
    """`--target-config` of a recipe's plan."""
    words, _ = planned(name)
    return ROOT / words[words.index("--target-config") + 1]


def run(*words):
    done = CliRunner().invoke(app, list(map(str, words)))
    if isinstance(done.exception, UserError):
        raise done.exception
    return done


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_every_target_that_a_recipe_names_is_described():
    described = {p.name for p in (CONFIGS / "targets").iterdir()}
    assert {target_config(name).name for name in RECIPES} == described


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_says_what_the_plan_says(name):
    words, beneath = planned(name)
    assert words[words.index("-c") + 1] == f"configs/{name}.yaml" and words[-1] == "--brief"
    done = run(*words)
    assert done.stdout.splitlines() == beneath
    # What does not fit on the machine at hand is said apart, for a recipe is for other machines.
    assert done.exit_code == int(any("does not fit" in line for line in [*beneath, *done.stderr.splitlines()]))


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_names_hardware_data_stages_and_the_server(name):
    text, config = "\n".join(head(name)), load_config(CONFIGS / f"{name}.yaml")
    for needed in (
        "GPU",
        "GB",
        "Data:",
        "make prepare",
        f"vllm serve {config.target.path}",
        f"runs/{config.run.name}/",
    ):
        assert needed in text, needed


@pytest.mark.parametrize("name", RECIPES)
def test_the_draft_on_the_meta_device_is_as_large_as_the_head_says(name):
    config = load_config(CONFIGS / f"{name}.yaml")
    target = resolve_target(TargetConfig(path=str(target_config(name))))  # as transformers reads its config
    shape = resolve_shape(
        config.draft, target, len(resolve_layer_ids(config.capture, target.num_layers)), config.data.draft_vocab_size
    )
    with torch.device("meta"):
        draft = DraftModel(shape, torch.empty(shape.vocab_size, shape.hidden_size))
    counted = sum(p.numel() for p in draft.parameters())
    assert planned(name)[1][0].startswith(f"draft: {counted:,} parameters ")
    # What plans and dry runs make of the config.json alone is what transformers makes of it.
    bare = target_shape(config.target, target_config(name))
    assert resolve_shape(config.draft, bare, shape.num_aux, shape.draft_vocab_size) == shape


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", [*RECIPES, "quickstart"])
def test_every_stage_dry_runs(name, stage, monkeypatch, tmp_path):
    more = ["capture.untried_targets=true"] if name == "deepseek_v3_2" else []
    described = ["--target-config", target_config(name)] if name in RECIPES else []
    file = CONFIGS / f"{name}.yaml"
    done = run(stage, "-c", file, f"run.dir={tmp_path / 'runs'}", *more, "--dry-run", *described)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "runs").exists()
    if (name, stage) == ("minimax_m2_5_torchspec", "train"):
        tree = yaml.safe_load(done.stdout.split("# the command")[0])
        assert tree["inference"]["inference_num_gpus"] == 24 and tree["training"]["training_num_nodes"] == 2
        assert tree["inference"]["aux_hidden_states_layers"] == [1, 30, 58]  # its own numbers, one less than ours
        return
    told, config = json.loads(done.stdout), load_config(file)
    assert told["stage"] == stage
    if stage == "capture":
        args = told["vllm"]
        assert args["tensor_parallel_size"] == config.target.tensor_parallel
        ids = args["speculative_config"]["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        assert ids[:3] == json.loads(json.dumps(told_layers(name)))
    if stage == "export":
        minimax = name.startswith("minimax")
        architecture = "Eagle3MiniMaxM2ForCausalLM" if minimax else "LlamaForCausalLMEagle3"
        assert told["config.json"]["architectures"] == [architecture]
        assert told["config.json"]["draft_vocab_size"] == config.data.draft_vocab_size


def told_layers(name):
    """Auxiliary layers of a config."""
    config = load_config(CONFIGS / f"{name}.yaml")
    described = target_config(name) if name in RECIPES else None
    return resolve_layer_ids(config.capture, target_shape(config.target, described).num_layers)


def test_the_start_for_an_own_target_needs_its_two_paths_only():
    file = CONFIGS / "own_target.yaml"
    with pytest.raises(UserError, match=r"(?s)path/to/your/model.*path/to/prompts\.jsonl"):
        run("plan", "-c", file)
    done = run("plan", "-c", file, f"target.path={NAME}", "data.sources=[{path: demo-prompts}]",
               "data.max_length=2048", "--gpu", "H200", "--json")  # fmt: skip
    assert json.loads(done.stdout)["problems"] == []
    for stage in STAGES:
        assert run(stage, "-c", file, f"target.path={NAME}", "--dry-run").exit_code == 0


def test_the_guides_plan_is_the_recipes():
    guide = (ROOT / "docs" / "minimax.md").read_text()
    words, beneath = planned("minimax_m2_5")
    said = f"    .venv/bin/draftsmith {shlex.join(words)}\n" + "".join(f"    -> {line}\n" for line in beneath)
    assert said in guide
    hours = dict(re.findall(r"(prepare|capture) (\d+)", beneath[2]))
    assert f"## 3. Replies ({hours['prepare']} hours" in guide
    assert f"## 4. Capture and training ({hours['capture']} hours" in guide


def test_a_target_that_was_never_captured_is_refused_by_plan_dry_run_and_capture():
    file, described = CONFIGS / "deepseek_v3_2.yaml", target_config("deepseek_v3_2")
    with pytest.raises(UserError, match=r"sparse latent attention.*capture\.untried_targets=true"):
        dry_run("capture", file, None, described)
    assert any("sparse latent attention" in line for line in planned("deepseek_v3_2")[1])
    with pytest.raises(UserError, match="sparse latent attention"):
        run("capture", "-c", file, f"target.path={described}", "data.sources=[{path: demo-prompts}]")


def test_numbers_in_the_heads_are_only_those_of_the_plan():
    """No recipe states a rate or an hour of its own."""
    for name in RECIPES:
        _, beneath = planned(name)
        others = [line for line in head(name) if line[4:] not in beneath]
        assert not [line for line in others if re.search(r"\d hours|\d h\b", line)], name
