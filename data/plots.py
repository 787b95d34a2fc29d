"""One picture of the samples: lengths, sources, and what was not used."""

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib.axes import Axes

from draftsmith.core.damage import reading
from draftsmith.core.samples import FILE

_ROWS = 8192
_BINS = 40
_MOST_BARS = 12


def read_lengths(folder: Path) -> dict[str, np.ndarray]:
    """Tokens of every sample, by source; the ids themselves are read in portions."""
    found: dict[str, list[np.ndarray]] = {}
    with reading(folder / FILE, "Run `draftsmith prepare --fresh`."), pq.ParquetFile(folder / FILE) as table:
        for batch in table.iter_batches(batch_size=_ROWS, columns=["input_ids", "source"]):
            lengths = pc.list_value_length(batch.column(0)).to_numpy()
            sources = np.array(batch.column(1).to_pylist())
            for source in np.unique(sources):
                found.setdefault(str(source), []).append(lengths[sources == source])
    return {source: np.concatenate(parts) for source, parts in found.items()}


def plot_samples(folder: Path, figures: dict[str, Any]) -> bytes:
    """PNG of lengths by source, rows by source, and rows that were skipped or removed, by reason.

    Args:
        folder: `samples/`.
        figures: of its manifest.
    """
    lengths = read_lengths(folder)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    edges = np.linspace(0, max(int(v.max()) for v in lengths.values()) + 1, _BINS)
    left.hist(list(lengths.values()), bins=list(edges), stacked=True, label=[_short(name) for name in lengths])
    left.set(xlabel="tokens of a sample", ylabel="samples", title="Lengths")
    if len(lengths) <= _MOST_BARS:
        left.legend(frameon=False, fontsize=8)
    _bars(middle, {name: source["samples"] for name, source in figures["sources"].items()}, "Samples by source")
    _bars(right, {**figures["skipped"], **figures["removed"]}, "Rows that are not used")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return buffer.getvalue()


def _bars(axes: Axes, counts: dict[str, int], title: str) -> None:
    most = sorted(counts.items(), key=lambda item: item[1])[-_MOST_BARS:]
    axes.set_title(title if most else f"{title}: none")
    if not most:
        axes.set_axis_off()
        return
    bars = axes.barh([_short(name) for name, _ in most], [n for _, n in most], color="#4269d0")
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    axes.set_ylim(-0.6, max(len(most), 4) - 0.4)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _short(name: str) -> str:
    return name if len(name) <= 24 else name[:23] + "…"
