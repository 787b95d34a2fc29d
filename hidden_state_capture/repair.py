"""`store repair`: an index that is lost is made again from the shards (reindex.py).

A store that lost some shards becomes a capture that is not finished, and `capture` goes on with it.

1. Beside the manifest: whatever is whole in a damaged shard, in a shard of its own (salvage.py), sidecars of the good
   ones, `inputs.json`, `probe.json`, the rejected samples, and links to the damaged shards in `damaged/`. The store is
   still what it was.
2. The manifest is removed. From here on it is a capture in progress that has the good shards.
3. The damaged shards under their own names, and the index, which the capture writes anew, are removed.

A kill before 2 leaves the store as it was, to be repaired again; a kill after it leaves a capture to go on with.
"""

from dataclasses import replace
from pathlib import Path

from draftsmith.core.atomic import fsync_path, write_json
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import MANIFEST
from draftsmith.core.progress import say
from draftsmith.core.store import DAMAGED, INDEX, INPUTS, PROBE
from draftsmith.hidden_state_capture.merge import place
from draftsmith.hidden_state_capture.reader import store_manifest
from draftsmith.hidden_state_capture.reindex import index_is_readable, rebuild_index
from draftsmith.hidden_state_capture.salvage import salvage
from draftsmith.hidden_state_capture.verify import Verdict, verify_store

_OF_THE_INDEX = ("shard", "split", "source")


def repair_store(folder: Path, samples: Path | None = None, jobs: int | None = None) -> Verdict:
    """Verify a store; where shards or samples are lost, turn it into an unfinished capture of the others.

    Args:
        folder: the store.
        samples: `samples/` of the run; None: the store alone.
        jobs: as in `verify_store`.

    Returns:
        What was found; without faults no state was touched.

    Raises:
        UserError: there is no complete store, its index is lost and its samples are not there, or a fault is of the
            store as a whole.
    """
    manifest = store_manifest(folder, "store repair")
    if not index_is_readable(folder):
        listed = rebuild_index(folder, manifest, samples)
        say(f"{folder}: the index was missing or damaged; made again from the shards, {listed} samples")
    verdict = verify_store(folder, samples, jobs)
    if beyond := [f for f in verdict.faults if f.shard is None and not f.missing]:
        who = f"sample {beyond[0].sample_id}: " if beyond[0].sample_id else ""
        raise UserError(f"{folder} cannot be repaired: {who}{beyond[0].what}.", "Run `draftsmith capture --fresh`.")
    if verdict.faults:
        if isinstance(verdict.manifest["inputs"]["samples_manifest_sha256"], list):
            raise UserError(
                f"{folder} was merged from stores of several runs, and no capture makes its samples again.",
                "Repair those stores and merge again.",
            )
        verdict = replace(verdict, kept=salvage(folder, verdict))
        _set_aside(folder, verdict.bad_shards)
        _reopen(folder, verdict)
        for name in (INDEX, *verdict.bad_shards):
            (folder / name).unlink(missing_ok=True)
    return verdict


def _set_aside(folder: Path, bad: list[str]) -> None:
    """The damaged shards once more in `damaged/`, under a name that no earlier repair has given."""
    aside = folder / DAMAGED
    for name in bad:
        if not (folder / name).is_file():
            continue
        aside.mkdir(exist_ok=True)
        if any(there.samefile(folder / name) for there in aside.iterdir()):  # by a repair that was killed
            continue
        taken = len(list(aside.glob(f"{name}*")))
        place(folder / name, aside / (f"{name}.{taken}" if taken else name))


def _reopen(folder: Path, verdict: Verdict) -> None:
    """Make the files of a capture in progress, then remove the manifest."""
    manifest, bad = verdict.manifest, set(verdict.bad_shards)
    for shard in manifest["shards"]:
        if shard["file"] not in bad:
            rows = [{k: v for k, v in r.items() if k not in _OF_THE_INDEX} for r in verdict.rows[shard["file"]]]
            write_json((folder / shard["file"]).with_suffix(".json"), {"shard": shard, "rows": rows})
    write_json(folder / INPUTS, manifest["inputs"])
    write_json(folder / PROBE, manifest["probe"])
    if manifest["rejected"]:
        write_json(folder / f"rejected-{len(manifest['shards']):05d}.json", manifest["rejected"])
    (folder / MANIFEST).unlink()
    fsync_path(folder)
