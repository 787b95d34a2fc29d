"""`draftsmith STAGE --config FILE [section.key=value ...]`: the stages, and a few commands about them.

Exit codes: 0 done, 2 bad config or input, 1 failed. The stages are imported when they are asked for: this module is
the one place of `core` that knows them.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from safetensors import SafetensorError

from draftsmith.core.atomic import write_text
from draftsmith.core.capturable import check_capturable
from draftsmith.core.cli_capture import capture_app, capture_share, which_share
from draftsmith.core.cli_dry import DryRun, TargetConfigFile, dry_run
from draftsmith.core.cli_eval import eval_app
from draftsmith.core.cli_export import export_app
from draftsmith.core.cli_group import STAGE
from draftsmith.core.cli_plan import plan
from draftsmith.core.cli_store import store_app
from draftsmith.core.commands import with_config
from draftsmith.core.config import Config
from draftsmith.core.config_io import load_config, schema_json
from draftsmith.core.errors import ProcessGone, StageFailed, UserError
from draftsmith.core.named import check_paths
from draftsmith.core.replacing import recover, replacing
from draftsmith.core.run import RunFolder
from draftsmith.core.told import FOLDER, tell

app = typer.Typer(
    help="Train EAGLE3 draft models for vLLM: prompts in, a served draft out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Look at the samples of a run.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(store_app, name="store")
app.command()(plan)
app.add_typer(capture_app, name="capture")
app.add_typer(eval_app, name="eval")
app.add_typer(export_app, name="export")
ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="YAML config of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, over the config file.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete this stage's output and make it again.")]


@app.command()
def prepare(
    config: ConfigFile,
    overrides: Overrides = None,
    fresh: Fresh = False,
    dry: DryRun = False,
    target_config: TargetConfigFile = None,
) -> None:
    """Stage 1: conversations to samples; the target answers the prompts on vLLM."""
    if dry:
        return dry_run("prepare", config, overrides, target_config, fresh)
    with _run(config, overrides, fresh, lambda run: [run.samples, run.vocab_mapping, run.journal]) as loaded:
        _prepare(loaded)


@capture_app.command(STAGE, hidden=True)
def capture(
    config: ConfigFile,
    overrides: Overrides = None,
    fresh: Fresh = False,
    shard: Annotated[str | None, typer.Option("--shard", help="i/n: only share i (from 0) of n, on this host.")] = None,
    dry: DryRun = False,
    target_config: TargetConfigFile = None,
) -> None:
    """Stage 2: hidden states of the target; prepares what is missing (also `capture merge`, `capture serve-args`)."""
    from draftsmith.hidden_state_capture.beside import capture_alone

    if shard:
        which_share(shard)
    if dry:
        return dry_run("capture", config, overrides, target_config, fresh)
    if shard:
        return capture_share(load_config(config, overrides), shard, fresh)
    with _run(config, overrides, fresh, lambda run: [run.hidden_states, run.spool], side="capture") as loaded:
        _prepare(loaded)
        capture_alone(loaded)


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    fresh: Fresh = False,
    dry: DryRun = False,
    target_config: TargetConfigFile = None,
) -> None:
    """Stage 3: train the draft; goes on from the newest checkpoint."""
    from draftsmith.train.stage import train as run_train

    if dry:
        return dry_run("train", config, overrides, target_config, fresh)
    with _run(config, overrides, fresh, lambda run: [run.checkpoints, run.metrics, run.torchspec]) as loaded:
        if loaded.capture.mode == "store" or loaded.train.engine == "torchspec":
            return run_train(loaded)
        from draftsmith.hidden_state_capture.beside import capturing

        with capturing(loaded) as check_capture:
            run_train(loaded, check_capture)


@eval_app.command(STAGE, hidden=True)
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    fresh: Fresh = False,
    draft: Annotated[
        Path | None, typer.Option("--draft", help="Evaluate this draft's folder instead of the run's; in eval-NAME/.")
    ] = None,
    dry: DryRun = False,
    target_config: TargetConfigFile = None,
) -> None:
    """Stage 4: replay offline, serve on vLLM, report; exports what it serves."""
    from draftsmith.eval.stage import evaluate as run_evaluate
    from draftsmith.eval.subject import report_place

    if draft is not None and not (draft / "config.json").is_file():
        raise UserError(f"--draft: {draft} is no folder of a draft: it has no config.json.", "Check the path.")
    if dry:
        return dry_run("eval", config, overrides, target_config, fresh or draft is not None, draft)

    def outputs(run: RunFolder) -> list[Path]:
        place = report_place(run, draft) if draft else run
        return [place.eval, place.passes]

    with _run(config, overrides, fresh, outputs) as loaded:
        if draft is None:
            _export(loaded)
        run_evaluate(loaded, draft)


@data_app.command("show")
def data_show(
    config: ConfigFile,
    overrides: Overrides = None,
    row: Annotated[str | None, typer.Option("--row", help="Id of a sample or a conversation.")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Print the token ids too.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Samples to print.")] = 5,
) -> None:
    """Print samples, their supervised tokens coloured."""
    from draftsmith.data.show import show

    show(load_config(config, overrides), row, ids, count)


@data_app.command("stats")
def data_stats(
    config: ConfigFile,
    overrides: Overrides = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="PNG to write a plot of them to; else none.")] = None,
) -> None:
    """Print lengths, finish reasons, coverage and skipped rows by source."""
    from draftsmith.data.show import stats

    stats(load_config(config, overrides), plot)


@app.command()
def summary(config: ConfigFile, overrides: Overrides = None) -> None:
    """What a run has made and reached so far."""
    from draftsmith.core.summary import print_summary

    print_summary(load_config(config, overrides))


@app.command()
def doctor() -> None:
    """What this machine can run, what is missing, and how to mend it."""
    from draftsmith.core.doctor import diagnose

    raise typer.Exit(0 if diagnose() else 1)


@app.command()
def schema(
    check: Annotated[bool, typer.Option("--check", help="Compare instead of writing.")] = False,
) -> None:
    """Write configs/schema.json, which editors check configs by, and report.schema.json, which describes reports."""
    from draftsmith.eval.schema import report_schema

    folder = files("draftsmith.configs")
    for name, text in (("schema.json", schema_json()), ("report.schema.json", report_schema())):
        path = Path(str(folder.joinpath(name)))
        if not check:
            write_text(path, text)
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise StageFailed(f"{path} is not the schema in the source; write it with `draftsmith schema`.")


@contextmanager
def _run(
    config: Path, overrides: list[str] | None, fresh: bool, outputs: Callable[[RunFolder], list[Path]], side: str = ""
) -> Iterator[Config]:
    """The checked config of a stage, its run locked, and with `fresh` the stage's old output aside.

    `side` is the stage's name where it runs beside another one, as in spool mode with a capture of the user's.
    """
    from draftsmith.core.target import resolve_layer_ids, resolve_target

    loaded = load_config(config, overrides)
    check_paths(loaded)
    # Whatever the stage, a target that cannot be read or captured, or layers that it lacks, are said before all else.
    target = resolve_target(loaded.target)
    resolve_layer_ids(loaded.capture, target.num_layers)
    check_capturable(loaded.capture, target)
    run = RunFolder.of(loaded)
    if (there := next(p for p in (run.root, *run.root.parents) if p.exists())) and not there.is_dir():
        raise UserError(f"run.dir: {there} is a file.", "Name a folder.")
    beside = loaded.capture.mode == "spool" and loaded.capture.spool_capture == "own"
    # Under torchrun the processes share the folder: one puts aside.
    old = outputs(run) if os.environ.get("RANK", "0") == "0" else []
    with run.lock(side if beside else ""):
        for path in old:
            recover(path)
        with replacing(old if fresh else []):
            yield loaded


def _prepare(config: Config) -> None:
    from draftsmith.data.stage import prepare as run_prepare

    run_prepare(config)


def _export(config: Config) -> None:
    from draftsmith.export.stage import export as run_export

    run_export(config)


def _say_once(text: str) -> None:
    """On stderr; the other processes of a training on this host say the same, and are not heard."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr)


def main() -> None:
    """Console entry point: an error of the user's is one paragraph, not a traceback."""
    # The libraries' own bars and notices would print over our progress.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        app()
    except UserError as error:
        tell(with_config(f"error: {error}"), 2)
        sys.exit(2)
    except StageFailed as error:
        tell(with_config(f"failed: {error}"), 1, cause=not isinstance(error, ProcessGone))
        sys.exit(1)
    except SystemExit as end:
        if end.code == 130:
            _say_once("stopped; run the stage again to go on.")
        raise
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:
            _leave_traceback()
            raise
        tell(f"failed: {error}. Free space or mend permissions there, and run the stage again.", 1)
        sys.exit(1)
    except KeyboardInterrupt:
        _say_once("stopped; run the stage again to go on.")
        sys.exit(130)
    except Exception:
        _leave_traceback()
        raise


def _leave_traceback() -> None:
    """Of a fault of ours: with the launcher, where there is one."""
    if os.environ.get(FOLDER):
        tell(traceback.format_exc().rstrip(), 1)
        sys.exit(1)


if __name__ == "__main__":
    main()
