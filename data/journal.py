"""Replies as they come in, one line each, so that a killed `prepare` goes on with what it has.

`replies.jsonl` lies in a folder that is named after everything that decides the replies (stage.py). Lines are only
appended; what a kill cut off at the end is dropped when the file is opened again. Memory holds places in the file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.data.rows import Row

FILE = "replies.jsonl"


class Journal:
    """Replies of conversations by number and turn."""

    def __init__(self, folder: Path) -> None:
        """Open, or begin, the journal in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / FILE).open("a+b")
        self._places: dict[int, dict[int, int]] = {}
        self._file.seek(0)
        end = 0
        for line in self._file:
            try:
                conversation, turn, *_ = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            self._places.setdefault(conversation, {})[turn] = end
            end += len(line)
        self._file.truncate(end)

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def add(
        self, conversation: int, turn: int, prompt_ids: list[int], reply_ids: list[int], finish_reason: str
    ) -> None:
        """Write one reply through to the operating system: a killed process loses none."""
        line = json.dumps([conversation, turn, prompt_ids, reply_ids, finish_reason], separators=(",", ":"))
        self._places.setdefault(conversation, {})[turn] = self._file.seek(0, 2)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def get(self, conversation: int, turn: int, prompt_ids: list[int]) -> tuple[list[int], str] | None:
        """Reply ids and finish reason, if that turn has been answered for this very prompt.

        The prompt is compared: another reading of the sources may have moved the conversations' numbers.
        """
        place = self._places.get(conversation, {}).get(turn)
        if place is None:
            return None
        _, _, given, reply_ids, finish_reason = self._read(place)
        return (reply_ids, finish_reason) if given == prompt_ids else None

    def rows(self) -> Iterator[list[Row]]:
        """Rows of every conversation, in order."""
        for conversation in sorted(self._places):
            turns = self._places[conversation]
            rows = []
            for turn in sorted(turns):
                _, _, prompt_ids, reply_ids, finish_reason = self._read(turns[turn])
                span = (len(prompt_ids), len(prompt_ids) + len(reply_ids))
                rows.append(Row(conversation, turn, prompt_ids + reply_ids, [span], finish_reason, "target"))
            yield rows

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, place: int) -> Any:
        self._file.seek(place)
        return json.loads(self._file.readline())
