"""The commit that every data set of the Hugging Face hub is read at.

A name, a branch or a tag moves on, also while a run is stopped. So it is resolved to a commit at first use, and a stage
records what it found: the same run reads the same rows whenever it goes on.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draftsmith.core.config import SourceConfig
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import read_manifest
from draftsmith.core.run import RunFolder
from draftsmith.core.sources import HUB, fingerprint, is_hub

# `name@revision`, as the config gives them -> commit.
Revisions = Mapping[str, str]


def hub_revisions(sources: Iterable[SourceConfig | str], kept: Revisions) -> dict[str, str]:
    """Commits of all sources that lie on the hub.

    Args:
        sources: as in `data.sources`, or just their paths.
        kept: what was found before; it is not asked for again.

    Raises:
        UserError: the hub does not know a set, or cannot be reached and the set is not on this machine.
    """
    found = {}
    for given in sources:
        source = _source(given)
        if is_hub(source.path):
            found[_key(source)] = kept.get(_key(source)) or _resolve(source)
    return found


def pinned(source: SourceConfig | str, revisions: Revisions) -> SourceConfig:
    """The source at its commit; one that is not on the hub as it is."""
    full = _source(source)
    return full.model_copy(update={"revision": revisions.get(_key(full), full.revision)})


def content(source: SourceConfig | str, revisions: Revisions) -> str | None:
    """What tells whether a set is the one of before: the hash of its files, or its commit on the hub, where known."""
    full = pinned(source, revisions)
    return full.revision if is_hub(full.path) else fingerprint(full)


def recorded_revisions(run: RunFolder) -> Revisions:
    """What `prepare` found, of its sources and of the evaluation sets that it looked for."""
    revisions: dict[str, str] = (read_manifest(run.samples) or {}).get("revisions", {})
    return revisions


def _source(given: SourceConfig | str) -> SourceConfig:
    return SourceConfig(path=given) if isinstance(given, str) else given


def _key(source: SourceConfig) -> str:
    return f"{source.path}@{source.revision or 'main'}"


def _resolve(source: SourceConfig) -> str:
    if source.revision and re.fullmatch(r"[0-9a-f]{40}", source.revision):
        return source.revision
    from huggingface_hub import HfApi, snapshot_download

    name = source.path.removeprefix(HUB)
    where: dict[str, Any] = {"repo_type": "dataset", "revision": source.revision}
    try:
        return str(HfApi().repo_info(name, **where).sha)
    except Exception as error:  # the hub client raises many unrelated types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    try:  # without a network: what was downloaded last
        return Path(snapshot_download(name, **where, local_files_only=True)).name
    except Exception:
        raise UserError(
            f"data source `{source.path}`: its revision `{source.revision or 'main'}` was not found: {reason}.",
            "Check its name and revision, the network and your access to the hub; or download it and give the folder.",
        ) from None
