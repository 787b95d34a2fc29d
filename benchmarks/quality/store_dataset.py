"""Our store as a data set of speculators 0.9: what its own one would have read from its files.

speculators supervises the token that follows a reply token (its mask is that of the input token). So do we here, where
the store has the target's state: the state at a reply's last token, which says what would follow the reply, is not in
the store, and that one row a reply is not supervised. A server never drafts there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils  # noqa: F401  (before any placeholder exists)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from placeholders import placeholders

with placeholders("openai", "datasets", "loguru", "pydantic_settings", "dotenv") as REPLACED:
    import speculators.train.cli as speculators_cli
    from speculators.train.data import BaseDataset
    from speculators.train.dataloader import _setup_dataloader

from draftsmith.hidden_state_capture.reader import HiddenStateStore

__all__ = ["REPLACED", "StoreDataset", "loader", "speculators_cli"]


class StoreDataset(BaseDataset):
    """Samples of one split; opened anew in every worker."""

    def __init__(self, folder: Path, split: str, max_len: int, dtype: torch.dtype = torch.bfloat16) -> None:
        """Open the store; sample i is the i-th of the split by sample id."""
        self.store = HiddenStateStore(folder, "speculators")
        self.numbers = self.store.numbers(split)
        super().__init__(max_len, dtype)

    def __len__(self) -> int:
        return len(self.numbers)

    def _compute_approx_lengths(self) -> list[int]:
        return self.store.lengths(self.numbers)

    def _get_raw_data(self, index: int) -> dict[str, Any]:
        sample = self.store[self.numbers[index]]
        tokens, rows = len(sample.input_ids_T), sample.last_rows_M.long()
        last_TH = torch.zeros(tokens, sample.last_states_MH.shape[1], dtype=sample.last_states_MH.dtype)
        last_TH[rows] = sample.last_states_MH
        known_T = torch.zeros(tokens, dtype=torch.bool)
        known_T[rows] = True
        return {
            "hidden_states": sample.aux_states_TAH.flatten(1).clone(),
            "input_ids": sample.input_ids_T.long(),
            "verifier_last_hidden_states": last_TH,
            "loss_mask": sample.loss_mask_T.bool() & known_T,
        }

    def __getstate__(self) -> dict[str, Any]:
        store = HiddenStateStore.__new__(HiddenStateStore)
        store.__dict__ |= {k: v for k, v in vars(self.store).items() if k != "_shards"}  # mapped files do not travel
        return {**vars(self), "store": store}


def loader(folder: Path, split: str, total_seq_len: int, **named: Any) -> Any:
    """Its own DataLoader, sampler and collator over the store.

    Args:
        folder: `hidden_states/` of a run.
        split: `train` or `eval`.
        total_seq_len: tokens of a packed batch.
        named: further arguments of its `_setup_dataloader`.
    """
    return _setup_dataloader(StoreDataset(folder, split, total_seq_len), total_seq_len, **named)
