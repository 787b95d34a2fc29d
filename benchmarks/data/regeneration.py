"""Replies a second: `prepare`'s regeneration against the bare engine, on the same prompts, in turns, in one process.

    python benchmarks/data/regeneration.py ../shared/data/prompts/train.jsonl --prompts 4000 --out regeneration.json

Bare is `LLM.generate` on ids that are rendered already. Ours renders, asks turn by turn, and writes the journal.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from draftsmith.core.config import Config
from draftsmith.core.conversations import Conversation
from draftsmith.core.engine import in_engine_process, vllm_engine
from draftsmith.core.progress import meter
from draftsmith.core.sources import read_conversations
from draftsmith.core.target import load_tokenizer, resolve_target
from draftsmith.data.dialogues import Dialogues
from draftsmith.data.journal import Journal
from draftsmith.data.regenerate import answer_on_engine, sampling_params


def measure(config: Config, conversations: list[Conversation], rounds: int) -> dict[str, Any]:
    from vllm import TokensPrompt

    target = resolve_target(config.target)
    tokenizer = load_tokenizer(target, config.target)
    with tempfile.TemporaryDirectory() as folder:
        dialogues = Dialogues(config, tokenizer, conversations, Journal(Path(folder)))
        requests = list(iter(dialogues.take, None))
    prompts = [TokensPrompt(prompt_token_ids=r.prompt_ids) for r in requests]
    params = [sampling_params(config, r) for r in requests]
    rates: dict[str, list[float]] = {"bare": [], "ours": []}
    with vllm_engine(config.target, target, max_model_len=config.data.max_length, seed=0) as llm:
        version = __import__("vllm").__version__
        llm.generate(prompts[:64], params[:64], use_tqdm=False)
        for _ in range(rounds):
            begin = time.monotonic()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            rates["bare"].append(tokens / (time.monotonic() - begin))
            print(json.dumps(rates), flush=True)
            with tempfile.TemporaryDirectory() as folder, meter("ours", None, "replies") as shown:
                begin = time.monotonic()
                journal = Journal(Path(folder))
                dialogues = Dialogues(config, tokenizer, conversations, journal)
                first = dialogues.take()
                assert first
                answer_on_engine(config, llm, dialogues, first, shown)
                rows = [row for rows in journal.rows(journal.confirmed()) for row in rows]
                ours = sum(end - start for row in rows for start, end in row.loss_spans)
                rates["ours"].append(ours / (time.monotonic() - begin))
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    return {
        "prompts": len(prompts), "tokens": tokens, "tokens_ours": ours, "rounds": rates, **medians,
        "ratio": round(medians["ours"] / medians["bare"], 4), "vllm": version,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out")
    args = parser.parse_args()
    config = Config.model_validate(
        {
            "target": {"path": args.target, "dtype": args.dtype, "engine_args": {"max_num_seqs": 1024}},
            "data": {"max_length": 2048, "sampling": {"max_tokens": args.max_tokens}},
        }
    )
    rows = (row for row in read_conversations(args.source) if isinstance(row, Conversation))
    result = in_engine_process(measure, config, list(itertools.islice(rows, args.prompts)), args.rounds)
    print(json.dumps(result))
    if args.out:
        Path(args.out).write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
