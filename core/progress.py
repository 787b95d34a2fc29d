"""Progress with rate and ETA: a rich bar on a terminal, plain lines (one every few seconds) elsewhere."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Logs are no 80-column terminals: tables would lose their headings.
console = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 120)
_LINE_SECONDS = 10.0


class Meter:
    """Counts towards a total; `advance` also takes the figures to show beside the count."""

    def __init__(
        self,
        label: str,
        total: int | None,
        unit: str,
        bar: tuple[Progress, Any] | None,
        start: int = 0,
        silent: bool = False,
    ) -> None:
        self._silent = silent
        self.label, self.total, self.unit = label, total, unit
        self._bar, self._start, self.done = bar, start, start
        self._begin = self._last = time.monotonic()
        self._text = ""

    def figures(self, **figures: str) -> None:
        """Show `key value` pairs beside the count until others are given."""
        self._text = "  ".join(f"{k} {v}" for k, v in figures.items())

    def advance(self, n: int = 1, **figures: str) -> None:
        """Count `n` more units done, with new figures if any are given."""
        self.done += n
        if figures:
            self.figures(**figures)
        if self._bar:
            progress, task = self._bar
            progress.update(task, completed=self.done, figures=self._text)
        elif not self._silent and time.monotonic() - self._last >= _LINE_SECONDS:
            self._last = time.monotonic()
            console.print(f"{self.label}: {self._state()}  {self._text}".rstrip())

    def _state(self) -> str:
        elapsed = max(time.monotonic() - self._begin, 1e-9)
        rate = (self.done - self._start) / elapsed
        if self.total is None:
            return f"{self.done:,} {self.unit}, {rate:,.1f}/s"
        eta = f"{(self.total - self.done) / rate:.0f} s left" if rate else "no estimate yet"
        return f"{self.done}/{self.total} {self.unit}, {rate:,.1f}/s, {eta}"


@contextmanager
def meter(label: str, total: int | None, unit: str, start: int = 0) -> Iterator[Meter]:
    """A `Meter` for the length of the block.

    Args:
        label: what is being done.
        total: units in all; None: nobody knows.
        unit: plural name of the units.
        start: units that an earlier run had done.
    """
    begin = time.monotonic()
    if os.environ.get("RANK", "0") != "0":  # the first process of a distributed run speaks for all
        yield Meter(label, total, unit, None, start, silent=True)
        return
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit),
            TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[figures]}"),
        )  # fmt: skip
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(label, total=total, completed=start, figures="")
            yield Meter(label, total, unit, (progress, task), start)
        return
    shown = Meter(label, total, unit, None, start)
    yield shown
    seconds = time.monotonic() - begin
    of_all = "" if total is None else f"/{total}"
    console.print(f"{label}: {shown.done}{of_all} {unit} in {seconds:.0f} s")


def say(text: str) -> None:
    """One line of plain information, from the first process of a distributed run only."""
    if os.environ.get("RANK", "0") == "0":
        console.print(text, markup=False)
