"""Checkpoints on their way to the disk, off the training thread: one at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """Writes what it is handed; a failure is raised where the next thing is handed over, or at the end of the block."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Writer":
        return self

    def submit(self, write: Callable[[], None]) -> None:
        """Write this, once what came before is on the disk."""
        self.wait()
        self._pending = self._pool.submit(write)

    def wait(self) -> None:
        """Until everything is on the disk."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What was handed over is written, whatever ended the block; its own error is not hidden by another one."""
        try:
            self.wait()
        except Exception:
            if error is None:
                raise
        finally:
            self._pool.shutdown()
