"""
Complete GSM8K questions by three engines on the same weights: what an evaluation's generation takes.

``LLM.generate``, transformers' ``generate`` on full batches in file order, and transformers' continuous
batching, each on a model loaded for it, one after the other in one process on one thread. Completions are
greedy and end at an end token of the model or at the cap; they are compared, token by token, with those of
``generate``. CPU seconds are those of the process from the first prompt to the last token, without loading
and two short prompts before. ``--batches`` adds ``generate`` on batches of another size.

    python benchmarks/evaluation_engines.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from engine_speed import Job, continuous_batching, left_padded

from batchbound import LLM
from batchbound.executor.models.source import load_model
from batchbound.executor.models.tokenizers import Tokenizer, end_tokens, load_tokenizer

Completions = list[list[int]]
Engine = Callable[[Any, Tokenizer, Completions, int, int], Completions]
"""Takes a model, its tokenizer, the prompts, slots and the cap."""


def by_ours(model: Any, tokenizer: Tokenizer, prompts: Completions, slots: int, cap: int) -> Completions:
    """Complete by ``LLM.generate``."""
    found: Completions = [[] for _ in prompts]
    for one in LLM(model, tokenizer, slots=slots).generate(prompts, max_tokens=cap, temperature=0):
        found[one.index] = list(one.completion_ids)
    return found


def by_generate(model: Any, tokenizer: Tokenizer, prompts: Completions, slots: int, cap: int) -> Completions:
    """Complete by ``generate``, one full batch after the other."""
    ends = end_tokens(model, tokenizer)
    found = []
    for begin in range(0, len(prompts), slots):
        ids, mask = left_padded(prompts[begin : begin + slots])
        whole = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=cap,
            do_sample=False,
            eos_token_id=sorted(ends),
            pad_token_id=min(ends, default=0),
        )
        found += [until_end(row, ends) for row in whole[:, ids.shape[1] :].tolist()]
    return found


def by_continuous(
    model: Any, tokenizer: Tokenizer, prompts: Completions, slots: int, cap: int
) -> Completions:
    """Complete by transformers' continuous batching."""
    ends = sorted(end_tokens(model, tokenizer))
    return continuous_batching(model, [Job(prompt, cap) for prompt in prompts], slots, end=ends)


def in_batches(size: int) -> Engine:
    """Return ``generate`` on batches of a size, whatever the slots."""
    return lambda model, tokenizer, prompts, slots, cap: by_generate(model, tokenizer, prompts, size, cap)


OURS, GENERATE = "`LLM.generate`", "`generate` of transformers"
ENGINES: dict[str, Engine] = {
    OURS: by_ours,
    GENERATE: by_generate,
    "transformers' continuous batching": by_continuous,
}


def until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Return the tokens up to the first end token, with it."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


def measured(engine: Engine, args: argparse.Namespace, prompts: Completions) -> tuple[float, Completions]:
    """Return an engine's CPU seconds and completions."""
    model, tokenizer = load_model(args.model, dtype=args.dtype), load_tokenizer(args.model)
    engine(model, tokenizer, [prompt[:8] for prompt in prompts[:2]], 2, 4)
    start = time.process_time()
    found = engine(model, tokenizer, prompts, args.slots, args.max_tokens)
    return time.process_time() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="as batchbound run takes it")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--batches", type=int, help="another size of batches for generate")
    data = Path(os.environ.get("BATCHBOUND_DATA", "../shared/data"))
    parser.add_argument("--file", type=Path, default=data / "gsm8k" / "test.jsonl")
    parser.add_argument("--output", type=Path, help="rows for docs/write_results.py, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.model)
    with args.file.open(encoding="utf-8") as lines:
        questions = [
            json.loads(line)["question"] for line, _ in zip(lines, range(args.questions), strict=False)
        ]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]
    found: dict[str, tuple[float, Completions]] = {}
    engines = dict(ENGINES)
    if args.batches:
        engines[f"{GENERATE}, batches of {args.batches}"] = in_batches(args.batches)
    for name, engine in engines.items():
        found[name] = measured(engine, args, prompts)
        print(f"{name}: {found[name][0]:.1f} CPU s", flush=True)
    reference = found[GENERATE][1]
    rows = []
    least = found[OURS][0]
    for name, (seconds, completions) in found.items():
        tokens = sum(map(len, completions))
        equal = sum(a == b for a, b in zip(completions, reference, strict=True))
        rows.append(
            [
                name,
                f"{seconds:.1f}",
                f"{tokens / seconds:.0f}",
                f"{seconds / least:.1f}",
                f"{equal} of {len(prompts)}",
            ]
        )
        print(" | ".join(rows[-1]))
    if args.output:
        args.output.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
