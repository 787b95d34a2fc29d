"""Trains named variants of one run side by side on its samples and states; one JSON line each.

    python3 benchmarks/quality/ablate.py --config FILE [section.key=value ...] --side-by-side 5 --seconds 600 \
        [--only 'loss-*' base] [--seeds 0 1] [--plus muon loss-kl] [--serve 3]

The run must be prepared and captured. What has a line in --out is not trained again; what --seconds stopped goes on
from its checkpoint with the same command. --plus takes the named variants' settings together, as one variant.
--serve N exports the base and the N best by replay, and serves them on the config's sets (`eval compare --serve`).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from runs import derive, link, machine, train_tokens, trained
from side_by_side import Job, run_jobs

from draftsmith.core.config import Config
from draftsmith.core.config_io import load_config
from draftsmith.core.run import RunFolder
from draftsmith.hidden_state_capture.reader import HiddenStateStore

HERE = Path(__file__).parent
VOCABULARY = "data.draft_vocab_size"


@dataclass(frozen=True)
class Variant:
    """A training.

    Attributes:
        name: what the results call it.
        settings: over the base's, by dotted key.
        seed: of the order and the initial weights; None: the base's.
        share: of the base's training tokens.
    """

    name: str
    settings: dict[str, Any]
    seed: int | None = None
    share: float = 1.0

    @property
    def key(self) -> str:
        """Its name in the results and, after the base's, in the run folder."""
        return self.name if self.seed is None else f"{self.name}-seed{self.seed}"

    @property
    def own_samples(self) -> bool:
        """It needs replies of its own."""
        return any(k.startswith("data.") and k != VOCABULARY for k in self.settings)

    @property
    def own_states(self) -> bool:
        """It needs states of its own."""
        return self.own_samples or any(k.startswith("capture.") for k in self.settings)

    def overrides(self, run_name: str) -> list[str]:
        """For draftsmith's command line."""
        seed = {} if self.seed is None else {"run.seed": self.seed}
        told = self.settings | seed | {"run.name": run_name}
        return [f"{key}={json.dumps(value)}" for key, value in told.items()]


