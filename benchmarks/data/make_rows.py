"""Writes a JSONL file of synthetic pre-tokenised rows: python make_rows.py FILE ROWS [--seed N].

Prompts and replies are of 16 to 64 ids with a skewed distribution; one row in a hundred repeats an earlier prompt
with one id changed, one in a hundred repeats it exactly, and one in a thousand is broken.
"""

import argparse
import json
from pathlib import Path

import numpy as np

VOCAB = 49152


def rows(count: int, seed: int):
    rng = np.random.default_rng(seed)
    kept: list[list[int]] = []
    for i in range(count):
        draw = rng.random()
        if draw < 0.001:
            yield "{broken"
            continue
        ids = (rng.random(int(rng.integers(32, 128))) ** 3 * VOCAB).astype(int).tolist()
        half = len(ids) // 2
        prompt, reply = ids[:half], [*ids[half:], 2]
        if draw < 0.02 and kept:
            prompt = list(kept[int(rng.integers(len(kept)))])
            if draw < 0.01:
                prompt[len(prompt) // 2] = 7
        elif len(kept) < 1000:
            kept.append(prompt)
        yield json.dumps({"id": i, "prompt_token_ids": prompt, "response_token_ids": reply, "model": "target"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("rows", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with args.file.open("w", encoding="utf-8") as out:
        for line in rows(args.rows, args.seed):
            out.write(line + "\n")


if __name__ == "__main__":
    main()
