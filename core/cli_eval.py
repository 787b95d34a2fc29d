"""`draftsmith eval`, a stage that is a group too: `eval compare`, `eval diagnose`."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.core.cli_group import StageGroup

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="YAML config of the run.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", "-s", help="section.key=value, over the config file.")]


eval_app = typer.Typer(
    cls=StageGroup,
    no_args_is_help=False,
    help="Stage 4: replay offline, serve on vLLM, report; exports what it serves. "
    "Usage: eval --config FILE, then section.key=value, --fresh and --draft FOLDER (another draft than the run's) "
    "where wanted; or one of the commands below.",
)


@eval_app.command()
def compare(
    config: ConfigFile,
    drafts: Annotated[
        list[Path], typer.Argument(help="Folders of EAGLE3 drafts, ours or others'; the first is the base.")
    ],
    overrides: Overrides = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve them on vLLM too.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="JSON to write; else eval/compare.json in the run.")] = None,
) -> None:
    """Compare drafts of one target on the same prompts, with paired intervals."""
    from draftsmith.core.config_io import load_config
    from draftsmith.eval.compare import compare as run_compare

    run_compare(load_config(config, overrides), drafts, serve, out)


@eval_app.command()
def diagnose(
    config: ConfigFile,
    overrides: Overrides = None,
    draft: Annotated[Path | None, typer.Option("--draft", help="Draft folder; else the run's export.")] = None,
) -> None:
    """Compare the trained draft with what vLLM makes of its export, part by part, and name the first that differs."""
    from draftsmith.core.config_io import load_config
    from draftsmith.eval.diagnose import diagnose_run

    raise typer.Exit(0 if diagnose_run(load_config(config, overrides), draft) else 1)
