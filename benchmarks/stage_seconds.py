"""
What the cost model gives a run's stages, beside what they took: profile, plan and run in turns, three jobs.

- ``gsm8k``: 400 GSM8K prompts and a 175B model's answer lengths, the tiny Llama of ``gsm8k.py``, 64 slots.
- ``tail``: 240 prompts of 32 to 256 tokens, log-normal completions, 7M parameters, 32 slots.
- ``50m``: 96 prompts of 16 to 128 tokens, completions of 8 to 64, 50M parameters, 16 slots.

All seconds are CPU seconds of one thread. Each turn profiles anew and runs its plan; ``--again`` runs each
plan twice: what the two differ by is the machine's. ``missed`` is the report's: stages measured over those
modelled at the machine's pace, minus one.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from cpu_clock import limit_cpu_seconds
from engine_peers import SHAPES, job_of
from gsm8k import write_prompts

from batchbound.data.problem import Problem
from batchbound.data.trace import Trace
from batchbound.data.workload import Workload
from batchbound.heuristics.loop import execute
from batchbound.heuristics.replay_and_repair import Replay
from batchbound.profiling import measure
from batchbound.solvers.result import Limits
from batchbound.solvers.solve import solve

JOBS: dict[str, tuple[tuple[int, int, int, int, int, int, str], int, int]] = {
    "gsm8k": ((50_257, 64, 176, 2, 4, 2, "float32"), 64, 256),
    "tail": (SHAPES["7m"], 32, 256),
    "50m": (SHAPES["50m"], 16, 128),
}
"""A model's shape as of ``engine_peers.py``, slots, and the longest prompt to profile."""


def model_of(shape: tuple[int, int, int, int, int, int, str]) -> Any:
    """Return a Llama of random weights."""
    from transformers import AutoConfig

    from batchbound.executor.models.source import build_random

    vocabulary, hidden, intermediate, layers, heads, kv_heads, _ = shape
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
    return build_random(config, seed=0).eval()


def lengths_of(job: str, data: Path) -> Workload:
    """Return a job's lengths."""
    if job != "gsm8k":
        kind, count = ("tail", 240) if job == "tail" else ("short", 96)
        lengths = [(len(one["prompt"]), one["tokens"]) for one in job_of(kind, count, JOBS[job][0][0])]
    else:
        from batchbound.executor.models.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(str(data / "gpt2_bpe"))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prompts.jsonl"
            write_prompts(data, path, "175b_finetuning")
            rows = [json.loads(line) for line in path.read_text().splitlines()[:400]]
        lengths = [
            (len(tokenizer.encode(row["body"]["prompt"])), max(1, row["output_tokens"])) for row in rows
        ]
    return Workload.from_lengths([prompt for prompt, _ in lengths], [answer for _, answer in lengths])


def turn(model: Any, workload: Workload, job: str, runs: int) -> list[dict[str, Any]]:
    """Profile, plan and run; return each run's pace, what was missed, and seconds by kind of stage."""
    from batchbound.executor.engines.huggingface import HuggingFaceEngine, vocabulary_of
    from batchbound.executor.engines.tiers import choose_tier
    from batchbound.executor.models.prompts import Prompts
    from batchbound.executor.reports.report import pace_of

    _, slots, longest = JOBS[job]
    tier = choose_tier(model)
    cost = measure(model, slots=slots, prompt_tokens=longest, tier=tier).cost
    problem = Problem(workload, cost, slots, prefill_emits_first_token=True)
    schedule = solve(problem, limits=Limits(seconds=4)).schedule
    assert schedule is not None
    tokens = Prompts.random(workload, vocabulary_of(model), seed=0).tokens

    def seconds(trace: Trace) -> dict[str, list[float]]:
        kinds: dict[str, list[float]] = {stage.kind: [0.0, 0.0] for stage in trace.stages}
        for stage in trace.stages:
            kinds[stage.kind][0] += stage.seconds
            kinds[stage.kind][1] += stage.model_seconds(cost)
        return kinds

    found = []
    for _ in range(runs):
        engine = HuggingFaceEngine(problem, model, tokens, np.asarray(workload.output_tokens), tier=tier)
        trace = execute(problem, Replay(schedule, problem), engine)
        pace, missed = pace_of([(cost, trace)])
        found.append({"job": job, "pace": pace, "missed": missed, "measured_and_model_s": seconds(trace)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("BATCHBOUND_DATA", "../shared/data"))
    )
    parser.add_argument("--jobs", nargs="*", choices=sorted(JOBS), default=sorted(JOBS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--again", action="store_true", help="run each plan twice")
    parser.add_argument("--output", type=Path, help="JSON, written after every turn")
    options = parser.parse_args()
    # Before the engine is imported, which takes its clock then.
    limit_cpu_seconds()
    import torch

    torch.set_num_threads(1)
    models = {job: model_of(JOBS[job][0]) for job in options.jobs}
    workloads = {job: lengths_of(job, options.data) for job in options.jobs}
    found: list[dict[str, Any]] = []
    for number in range(options.turns):
        for job in options.jobs:
            new = turn(models[job], workloads[job], job, 2 if options.again else 1)
            found += [{"turn": number, **one} for one in new]
            for one in new:
                print(
                    f"{job:6s} turn {number}: pace {one['pace']:.3f}, missed {one['missed']:+.1%}", flush=True
                )
            if options.output:
                options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for job in options.jobs:
        sizes = sorted(abs(one["missed"]) for one in found if one["job"] == job)
        print(
            f"{job:6s} missed: median {sizes[len(sizes) // 2]:.1%}, most {sizes[-1]:.1%} of {len(sizes)} runs"
        )


if __name__ == "__main__":
    main()
