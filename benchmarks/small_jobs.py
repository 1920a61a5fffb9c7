"""
How many random jobs of six to twelve requests are solved to a proven optimum in a CPU second.

Each has two to four slots; most have a KV capacity between what the largest request and what the largest
requests of all slots hold, many a token cap, a bend or a floor of prefill stages. Lengths are uniform up to
8, 30 or 200, or heavy-tailed. What is solved is what `plan` solves; each certificate that can be repeated is
checked with `--verify`. Counts are written by kind of lengths, with a KV capacity and without.

    python benchmarks/small_jobs.py --instances 200 --first 0 --seconds 1 [--verify] --json small.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
from cpu_clock import limit_cpu_seconds

from batchbound.data.arrays import IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.models.certificates.checker import verify_bound
from batchbound.solvers import Limits, solve
from batchbound.solvers.result import Status

LENGTHS = ("8", "30", "200", "tail")


def lengths(kind: str, count: int, rng: np.random.Generator) -> IntArray:
    """Return random lengths of a kind of :data:`LENGTHS`."""
    if kind == "tail":
        return np.clip(np.round(rng.lognormal(3.0, 1.0, count)), 1, 2_000).astype(np.int64)
    return rng.integers(1, int(kind) + 1, count)


def random_job(seed: int) -> tuple[str, Problem]:
    """Return the kind of a job's lengths, and the job; each limit is there or not."""
    rng = np.random.default_rng(seed)
    kind, count, slots = str(rng.choice(LENGTHS)), int(rng.integers(6, 13)), int(rng.integers(2, 5))
    prompts, outputs = lengths(kind, count, rng), lengths(kind, count, rng)
    total = int(prompts.sum())
    bends = rng.random() < 0.35
    cost = CostModel(
        prefill_base=float(np.exp(rng.uniform(np.log(0.3), np.log(30.0)))),
        prefill_per_token=float(rng.choice([0.0, 0.005, 0.1])),
        decode_base=1.0,
        decode_per_slot=float(rng.choice([0.0, 0.02])),
        prefill_floor=float(rng.uniform(0.0, 40.0)) if rng.random() < 0.2 else 0.0,
        decode_per_kv_token=float(rng.choice([0.0, 1e-4])),
        prefill_bend=float(rng.uniform(0.05, 0.6)) * total if bends else 0.0,
        prefill_per_token_beyond=float(rng.choice([0.05, 0.3])) if bends else 0.0,
    )
    first = bool(rng.random() < 0.5)
    peaks = np.sort(np.maximum(prompts, prompts + outputs - 1))
    least, most = int(peaks[-1]), int(peaks[-slots:].sum())
    return kind, Problem(
        Workload.from_lengths(prompts, outputs),
        cost,
        slots,
        kv_capacity=int(rng.integers(least, most + 1)) if rng.random() < 0.75 else None,
        prefill_token_cap=int(rng.integers(prompts.max(), total + 1)) if rng.random() < 0.45 else None,
        prefill_emits_first_token=first,
    )


def main() -> None:
    """Solve the jobs, print and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds a job")
    parser.add_argument("--verify", action="store_true", help="check each certificate")
    parser.add_argument("--json", type=Path, help="where the counts are written")
    options = parser.parse_args()
    limit_cpu_seconds()
    jobs, proven, took, unproven, wrong = Counter[str](), Counter[str](), list[float](), list[int](), []
    for seed in range(options.first, options.first + options.instances):
        kind, problem = random_job(seed)
        name = f"{kind}, {'slots' if problem.kv_capacity is None else 'memory'}"
        begun = time.process_time()
        result = solve(problem, limits=Limits(seconds=options.seconds))
        took.append(time.process_time() - begun)
        jobs[name] += 1
        proven[name] += result.status is Status.OPTIMAL
        if result.status is not Status.OPTIMAL:
            unproven.append(seed)
        assert result.schedule is not None
        refused = result.schedule.check(problem)
        if options.verify and refused is None and result.repeatable is not None:
            refused = verify_bound(problem, result.repeatable)
        if refused is not None:
            wrong.append(f"{seed}: {refused}")
    counts = {name: f"{proven[name]} of {jobs[name]}" for name in sorted(jobs)}
    counts["all"] = f"{proven.total()} of {jobs.total()}"
    told = {
        "seconds": options.seconds,
        "proven": counts,
        "longest CPU seconds": round(max(took), 2),
        "mean CPU seconds": round(float(np.mean(took)), 3),
        "not proven": unproven,
        "wrong": wrong,
    }
    print(json.dumps(told, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
