"""`samples/sheet.html`: a few samples of every source with their supervised tokens marked, and the figures."""

import heapq
from pathlib import Path
from typing import Any

from draftsmith.core.config import Config
from draftsmith.core.pages import data_uri, template_environment
from draftsmith.core.samples import Sample
from draftsmith.data.inputs import unit_hash
from draftsmith.data.plots import plot_samples

_PER_SOURCE = 5
_MOST_CHARACTERS = 6000


class Examples:
    """A few samples of every source, drawn by their ids."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[float, str, Sample]]] = {}

    def see(self, sample: Sample) -> None:
        """Perhaps keep a sample."""
        heap = self._heaps.setdefault(sample.source, [])
        item = (-unit_hash(sample.sample_id), sample.sample_id, sample)
        if len(heap) < _PER_SOURCE:
            heapq.heappush(heap, item)
        elif item > heap[0]:
            heapq.heapreplace(heap, item)

    def samples(self) -> list[Sample]:
        """Those that were kept, source by source."""
        return [item[2] for heap in self._heaps.values() for item in sorted(heap, reverse=True)]


def sheet_html(config: Config, tokenizer: Any, folder: Path, figures: dict[str, Any], examples: Examples) -> str:
    """The sheet as one self-contained page.

    Args:
        config: the run's config.
        tokenizer: of the target.
        folder: `samples/`, its Parquet file written.
        figures: of its manifest.
        examples: samples to show.
    """
    shown = [
        (sample, [(marked, _shown(tokenizer, ids), len(ids)) for marked, ids in sample.segments])
        for sample in examples.samples()
    ]
    plot = data_uri(plot_samples(folder, figures))
    return (
        template_environment("draftsmith.data")
        .get_template("sheet.html.j2")
        .render(name=config.run.name, target=config.target.path, figures=figures, shown=shown, plot=plot)
    )


def _shown(tokenizer: Any, ids: list[int]) -> str:
    """Text of a stretch; of a very long one its two ends."""
    text: str = tokenizer.decode(ids)
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - _MOST_CHARACTERS:,} characters ...]\n{text[-half:]}"