def read_variants(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> settings; an empty one is the config as it stands."""
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: dict(settings or {}) for name, settings in read.items()}


def choose(known: dict[str, dict[str, Any]], only: list[str], seeds: list[int], plus: list[list[str]]) -> list[Variant]:
    """The variants to train, seed by seed; --plus ones after the named ones.

    Args:
        known: all named variants.
        only: patterns of names; empty: all that need no engine.
        seeds: of the training; empty: the config's.
        plus: names whose settings are taken together.
    """
    if unknown := [p for p in only if not fnmatch.filter(known, p)] + [n for p in plus for n in p if n not in known]:
        raise SystemExit(f"no variant is called {', '.join(unknown)}; known: {', '.join(known)}")
    if only:
        named = [n for n in known if any(fnmatch.fnmatchcase(n, p) for p in only)]
    else:
        named = [] if plus else [n for n in known if not Variant(n, known[n]).own_states]
    settings = {n: known[n] for n in named}
    settings |= {"+".join(names): {k: v for n in names for k, v in known[n].items()} for names in plus}
    return [Variant(n, s, seed) for seed in (seeds or [None]) for n, s in settings.items()]


@dataclass(frozen=True)
class Plan:
    """What is asked for: a base run, how its config is told to draftsmith, and what run folders' names end with."""

    file: Path
    overrides: tuple[str, ...]
    tag: str = ""

    @property
    def base(self) -> Config:
        """Config of the base run."""
        return load_config(self.file, self.overrides)

    def run_name(self, variant: Variant) -> str:
        """Folder name of a variant's run."""
        return f"{self.base.run.name}-{variant.key}{self.tag and '-'}{self.tag}"

    def config(self, variant: Variant) -> Config:
        """Config of a variant."""
        return load_config(self.file, [*self.overrides, *variant.overrides(self.run_name(variant))])

    def job(self, variant: Variant, stage: str, *more: str) -> Job:
        """A stage of draftsmith on a variant."""
        words = ("--config", str(self.file), *self.overrides, *variant.overrides(self.run_name(variant)), *more)
        return Job(variant.key, stage, words, RunFolder.of(self.config(variant)).root / f"{stage}.log")

    def prepare(self, variant: Variant) -> None:
        """Make the variant's run folder; an engine makes what the base has not got."""
        old, run = RunFolder.of(self.base), RunFolder.of(self.config(variant))
        if variant.own_samples or variant.own_states:
            if not variant.own_samples:
                run.root.mkdir(parents=True, exist_ok=True)
                link(run.samples, old.samples)
                link(run.vocab_mapping, old.vocab_mapping)
            self.job(variant, "capture").run()  # which prepares what is missing
        else:
            derive(old, run.root, variant.share)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The results so far."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def train_all(plan: Plan, variants: list[Variant], at_once: int, seconds: float, out: Path) -> list[str]:
    """Train what has no line yet, and write a line for each that ends; returns what did not."""
    ends, have = time.monotonic() + seconds, {line["name"] for line in lines_of(out)}
    todo = {v.key: v for v in variants if v.key not in have}
    for variant in todo.values():
        plan.prepare(variant)
    store = HiddenStateStore(RunFolder.of(plan.base).hidden_states, "the ablation")

    def done(job: Job, took: float) -> None:
        variant, config = todo[job.name], plan.config(todo[job.name])
        own = HiddenStateStore(RunFolder.of(config).hidden_states, "the ablation")
        line = {"kind": "ablation", "name": variant.key, "variant": variant.name, "settings": variant.settings}
        tokens = train_tokens(own)
        line |= {"seed": config.run.seed, "train_tokens": tokens, "tokens_seen": tokens * config.train.epochs}
        line |= trained(config, store) | {"process_seconds": round(took, 1), "side_by_side": at_once}
        line["ttt_steps"] = config.train.ttt_steps
        line["resumed"] = "going on from step" in job.log.read_text(
            encoding="utf-8"
        )  # its seconds are not of one piece
        line |= {"run": str(RunFolder.of(config).root), "machine": machine()}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{variant.key}: {line['replay_last']}, {line['steps_per_second']} steps/s", flush=True)

    return run_jobs([plan.job(v, "train") for v in todo.values()], at_once, ends - time.monotonic(), done)


def serve(plan: Plan, variants: dict[str, Variant], count: int, out: Path, k: int = 5) -> None:
    """Export the base and the best of the others by replay at K = k, and compare them served on the config's sets."""
    lines = [line for line in lines_of(out) if line["name"] in variants]
    best = sorted((line for line in lines if line["variant"] != "base"), key=lambda line: -line["replay_last"][str(k)])
    wanted = [line for line in lines if line["variant"] == "base"][:1] + best[:count]
    folders = []
    for line in wanted:
        variant = variants[line["name"]]
        plan.job(variant, "export", "export.verify=offline").run()
        folders.append(str(RunFolder.of(plan.config(variant)).export))
    told = [word for text in plan.overrides for word in ("--set", text)]
    words = ("compare", "--config", str(plan.file), *told, "--serve", "--out", str(out.with_suffix(".served.json")))
    Job("served", "eval", (*words, *folders), out.with_suffix(".served.log")).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--variants", type=Path, default=HERE / "variants.yaml")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN")
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--plus", nargs="+", action="append", default=[], metavar="NAME")
    parser.add_argument("--side-by-side", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="for the trainings, replay included")
    parser.add_argument("--serve", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("ablation.jsonl"))
    parser.add_argument(
        "--tag", default="", help="ends the run folders' names; for other overrides of the same variants"
    )
    given = parser.parse_args()
    plan = Plan(given.config, tuple(given.overrides), given.tag)
    variants = choose(read_variants(given.variants), given.only, given.seeds, given.plus)
    left = train_all(plan, variants, given.side_by_side, given.seconds, given.out)
    if given.serve:
        serve(plan, {v.key: v for v in variants}, given.serve, given.out)
    print("\n".join(left), file=sys.stderr)
    raise SystemExit(1 if left else 0)


if __name__ == "__main__":
    main()
