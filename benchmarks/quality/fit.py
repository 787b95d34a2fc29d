"""Acceptance length against training tokens: length = a - b * tokens^-c, and when a length was reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

_EXPONENTS = np.geomspace(0.02, 3.0, 600)


@dataclass(frozen=True)
class Fit:
    """length = a - b * tokens^-c.

    Attributes:
        a: what no number of tokens would pass.
        b, c: how fast it comes near, for tokens in millions.
        rms: of the residuals.
        at_bound: the exponent lies at the end of what was tried: the points do not say where they end.
    """

    a: float
    b: float
    c: float
    rms: float
    at_bound: bool

    def at(self, tokens: float) -> float:
        """Length after so many training tokens."""
        return float(self.a - self.b * (tokens / 1e6) ** -self.c)

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def fit(tokens: Sequence[float], lengths: Sequence[float]) -> Fit:
    """Least squares: a and b exactly for every exponent of a fine grid, the best of them.

    Args:
        tokens: training tokens of every point, at least three different ones.
        lengths: acceptance lengths.

    Raises:
        ValueError: too few points.
    """
    if len(set(tokens)) < 3:
        raise ValueError(f"a curve of three parameters needs three sizes of data or more, not {len(set(tokens))}.")
    x, y = np.asarray(tokens, dtype=float) / 1e6, np.asarray(lengths, dtype=float)
    best: Fit | None = None
    for i, c in enumerate(_EXPONENTS):
        columns = np.stack([np.ones_like(x), -(x**-c)], axis=1)
        (a, b), *_ = np.linalg.lstsq(columns, y, rcond=None)
        rms = float(np.sqrt(np.mean((columns @ [a, b] - y) ** 2)))
        if best is None or rms < best.rms:
            best = Fit(float(a), float(b), float(c), rms, i in (0, len(_EXPONENTS) - 1))
    assert best is not None
    return best


def time_to_reach(curve: Sequence[tuple[float, float]], length: float) -> float | None:
    """Seconds at which a training first reached an acceptance length, between evaluations on a straight line.

    Args:
        curve: (seconds, acceptance length), in order of time.
        length: wanted.

    Returns:
        None where it never did.
    """
    before: tuple[float, float] | None = None
    for seconds, reached in curve:
        if reached >= length:
            if before is None or reached == before[1]:
                return seconds
            part = (length - before[1]) / (reached - before[1])
            return before[0] + part * (seconds - before[0])
        before = (seconds, reached)
    return None
