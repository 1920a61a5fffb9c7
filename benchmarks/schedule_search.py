"""
The schedule search on the hybrid paper's Table III: proven gap by size, limit and seed.

    python benchmarks/schedule_search.py --case table3 --seeds 10 --seconds 10 60
    python benchmarks/schedule_search.py --case small-100x20 --seeds 10 --seconds 60
    python benchmarks/schedule_search.py --case table3-cap2048 --kv-capacity 200000

Of each gap it says how much is lost by making slots whole ("whole slots"): the rest of it lies between the
bound and the best stage times met, at which fractions of slots suffice ("stage times").
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from batchbound.data.cost import CostModel
from batchbound.data.generators import generate
from batchbound.data.problem import Problem
from batchbound.solvers.proven_bound import proven_bound
from batchbound.solvers.schedule_search import search_schedule


@dataclass(frozen=True)
class Case:
    """A generator's name, requests, slots, seconds allowed, and the token cap of a stage."""

    workload: str
    requests: int
    slots: int
    seconds: tuple[float, ...]
    cap: int | None = None


CASES = {
    "table3": Case("table3", 1319, 200, (10.0, 60.0)),
    "table3-cap2048": Case("table3", 1319, 200, (60.0,), 2048),
    "table3-atom45": Case("table3-atom45", 1319, 200, (10.0, 60.0)),
    "table3-atom55": Case("table3-atom55", 1319, 200, (10.0, 60.0)),
    "table3-censored": Case("table3-censored", 1319, 200, (10.0, 60.0)),
    "small-100x20": Case("table3", 100, 20, (60.0,)),
    "10000x200": Case("table3", 10_000, 200, (30.0,)),
    "100000x1024": Case("table3", 100_000, 1024, (60.0,)),
}


def measure(problem: Problem, seconds: float | None, steps: int | None, seed: int) -> tuple[str, float]:
    """Return a line about one search, and its gap in percent."""
    begun, cpu = time.monotonic(), time.process_time()
    bound = proven_bound(problem)
    left = None if seconds is None else seconds - (time.monotonic() - begun)
    found = search_schedule(problem, seconds=left, iterations=steps, seed=seed, enough=bound.seconds)
    wall, cpu = time.monotonic() - begun, time.process_time() - cpu
    violation = found.schedule.check(problem)
    assert violation is None, violation
    gap = 100 * bound.gap(found.makespan)
    times = 100 * bound.gap(found.fractional)
    line = (
        f"{found.makespan:9.3f} s, gap {gap:.3f} % (stage times {times:.3f}, whole slots {gap - times:.3f}),"
        f" S {found.schedule.prefill_stages()}, R {int(found.schedule.rounds.sum())};"
        f" bound {bound.seconds:9.3f} s ({bound.source});"
        f" {found.iterations} steps, {wall:.1f} s wall, {cpu:.1f} s CPU"
    )
    return line, gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--case", choices=CASES, nargs="+", default=["table3"])
    parser.add_argument("--seconds", type=float, nargs="+", help="instead of the case's own limits")
    parser.add_argument("--steps", type=int, help="steps of the search, for a figure that repeats exactly")
    parser.add_argument("--seeds", type=int, default=10, help="instances")
    parser.add_argument("--kv-capacity", type=int, help="most tokens of keys and values held")
    options = parser.parse_args()
    for name in options.case:
        case = CASES[name]
        for limit in (options.seconds or case.seconds) if options.steps is None else [None]:
            gaps = []
            for seed in range(options.seeds):
                problem = Problem(
                    generate(case.workload, seed, case.requests),
                    CostModel.paper(),
                    case.slots,
                    kv_capacity=options.kv_capacity,
                    prefill_token_cap=case.cap,
                )
                line, gap = measure(problem, limit, options.steps, seed)
                gaps.append(gap)
                print(f"seed {seed}: {line}", flush=True)
            within = f"{options.steps} steps" if limit is None else f"{limit:g} s"
            print(
                f"{name}, {case.requests} x {case.slots}, {within}:"
                f" gap mean {np.mean(gaps):.3f} %, max {np.max(gaps):.3f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
