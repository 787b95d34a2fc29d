"""`draftsmith capture --shard i/n`, `capture merge` and `capture serve-args`: capture on several hosts."""

import re
import sys
from pathlib import Path

from draftsmith.core.atomic import remove
from draftsmith.core.config import Config
from draftsmith.core.errors import UserError
from draftsmith.core.progress import say
from draftsmith.core.run import RunFolder
from draftsmith.core.store import part_name


def capture_share(config: Config, shard: str, fresh: bool) -> None:
    """Capture one share into a store of its own; several may run at once, here and elsewhere.

    Args:
        config: of the run, which is prepared.
        shard: i/n, i from 0.
        fresh: delete the share's store first.
    """
    from draftsmith.hidden_state_capture.stage import capture

    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not int(match[1]) < int(match[2]):
        raise UserError(f"--shard {shard}: not i/n with i from 0 to n - 1.", "E.g. --shard 0/4 ... --shard 3/4.")
    index, of = int(match[1]), int(match[2])
    part = RunFolder(RunFolder.of(config).root / part_name(index, of))
    with part.lock():
        if fresh:
            remove(part.root)
        capture(config, (index, of))


def merge(config: Config, fresh: bool) -> None:
    """One store of all shares."""
    from draftsmith.hidden_state_capture.merge import merge_stores

    run = RunFolder.of(config)
    parts = sorted(run.root.glob(part_name("*", "*")), key=_place)
    if not parts:
        raise UserError(f"{run.root} has no parts of a capture.", "Run `draftsmith capture --shard i/n` first.")
    with run.lock():
        if fresh:
            remove(run.hidden_states)
        manifest = merge_stores(parts, run.hidden_states)
    say(f"hidden states: {sum(s['samples'] for s in manifest['shards'])} samples of {len(parts)} parts")


def serve_args(config: Config, fresh: bool) -> None:
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


ACTIONS = {"merge": merge, "serve-args": serve_args}
