"""Replies as they come in, one line each, so that a killed `prepare` goes on with what it has.

`replies.jsonl` lies in a folder that is named after everything that decides the replies (stage.py). Lines are only
appended; what a kill cut off at the end is dropped when the file is opened again, and a damaged line is asked again.
Only replies whose prompt is today's become rows. Memory holds places in the file.
"""

import json
from array import array
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from draftsmith.core.progress import say
from draftsmith.data.rows import Row

FILE = "replies.jsonl"
_Key = tuple[int, int, int]  # conversation, reply, turn


class Journal:
    """Replies by the conversation's number, which of its replies it is, and turn."""

    def __init__(self, folder: Path) -> None:
        """Open, or begin, the journal in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / FILE).open("a+b")
        self._places: dict[_Key, int] = {}
        self._confirmed: set[_Key] = set()
        self._file.seek(0)
        end, damaged = 0, list[int]()
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            if key := _key(line):
                self._places[key] = end
            else:
                damaged.append(number)
            end += len(line)
        self._file.truncate(end)
        if damaged:
            lines = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
            say(f"warning: {folder / FILE}: damaged at line {lines}; what stood there is asked again")

    def __len__(self) -> int:
        return len(self._places)

    def add(
        self, conversation: int, reply: int, turn: int, prompt_ids: list[int], reply_ids: list[int], finish_reason: str
    ) -> None:
        """Write one reply through to the operating system: a killed process loses none."""
        key = (conversation, reply, turn)
        line = json.dumps([*key, prompt_ids, reply_ids, finish_reason], separators=(",", ":"))
        self._places[key] = self._file.seek(0, 2)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        self._confirmed.add(key)

    def get(self, conversation: int, reply: int, turn: int, prompt_ids: list[int]) -> tuple[list[int], str] | None:
        """Reply ids and finish reason, if that turn has been answered for this very prompt.

        The prompt is compared: another reading of the sources may have moved the conversations' numbers.
        """
        key = (conversation, reply, turn)
        place = self._places.get(key)
        if place is None:
            return None
        *_, given, reply_ids, finish_reason = self._read(place)
        if given != prompt_ids:
            return None
        self._confirmed.add(key)
        return reply_ids, finish_reason

    def confirmed(self) -> "array[int]":
        """Places of all replies that were added or got since the journal was opened, in order of their turns.

        An entry that nobody asked for is of a conversation that the sources no longer have there.
        """
        return array("Q", (self._places[key] for key in sorted(self._confirmed)))

    def rows(self, places: Iterable[int]) -> Iterator[list[Row]]:
        """Rows of every reply to every conversation, a row a turn, in order, of what is at `places`."""
        entries = map(self._read, places)
        for (conversation, reply), turns in groupby(entries, key=lambda entry: (int(entry[0]), int(entry[1]))):
            rows = []
            for *_, turn, prompt_ids, reply_ids, finish_reason in turns:
                span = (len(prompt_ids), len(prompt_ids) + len(reply_ids))
                rows.append(Row(conversation, turn, prompt_ids + reply_ids, [span], finish_reason, "target", reply))
            yield rows

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, place: int) -> Any:
        self._file.seek(place)
        return json.loads(self._file.readline())


def _key(line: bytes) -> _Key | None:
    """Key of a whole line; None for anything else, also for JSON that is no reply."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match entry:
        case [int(conversation), int(reply), int(turn), list(prompt_ids), list(reply_ids), "stop" | "length"]:
            whole = all(isinstance(i, int) for ids in (prompt_ids, reply_ids) for i in ids)
            return (conversation, reply, turn) if whole else None
    return None
