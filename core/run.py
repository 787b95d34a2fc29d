"""The run folder: one obvious place for every file of a run."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.core.atomic import remove_leftovers, write_text
from draftsmith.core.config import Config
from draftsmith.core.config_io import dump_config

COMPLETE = "COMPLETE"


@dataclass(frozen=True)
class RunFolder:
    """Paths of `runs/NAME/`; nothing is created by asking for one."""

    root: Path

    @classmethod
    def of(cls, config: Config) -> "RunFolder":
        """The folder that `run.dir` and `run.name` name."""
        return cls(Path(config.run.dir) / config.run.name)

    @property
    def samples(self) -> Path:
        """Parquet samples and their manifest."""
        return self.root / "samples"

    @property
    def vocab_mapping(self) -> Path:
        """d2t and t2d."""
        return self.root / "vocab_mapping.safetensors"

    @property
    def hidden_states(self) -> Path:
        """The hidden-state store."""
        return self.root / "hidden_states"

    @property
    def checkpoints(self) -> Path:
        """`step-NNNNNNN/` folders."""
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        """What vLLM loads."""
        return self.root / "export"

    @property
    def eval(self) -> Path:
        """The report."""
        return self.root / "eval"

    @property
    def metrics(self) -> Path:
        """Every logged scalar, one JSON object a line."""
        return self.root / "metrics.jsonl"

    def open(self, config: Config) -> None:
        """Create the folder, write the resolved config and clear what a killed process left."""
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, self.checkpoints, self.eval):
            remove_leftovers(folder)
        write_text(self.root / "config.yaml", dump_config(config))

    def complete_checkpoints(self) -> list[Path]:
        """Checkpoints with their COMPLETE marker, oldest first."""
        return sorted(p for p in self.checkpoints.glob("step-*") if (p / COMPLETE).is_file())
