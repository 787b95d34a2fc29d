"""The run folder: one obvious place for every file of a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from draftsmith.core.atomic import remove, remove_leftovers, sha256_json, write_text
from draftsmith.core.config import Config
from draftsmith.core.config_io import dump_config
from draftsmith.core.embedded import cache_folder
from draftsmith.core.errors import UserError

COMPLETE = "COMPLETE"


@dataclass(frozen=True)
class RunFolder:
    """Paths of `runs/NAME/`; nothing is created by asking for one. `report` is the name of the report's folder."""

    root: Path
    report: str = "eval"

    @classmethod
    def of(cls, config: Config) -> "RunFolder":
        """The folder that `run.dir` and `run.name` name."""
        return cls(Path(config.run.dir).expanduser() / config.run.name)

    @property
    def samples(self) -> Path:
        """Parquet samples and their manifest."""
        return self.root / "samples"

    @property
    def journal(self) -> Path:
        """Replies of an unfinished `prepare`, by the hash of its inputs; gone when it is done."""
        return self.root / "journal"

    @property
    def vocab_mapping(self) -> Path:
        """d2t and t2d."""
        return self.root / "vocab_mapping.safetensors"

    @property
    def hidden_states(self) -> Path:
        """The hidden-state store."""
        return self.root / "hidden_states"

    @property
    def spool(self) -> Path:
        """Hidden states on their way to training, in spool mode; gone when it is done."""
        return self.root / "spool"

    @property
    def checkpoints(self) -> Path:
        """`step-NNNNNNN/` folders."""
        return self.root / "checkpoints"

    @property
    def torchspec(self) -> Path:
        """What TorchSpec is given and what it writes, where it is the engine."""
        return self.root / "torchspec"

    @property
    def export(self) -> Path:
        """What vLLM loads."""
        return self.root / "export"

    @property
    def eval(self) -> Path:
        """The report."""
        return self.root / self.report

    @property
    def passes(self) -> Path:
        """What an unfinished `eval` has measured; gone when the report is written."""
        return self.root / f"{self.report}-passes"

    @property
    def metrics(self) -> Path:
        """Every logged scalar, one JSON object a line."""
        return self.root / "metrics.jsonl"

    @property
    def profile(self) -> Path:
        """What PyTorch's profiler recorded."""
        return self.root / "profile"

    @contextmanager
    def lock(self, side: str = "") -> Iterator[None]:
        """Keep other processes off the run while a stage works on it; the ranks of one torchrun share it.

        Args:
            side: of a stage that runs beside others; only its like are kept off.

        Raises:
            UserError: another process works on the run.
        """
        if os.environ.get("RANK", "0") != "0":
            yield
            return
        # Not in the run folder: a refused command leaves no trace there, and it may be read-only.
        locks = cache_folder() / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{sha256_json(str(self.root.resolve()))[:32]}{side}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"another draftsmith works on {self.root}.", "Wait for it to end, or choose another run.name."
            ) from None
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder for the length of the block; where the block fails, no empty run folder is left."""
        folder = self.root / "scratch"
        made = [p for p in (self.root, *self.root.parents) if not p.exists()]
        remove(folder)  # of a killed process
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            remove(folder)
            for path in made:
                with suppress(OSError):  # it holds something by now
                    path.rmdir()

    def open(self, config: Config) -> None:
        """Create the folder, write the resolved config and clear what a killed process left."""
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, self.checkpoints, self.eval):
            remove_leftovers(folder)
        write_text(self.root / "config.yaml", dump_config(config))

    def complete_checkpoints(self) -> list[Path]:
        """Checkpoints with their COMPLETE marker, oldest first."""
        return sorted(p for p in self.checkpoints.glob("step-*") if (p / COMPLETE).is_file())
