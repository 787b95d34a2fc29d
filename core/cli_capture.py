"""`draftsmith capture`, a stage that is a group too: `--shard i/n`, `capture merge`, `capture serve-args`."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.core.cli_group import StageGroup
from draftsmith.core.config import Config
from draftsmith.core.config_io import load_config
from draftsmith.core.errors import UserError
from draftsmith.core.progress import say
from draftsmith.core.replacing import recover, replacing
from draftsmith.core.run import RunFolder
from draftsmith.core.store import part_name

capture_app = typer.Typer(
    cls=StageGroup,
    no_args_is_help=False,
    help="Stage 2: hidden states of the target; prepares what is missing. "
    "Usage: capture --config FILE [section.key=value ...] [--fresh] [--shard i/n], or one of the commands below.",
)
ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="YAML config of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, over the config file.")]


@capture_app.command("merge")
def merge_command(
    config: ConfigFile,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace the run's hidden_states/.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not read every byte of the parts first.")] = False,
) -> None:
    """One store of all that `capture --shard i/n` made, in the run's folder, without copying states."""
    merge(load_config(config, overrides), fresh, verify=not no_verify)


@capture_app.command("serve-args")
def serve_args_command(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the `vllm serve` command of a server that captures into the run's folder (capture.server)."""
    serve_args(load_config(config, overrides))


def which_share(shard: str) -> tuple[int, int]:
    """(i, n) of `--shard i/n`.

    Raises:
        UserError: it is no such thing.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not int(match[1]) < int(match[2]):
        raise UserError(f"--shard {shard}: not i/n with i from 0 to n - 1.", "E.g. --shard 0/4 ... --shard 3/4.")
    return int(match[1]), int(match[2])


def capture_share(config: Config, shard: str, fresh: bool) -> None:
    """Capture one share into a store of its own; several may run at once, here and elsewhere.

    Args:
        config: of the run, which is prepared.
        shard: i/n, i from 0.
        fresh: make the share's store anew.
    """
    from draftsmith.hidden_state_capture.stage import capture

    index, of = which_share(shard)
    part = RunFolder(RunFolder.of(config).root / part_name(index, of))
    with part.lock():
        recover(part.root)
        with replacing([part.root] if fresh else []):
            capture(config, (index, of))


def merge(config: Config, fresh: bool, verify: bool = True) -> None:
    """One store of all shares."""
    from draftsmith.hidden_state_capture.merge import merge_stores

    run = RunFolder.of(config)
    parts = sorted(run.root.glob(part_name("*", "*")), key=_place)
    if not parts:
        raise UserError(f"{run.root} has no parts of a capture.", "Run `draftsmith capture --shard i/n` first.")
    with run.lock():
        recover(run.hidden_states)
        with replacing([run.hidden_states] if fresh else []):
            manifest = merge_stores(parts, run.hidden_states, verify)
    say(f"hidden states: {sum(s['samples'] for s in manifest['shards'])} samples of {len(parts)} parts")


def serve_args(config: Config) -> None:
    """Print the command of a server that captures into the run's folder."""
    from draftsmith.core.target import resolve_layer_ids, resolve_target
    from draftsmith.hidden_state_capture.driver import Job
    from draftsmith.hidden_state_capture.served import serve_args as command

    run, target = RunFolder.of(config), resolve_target(config.target)
    layer_ids = resolve_layer_ids(config.capture, target.num_layers)
    # How many samples there are does not bound what a server may reject: the stage judges.
    job = Job(config, target, layer_ids, run.samples, run.hidden_states, first=0, engines=1, max_rejected=2**31)
    sys.stdout.write(command(job) + "\n")


def _place(part: Path) -> tuple[int, int]:
    index, of = re.findall(r"\d+", part.name)
    return int(of), int(index)
