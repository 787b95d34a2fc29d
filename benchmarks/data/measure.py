"""Reads sources, drops duplicates and contaminated rows, draws the split, and renders every prompt; no engine.

    python measure.py SOURCE [--contamination SET ...]

Prints seconds and the peak resident size after each part; the imports and the tokenizer are a part of their own.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

START = time.monotonic()


def report(what: str, begin: float, **figures: object) -> float:
    now = time.monotonic()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    said = "  ".join(f"{k} {v}" for k, v in figures.items())
    print(f"{what}: {now - begin:.1f} s, peak {peak:.0f} MiB  {said}", flush=True)
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("--contamination", nargs="*", default=[])
    args = parser.parse_args()
    from draftsmith.core.config import Config
    from draftsmith.core.rendering import render_prompt
    from draftsmith.core.target import load_tokenizer, resolve_target
    from draftsmith.data.inputs import read_inputs, source_names
    from draftsmith.data.tally import Tally

    config = Config.model_validate(
        {"data": {"sources": [{"path": args.source}], "contamination": {"sets": args.contamination}}}
    )
    target = resolve_target(config.target)
    tokenizer = load_tokenizer(target, config.target)
    now = report("imports and tokenizer", START)
    with tempfile.TemporaryDirectory() as folder:
        tally = Tally(source_names(config), Path(folder, "skipped.jsonl"))
        read = read_inputs(config, tokenizer, target.vocab_size, Path(folder), tally)
        counts = next(iter(tally.sources.values()))
        now = report(
            "read, de-duplicated, checked, split", now, used=len(read.conversations), held_out=read.held_out.sum(),
            removed=dict(counts.removed), skipped=dict(counts.skipped),
        )  # fmt: skip
        tokens = sum(
            len(c.tokens[0].prompt_ids if c.tokens else render_prompt(tokenizer, c.request, c.place, c.tools))
            for c in read.conversations
        )
        report("rendered", now, tokens=tokens)
    report("in all", START)


if __name__ == "__main__":
    main()
