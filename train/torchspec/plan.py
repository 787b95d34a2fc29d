"""Everything that a training with TorchSpec is made of, worked out and checked before anything is written."""

import itertools
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import sha256_json
from draftsmith.core.config import Config
from draftsmith.core.draft_shape import DraftShape, resolve_shape
from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, TrainSamples, iter_samples
from draftsmith.core.target import Target, resolve_layer_ids, resolve_target
from draftsmith.core.vocab import VocabMapping, load_mapping
from draftsmith.train.torchspec.checkpoints import Iteration, newest_whole
from draftsmith.train.torchspec.config import Files, batch_samples, context_length, torchspec_config
from draftsmith.train.torchspec.kept import check_settings, check_target
from draftsmith.train.torchspec.rows import usable

_UNCHECKED = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        shape: the draft's.
        layer_ids: auxiliary ones, vLLM's.
        keys: names of the target's embedding, final norm and lm_head.
        mapping: the draft's vocabulary; None: `prepare` has not run.
        train, held_out: samples that become rows.
        steps: optimizer steps in all; 0 where there are no samples yet.
        newest: TorchSpec's newest whole checkpoint; it is gone on from.
    """

    config: Config
    run: RunFolder
    target: Target
    shape: DraftShape
    layer_ids: list[int]
    keys: tuple[str, str, str]
    mapping: VocabMapping | None
    train: list[Sample]
    held_out: list[Sample]
    steps: int
    newest: Iteration | None

    @property
    def folder(self) -> Path:
        """`runs/NAME/torchspec`, absolute: TorchSpec's processes have other working directories."""
        return self.run.torchspec.resolve()

    @property
    def files(self) -> Files:
        """Where everything lies; the cache under a name of its own for every set of settings.

        The key of TorchSpec's own evaluation cache has neither the engine, its layers nor the rows in it.
        """
        start = self.folder / "start" if self.newest is None else self.folder / "output" / "checkpoints"
        eval_rows = self.folder / "eval.jsonl" if self.held_out else None
        return Files(self.folder, self._cache(), eval_rows, start)

    def _cache(self) -> Path:
        ids = [(s.sample_id, s.input_ids) for s in self.held_out]
        decides = [self.config.target.model_dump(mode="json"), self.config.train.torchspec.backend, self.layer_ids, ids]
        return self.folder / f"cache-{sha256_json(decides)[:12]}"

    def tree(self) -> dict[str, Any]:
        """TorchSpec's config."""
        tree = torchspec_config(
            self.config, self.target, self.shape, self.layer_ids, self.keys, self.files, self.steps or None
        )
        if self.newest is not None:
            tree["training"]["continual_training"] = False
        return tree

    def command(self) -> list[str]:
        """What is started; it can be started by hand too."""
        python = self.config.train.torchspec.python or sys.executable
        files = ["--config", str(self.folder / "torchspec.yaml"), "--aside", str(self.folder / "aside.safetensors")]
        return [python, str(self.folder / "entry.py"), *files]

    def environment(self) -> dict[str, str]:
        """Over ours."""
        address = self.config.train.torchspec.ray_address
        return {
            "TORCHSPEC_LOG_DIR": str(self.folder / "logs"),
            **({"RAY_ADDRESS": address} if address else {}),
        }

    def shown(self) -> str:
        """The command as a shell takes it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment().items()]
        return " ".join([*variables, shlex.join(self.command())])


def make_plan(config: Config, dry: bool = False) -> Plan:
    """Resolve and check everything.

    Args:
        config: ours.
        dry: nothing will be started, so samples, vocabulary and the target's weights may be missing.

    Raises:
        UserError: TorchSpec cannot do what the config says, or `prepare` has not run.
    """
    run, target = RunFolder.of(config), resolve_target(config.target)
    prepared = run.vocab_mapping.is_file() or not dry
    mapping = load_mapping(run.vocab_mapping) if prepared else None
    layer_ids = resolve_layer_ids(config.capture, target.num_layers)
    size = config.data.draft_vocab_size or target.vocab_size  # a mapping of another size is made again, or refused
    shape = resolve_shape(config.draft, target, len(layer_ids), size)
    check_settings(config, shape, layer_ids)
    weights = any(target.local_path.glob("*.safetensors")) or not dry
    keys = check_target(config, target) if weights else _UNCHECKED
    train, held_out = _samples(config, run, target) if prepared else ([], [])
    each, steps = batch_samples(config), 0
    if prepared:
        if len(train) < each:
            raise UserError(
                f"{len(train)} samples can be trained on, and an optimizer step takes {each} (training GPUs times "
                "train.torchspec.micro_batch_size times train.grad_accum_steps).",
                "Lower these, or prepare more samples.",
            )
        steps = config.train.epochs * (len(train) // each)
    newest = newest_whole(run.torchspec / "output" / "checkpoints")
    return Plan(config, run, target, shape, layer_ids, keys, mapping, train, held_out, steps, newest)


def _samples(config: Config, run: RunFolder, target: Target) -> tuple[list[Sample], list[Sample]]:
    longest = _longest(config, target)
    stored = TrainSamples(run.samples, longest)
    held_out = usable(iter_samples(run.samples, "eval"), longest)
    wanted = config.train.torchspec.eval_samples
    train = (stored[i] for i in range(len(stored)))
    return list(usable(train, longest)), list(itertools.islice(held_out, wanted))


def _longest(config: Config, target: Target) -> int:
    context = getattr(target.hf_config, "max_position_embeddings", None)
    beyond = context_length(config) - config.data.max_length
    return min(config.data.max_length, context - beyond) if isinstance(context, int) else config.data.max_length
