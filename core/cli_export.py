"""`draftsmith export --config FILE ...` and `draftsmith export convert SOURCE FOLDER`.

Beside `core/cli.py` the one module of `core` that knows a stage, which it imports when it is asked for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftsmith.core.cli_dry import DryRun, TargetConfigFile, dry_run
from draftsmith.core.cli_group import STAGE, StageGroup
from draftsmith.core.config import ExportConfig, TargetConfig
from draftsmith.core.errors import UserError

export_app = typer.Typer(
    cls=StageGroup,
    help="Stage 5: the draft as a server loads it, proven. Usage: export --config FILE [section.key=value ...] "
    "[--fresh] [--checkpoint last|best|step-N|PATH] [--push-to-hub OWNER/NAME [--force]], or the command below.",
)
# What a conversion calls the keys of the config that errors name.
_OPTION_OF = {
    "target.path": "--target",
    "target.revision": "--target-revision",
    "target.trust_remote_code": "--trust-remote-code",
    "export.format": "--format",
    "export.layer_id_convention": "--layer-id-convention",
    "export.license": "--license",
}
Format = Annotated[str, typer.Option("--format", help="hf or speculators.")]
Convention = Annotated[str, typer.Option("--layer-id-convention", help="vllm or sglang (its ids are one lower).")]


@export_app.command(STAGE, hidden=True)
def run(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML config of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, over the config file.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Export anew; what is there stays until the new one is proven.")
    ] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="last, best, step-N or a path; as export.checkpoint.")
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push-to-hub", help="Upload to this hub repository (owner/name).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Upload although it is not proven on a server.")] = False,
    dry: DryRun = False,
    target_config: TargetConfigFile = None,
) -> None:
    """Stage 5: the draft as a server loads it, proven (also `export convert`)."""
    if dry:
        return dry_run("export", config, overrides, target_config, fresh)
    from draftsmith.core.cli import _run
    from draftsmith.core.run import RunFolder
    from draftsmith.export.hub import push_to_hub
    from draftsmith.export.stage import export

    more = [] if checkpoint is None else [f"export.checkpoint={checkpoint}"]
    with _run(config, [*(overrides or []), *more], False, lambda _: []) as loaded:
        export(loaded, fresh)
        if push:
            push_to_hub(RunFolder.of(loaded).export, push, force)


@export_app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(help="Draft folder, checkpoint of ours, of TorchSpec, or of DeepSpeed.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    format_: Format = "hf",
    layer_id_convention: Convention = "vllm",
    target: Annotated[str | None, typer.Option("--target", help="The draft's target: folder, hub id, or name.")] = None,
    revision: Annotated[str | None, typer.Option("--target-revision", help="Hub revision of the target.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the target brings; read it first.")
    ] = False,
    source_convention: Annotated[
        str | None, typer.Option("--source-convention", help="Of the source's layer ids: vllm or sglang.")
    ] = None,
    draft_config: Annotated[
        Path | None, typer.Option("--draft-config", help="config.json of a checkpoint that has none.")
    ] = None,
    license_: Annotated[str | None, typer.Option("--license", help="Licence in the card; else the target's.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace what is in the folder.")] = False,
) -> None:
    """Write any EAGLE3 draft anew: between layouts and layer-id conventions, or out of a training checkpoint."""
    from draftsmith.core.target import resolve_target
    from draftsmith.export.convert import convert_draft

    with _as_options():
        options = _options(format=format_, layer_id_convention=layer_id_convention, license=license_, verify="offline")
        theirs = _convention(source_convention)
        named = TargetConfig(path=target, revision=revision, trust_remote_code=trust_remote_code) if target else None
        resolved = resolve_target(named) if named else None
        convert_draft(source, folder, options, resolved, theirs, draft_config, fresh)


@contextmanager
def _as_options() -> Iterator[None]:
    """Errors of what stages and conversions share name keys of the config; a conversion has options instead."""
    try:
        yield
    except UserError as error:
        what, mend = error.what, error.mend
        for key, option in _OPTION_OF.items():
            what, mend = (text.replace(f"{key}=true", option).replace(f"{key}=", f"{option} ").replace(key, option)
                          for text in (what, mend))  # fmt: skip
        raise UserError(what, mend) from None


def _convention(named: str | None) -> Literal["vllm", "sglang"] | None:
    if named not in (None, "vllm", "sglang"):
        raise UserError(f"--source-convention: {named} is neither vllm nor sglang.", "See --help.")
    return named  # type: ignore[return-value]  # mypy does not narrow by `in`


def _options(**values: Any) -> ExportConfig:
    from pydantic import ValidationError

    try:
        return ExportConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}.", "See --help.") from None
