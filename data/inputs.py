"""Sources -> the conversations to use: read once, then sorted out by their hashes alone."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

import numpy as np

from draftsmith.core.config import Config, SourceConfig
from draftsmith.core.conversations import Conversation, Skipped
from draftsmith.core.errors import UserError
from draftsmith.core.progress import meter
from draftsmith.core.revisions import Revisions, pinned
from draftsmith.core.sources import read_conversations, source_name
from draftsmith.data.contamination import Contamination
from draftsmith.data.dedup import alike_groups, content_key, exact_duplicates, near_duplicates, opening_key, setting_key
from draftsmith.data.disk_list import DiskList
from draftsmith.data.similarity import Signatures, Signer, prompt_words
from draftsmith.data.split import held_out
from draftsmith.data.tally import Tally, skipped


@dataclass(frozen=True)
class Inputs:
    """The conversations to use, in reading order, and which of them are held out (bool [N])."""

    conversations: Sequence[Conversation]
    held_out: np.ndarray


class _Reader:
    """The first pass: conversations to disk, their hashes to memory."""

    def __init__(
        self, config: Config, tokenizer: Any, vocab_size: int, folder: Path, tally: Tally, revisions: Revisions
    ) -> None:
        self.config, self.tally, self._vocab_size, self._revisions = config, tally, vocab_size, revisions
        self.conversations: DiskList[Conversation] = DiskList(folder / "conversations")
        self.signatures = Signatures(folder / "signatures", config.data.dedup.permutations)
        self.ids, self.contents, self.openings, self.settings = (array("Q") for _ in range(4))
        self._signer = Signer(config.data.dedup)
        self._contamination = Contamination(config, tokenizer.decode, revisions)
        self._keep = config.data.replies != "regenerate"
        self._replies_dropped = not self._keep and config.data.history == "own"

    def read(self, source: SourceConfig, name: str) -> None:
        """Read one source.

        Raises:
            UserError: it gives no conversation.
        """
        tally, first, taken = self.tally.sources[name], "", 0
        with meter(f"reading {name}", None, "conversations") as shown:
            at, roles = pinned(source, self._revisions), self.config.data.roles
            for row in read_conversations(at, name, roles, tally.shapes, self._replies_dropped):
                problem = row if isinstance(row, Skipped) else self._outside_vocabulary(row)
                if problem:
                    self.tally.skip(problem)
                    first = first or f" The first skipped: {problem.place}: {problem.reason} ({problem.detail})."
                elif isinstance(row, Conversation) and self._drawn(row, source.weight):
                    taken += 1
                    shown.advance()
                    self._take(row)
                    if taken == source.limit:
                        break
        tally.conversations = taken
        if not taken:
            raise UserError(
                f"data source `{source.path}` gives no conversation.{first}",
                "Each row must be an object with `messages`, `conversations`, `prompt` or `prompt_token_ids`.",
            )

    def _drawn(self, row: Conversation, weight: float) -> bool:
        return weight >= 1 or unit_hash(f"weight {self.config.run.seed} {row.id}") < weight

    def _take(self, row: Conversation) -> None:
        signature = self._signer.sign(prompt_words(row))
        if match := self._contamination.match(row, signature):
            warn_only = self.config.data.contamination.action == "warn"
            self.tally.remove(skipped(row, "contaminated", match), listed_only=warn_only)
            if not warn_only:
                return
        self.conversations.append(row)
        self.signatures.append(signature)
        self.ids.append(int(unit_hash(row.id) * 2**48))
        self.contents.append(content_key(row, self._keep))
        self.openings.append(opening_key(row))
        self.settings.append(setting_key(row))

    def _outside_vocabulary(self, row: Conversation) -> Skipped | None:
        highest = max((max(ids) for t in row.tokens for ids in (t.prompt_ids, t.reply_ids) if ids), default=-1)
        if highest < self._vocab_size:
            return None
        return skipped(row, "bad_token_ids", f"id {highest}, and the target has {self._vocab_size} tokens")


def read_inputs(
    config: Config,
    tokenizer: Any,
    vocab_size: int,
    folder: Path,
    tally: Tally,
    revisions: Revisions = MappingProxyType({}),
) -> Inputs:
    """Read all sources, drop duplicates and what evaluation sets hold, and draw the split.

    Args:
        config: the run's config.
        tokenizer: of the target.
        vocab_size: V of the target.
        folder: scratch space, as large as the sources; to be kept as long as the result is used.
        tally: counts and lists what is not used.
        revisions: commits of the sources that lie on the hub.

    Raises:
        UserError: a source is missing, damaged, or gives nothing.
    """
    reader = _Reader(config, tokenizer, vocab_size, folder, tally, revisions)
    for source, name in zip(config.data.sources, source_names(config), strict=True):
        reader.read(source, name)
    ids, contents, openings, settings = (
        np.asarray(a, dtype=np.uint64) for a in (reader.ids, reader.contents, reader.openings, reader.settings)
    )
    dedup = config.data.dedup
    earlier = exact_duplicates(contents)
    keep = np.ones(len(contents), dtype=np.bool_)
    if dedup.exact:
        keep &= earlier == np.arange(len(contents))
        _list_duplicates(reader, "exact_duplicate", earlier)
    if dedup.near:
        nearly = near_duplicates(reader.signatures, np.flatnonzero(keep), dedup.threshold, settings)
        keep &= nearly == np.arange(len(contents))
        _list_duplicates(reader, "near_duplicate", nearly)
    chosen = np.flatnonzero(keep)
    if not len(chosen):
        raise UserError(
            "every conversation is in an evaluation set.",
            "Use other data.sources, or set data.contamination.action to warn.",
        )
    # Of exact copies the first stands for all; what is dropped ties nothing together.
    distinct = np.flatnonzero(keep & (earlier == np.arange(len(contents))))
    groups = alike_groups(reader.signatures, distinct, dedup.threshold, contents, openings)
    held = held_out(groups[chosen], contents[chosen], config.data.eval_share, config.run.seed)
    renamed = exact_duplicates(ids[chosen]) != np.arange(len(chosen))
    return Inputs(_Chosen(reader.conversations, chosen, renamed), held)


def source_names(config: Config) -> list[str]:
    """A name of its own for every source: two files `a/x.jsonl` and `b/x.jsonl` must not share made-up ids."""
    names = [source_name(source.path) for source in config.data.sources]
    return [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]


def unit_hash(text: str) -> float:
    """A number in [0, 1) that only the text decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def _list_duplicates(reader: _Reader, reason: str, earlier: np.ndarray) -> None:
    for i in np.flatnonzero(earlier != np.arange(len(earlier))):
        row, other = reader.conversations[int(i)], reader.conversations[int(earlier[i])]
        reader.tally.remove(skipped(row, reason, f"of {other.place}"))


class _Chosen(Sequence[Conversation]):
    """Those conversations that are used; one whose id an earlier one has too gets its number added to it."""

    def __init__(self, items: Sequence[Conversation], chosen: np.ndarray, renamed: np.ndarray) -> None:
        self._items, self._chosen, self._renamed = items, chosen, renamed

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Conversation]: ...
    def __getitem__(self, index: int | slice) -> Conversation | Sequence[Conversation]:
        if isinstance(index, slice):
            return _Chosen(self._items, self._chosen[index], self._renamed[index])
        number = int(self._chosen[index])
        row = self._items[number]
        return replace(row, id=f"{row.id}@{number}") if self._renamed[index] else row
