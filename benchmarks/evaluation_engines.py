"""
Complete GSM8K questions by three engines on the same weights: what an evaluation's generation takes.

``LLM.generate``, transformers' ``generate`` on full batches in file order, and transformers' continuous
batching, each on a model loaded for it, one after the other in one process on one thread. Completions are
greedy and end at an end token of the model or at the cap; they are compared, token by token, with those of
``generate``. CPU seconds are those of the process from the first prompt to the last token, without loading
and two short prompts before. ``--batches`` adds ``generate`` on batches of another size.

``--examples`` puts worked examples before each question, as few-shot evaluations do. ``--samples`` draws
several completions of each prompt, as RL does; they differ between engines, and are counted, not compared.

    python benchmarks/evaluation_engines.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    python benchmarks/evaluation_engines.py --model MODEL --examples 5 --max-tokens 64
    python benchmarks/evaluation_engines.py --model MODEL --questions 8 --samples 8 --slots 64
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from engine_speed import Job as PinnedJob
from engine_speed import continuous_batching, left_padded

from batchbound import LLM
from batchbound.executor.models.source import load_model
from batchbound.executor.models.tokenizers import Tokenizer, end_tokens, load_tokenizer

Completions = list[list[int]]


@dataclass(frozen=True)
class Job:
    """Prompts, and how an engine completes them.

    samples: Completions of each prompt, at temperature 1 if there are several, else greedy.
    """

    prompts: Completions
    slots: int
    cap: int
    samples: int = 1


Engine = Callable[[Any, Tokenizer, Job], Completions]
"""Returns the completions of a job, the samples of a prompt together."""


def by_ours(model: Any, tokenizer: Tokenizer, job: Job) -> Completions:
    """Complete by ``LLM.generate``."""
    rows: Completions = [[] for _ in range(len(job.prompts) * job.samples)]
    llm, temperature = LLM(model, tokenizer, slots=job.slots), float(job.samples > 1)
    for completion in llm.generate(
        job.prompts, max_tokens=job.cap, temperature=temperature, n=job.samples, top_k=0, top_p=1.0, seed=0
    ):
        rows[completion.index * job.samples + completion.sample] = list(completion.completion_ids)
    return rows


def by_generate(model: Any, tokenizer: Tokenizer, job: Job) -> Completions:
    """Complete by ``generate``, one full batch after the other."""
    ends = end_tokens(model, tokenizer)
    rows = []
    torch.manual_seed(0)
    how: dict[str, Any] = {"do_sample": False}
    if job.samples > 1:
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": job.samples}
    size = max(1, job.slots // job.samples)
    for begin in range(0, len(job.prompts), size):
        ids, mask = left_padded(job.prompts[begin : begin + size])
        whole = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=job.cap,
            eos_token_id=sorted(ends),
            pad_token_id=min(ends, default=0),
            **how,
        )
        rows += [until_end(row, ends) for row in whole[:, ids.shape[1] :].tolist()]
    return rows


def by_continuous(model: Any, tokenizer: Tokenizer, job: Job) -> Completions:
    """Complete by transformers' continuous batching."""
    ends = sorted(end_tokens(model, tokenizer))
    return continuous_batching(
        model, [PinnedJob(prompt, job.cap) for prompt in job.prompts], job.slots, end=ends
    )


def in_batches(size: int) -> Engine:
    """Return ``generate`` on batches of a size, whatever the slots."""
    return lambda model, tokenizer, job: by_generate(model, tokenizer, replace(job, slots=size))


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


def measured(engine: Engine, args: argparse.Namespace, job: Job) -> tuple[float, Completions]:
    """Return an engine's CPU seconds and completions."""
    model, tokenizer = load_model(args.model, dtype=args.dtype), load_tokenizer(args.model)
    engine(model, tokenizer, Job([prompt[:8] for prompt in job.prompts[:2]], 2 * job.samples, 4, job.samples))
    start = time.process_time()
    completions = engine(model, tokenizer, job)
    return time.process_time() - start, completions


def prompts_of(args: argparse.Namespace, tokenizer: Tokenizer) -> Completions:
    """Return the token ids of the questions, after their worked examples or in a chat's template."""
    with args.file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(args.questions + args.examples))]  # noqa: B905
    if not args.examples:
        return [tokenizer.encode_chat([{"role": "user", "content": row["question"]}]) for row in rows]
    shown = "".join(
        f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows[: args.examples]
    )
    return [tokenizer.encode(f"{shown}Question: {row['question']}\nAnswer:") for row in rows[args.examples :]]


def table(measurements: Mapping[str, tuple[float, Completions]], *, compared: bool) -> list[list[str]]:
    """Return a row for each engine; the last cell compares its completions, or counts their tokens."""
    reference, rows = measurements[GENERATE][1], []
    speeds = {name: sum(map(len, texts)) / seconds for name, (seconds, texts) in measurements.items()}
    for name, (seconds, texts) in measurements.items():
        equal = f"{sum(a == b for a, b in zip(texts, reference, strict=True))} of {len(texts)}"
        last = equal if compared else f"{sum(map(len, texts)):,}"
        against = f"{speeds[OURS] / speeds[name]:.1f}"
        rows.append([name, f"{seconds:.1f}", f"{speeds[name]:.0f}", against, last])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="as batchbound run takes it")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--examples", type=int, default=0, help="worked examples before each question")
    parser.add_argument("--samples", type=int, default=1, help="completions of each prompt")
    parser.add_argument("--batches", type=int, help="another size of batches for generate")
    data = Path(os.environ.get("BATCHBOUND_DATA", "../shared/data"))
    parser.add_argument("--file", type=Path, default=data / "gsm8k" / "test.jsonl")
    parser.add_argument("--output", type=Path, help="rows for docs/write_results.py, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = Job(prompts_of(args, load_tokenizer(args.model)), args.slots, args.max_tokens, args.samples)
    measurements: dict[str, tuple[float, Completions]] = {}
    engines = {
        name: engine for name, engine in ENGINES.items() if args.samples == 1 or name in (OURS, GENERATE)
    }
    if args.batches:
        engines[f"{GENERATE}, batches of {args.batches}"] = in_batches(args.batches)
    for name, engine in engines.items():
        measurements[name] = measured(engine, args, job)
        print(f"{name}: {measurements[name][0]:.1f} CPU s", flush=True)
    rows = table(measurements, compared=args.samples == 1)
    for row in rows:
        print(" | ".join(row))
    if args.output:
        args.output.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
