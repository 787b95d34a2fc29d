"""Held-out samples as a draft reads them: of the captured layers those that it takes, in its order."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.config import Config
from draftsmith.core.draft_folder import DraftFolder
from draftsmith.core.errors import UserError
from draftsmith.core.progress import say
from draftsmith.core.target import Target
from draftsmith.eval.offline import HeldOut
from draftsmith.hidden_state_capture.reader import HiddenStateStore


class ColumnsOf(HeldOut):
    """The held-out samples with only some of the captured layers, in a draft's order."""

    def __init__(self, store: HiddenStateStore, tokens_per_batch: int, columns: Sequence[int]) -> None:
        """Plan the batches; `columns` are those of the store's layer ids."""
        super().__init__(store, tokens_per_batch)
        self._columns = list(columns)

    def _read(self, batch: list[int]) -> Batch:
        whole = super()._read(batch)
        if self._columns == list(range(whole.aux_TAH.shape[1])):
            return whole
        decoded = whole.to(torch.device("cpu"))
        aux: Tensor = decoded.aux_TAH[:, self._columns]
        return replace(decoded, aux_TAH=aux)


def captured_for(config: Config, store: HiddenStateStore, name: str, draft: DraftFolder) -> ColumnsOf | None:
    """What a draft is replayed on; None, and said, where it reads layers that were not captured."""
    captured: list[int] = store.manifest["layer_ids"]
    if missing := [i for i in draft.layer_ids if i not in captured]:
        say(f"{name} reads layers {missing}, which were not captured ({captured}): it is not replayed")
        return None
    return ColumnsOf(store, config.train.tokens_per_batch, [captured.index(i) for i in draft.layer_ids])


def check_fits(folder: Path, draft: DraftFolder, target: Target) -> None:
    """Refuse a draft of a target of other sizes.

    Raises:
        UserError: its width or its vocabulary is not the target's.
    """
    shape = draft.shape
    if (shape.hidden_size, shape.vocab_size) != (target.hidden_size, target.vocab_size):
        raise UserError(
            f"{folder} drafts for a target of width {shape.hidden_size} and {shape.vocab_size} tokens; "
            f"{target.path} has {target.hidden_size} and {target.vocab_size}.",
            "Name drafts of this target.",
        )
