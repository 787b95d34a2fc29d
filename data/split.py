"""Which conversations are held out: decided by content and seed alone, and never through a group of alike ones."""

import numpy as np

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def held_out(groups: np.ndarray, keys: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Bool [N]: is the conversation held out.

    As many are held out as the share asks for, to the nearest one; whole groups, in an order drawn by seed and
    content, whatever the conversations' own order. A group that would be too many is passed over.

    Args:
        groups: int [N], group of every conversation.
        keys: uint64 [N], hash of its content.
        share: of the conversations, 0 to 1; if it is not 0, one at least is held out.
        seed: draws another order.
    """
    none = np.zeros(len(groups), dtype=np.bool_)
    if share == 0 or not len(groups):
        return none
    wanted = max(1, round(len(groups) * share))
    _, group, size = np.unique(groups, return_inverse=True, return_counts=True)
    drawn = np.full(len(size), np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(drawn, group, _shuffled(keys, seed))
    if size.min() > wanted:  # the smallest group is more than the share: better that than none
        wanted = int(size.min())
    chosen = np.zeros(len(size), dtype=np.bool_)
    for i in np.argsort(drawn):
        if size[i] <= wanted:
            chosen[i] = True
            wanted -= int(size[i])
        if not wanted:
            break
    out: np.ndarray = chosen[group]
    return out


def _shuffled(keys: np.ndarray, seed: int) -> np.ndarray:
    mixed = (keys ^ np.uint64((seed + 1) * int(_MULTIPLIER) % 2**64)) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> np.uint64(32))) * _MULTIPLIER
    shuffled: np.ndarray = mixed ^ (mixed >> np.uint64(29))
    return shuffled
