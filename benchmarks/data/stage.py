"""The whole of `prepare` on pre-tokenised rows, the rows' own replies in the engine's place: python stage.py FILE RUNS.

Prints seconds and the peak resident size of the process.
"""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from draftsmith.core.config import Config
from draftsmith.core.conversations import Conversation
from draftsmith.core.target import Target
from draftsmith.data import stage
from draftsmith.data.rows import Row


def given(config: Config, target: Target, conversations: Sequence[Conversation], journal: Path) -> Iterator[Row]:
    for i, conversation in enumerate(conversations):
        turn = conversation.tokens[0]
        start, ids = len(turn.prompt_ids), turn.prompt_ids + (turn.reply_ids or [])
        yield Row(i, 0, ids, [(start, len(ids))], "stop", "target")


def main() -> None:
    file, runs = sys.argv[1:]
    stage.regenerate = given
    stage.require_vllm = lambda stage: None
    begin = time.monotonic()
    stage.prepare(
        Config.model_validate({"run": {"name": Path(file).stem, "dir": runs}, "data": {"sources": [{"path": file}]}})
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{time.monotonic() - begin:.0f} s, peak {peak:.0f} MiB")


if __name__ == "__main__":
    main()
