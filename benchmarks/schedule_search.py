"""
The schedule search on the hybrid paper's Table III: proven gap by size, limit and seed.

    python benchmarks/schedule_search.py --case table3 --seeds 10 --seconds 10 60
    python benchmarks/schedule_search.py --case small-100x20 --seeds 10 --cpu
    python benchmarks/schedule_search.py --case table3-cap2048 --kv-capacity 200000

Each line is one call of ``solve`` with a limit, bound and search included. The referee accepts its schedule
and the checker its bound, or the benchmark ends there.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass

import numpy as np
from cpu_clock import limit_cpu_seconds

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.models.certificates.checker import verify_bound
from batchbound.solvers import Limits, solve


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
    "small-10x3": Case("table3", 10, 3, (4.0,)),
    "small-16x4": Case("table3", 16, 4, (4.0,)),
    "small-24x5": Case("table3", 24, 5, (40.0,)),
    "small-100x20": Case("table3", 100, 20, (60.0,)),
    "10000x200": Case("table3", 10_000, 200, (30.0,)),
    "100000x1024": Case("table3", 100_000, 1024, (60.0,)),
}


def measure(problem: Problem, limits: Limits) -> tuple[str, float]:
    """Return a line about one search, and its gap in percent."""
    begun = time.process_time()
    found = solve(problem, limits=limits)
    cpu = time.process_time() - begun
    schedule, bound = found.schedule, found.bound
    assert schedule is not None
    assert bound is not None
    broken = schedule.check(problem) or verify_bound(problem, found.repeatable or bound)
    assert broken is None, broken
    gap = 100 * bound.gap(schedule.makespan(problem))
    line = (
        f"{found.makespan:9.3f} s, gap {gap:.3f} %, {found.status},"
        f" S {schedule.prefill_stages()}, R {int(schedule.decode_steps.sum())};"
        f" bound {bound.seconds:9.3f} s ({bound.source}); {found.seconds:.1f} s, {cpu:.1f} s CPU"
    )
    return line, gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--case", choices=CASES, nargs="+", default=["table3"])
    parser.add_argument("--seconds", type=float, nargs="+", help="instead of the case's own limits")
    parser.add_argument("--steps", type=int, help="steps of the search, for a figure that repeats exactly")
    parser.add_argument("--seeds", type=int, default=10, help="instances")
    parser.add_argument("--kv-capacity", type=int, help="most tokens of keys and values held")
    parser.add_argument("--cpu", action="store_true", help="limits are CPU seconds, on a shared machine")
    options = parser.parse_args()
    if options.cpu:
        limit_cpu_seconds()
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
                line, gap = measure(problem, Limits(seconds=limit, work=options.steps, seed=seed))
                gaps.append(gap)
                print(f"seed {seed}: {line}", flush=True)
            within = f"{options.steps} steps" if limit is None else f"{limit:g} s"
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{name}, {case.requests} x {case.slots}, {within}: gap mean {np.mean(gaps):.3f} %,"
                f" max {np.max(gaps):.3f} %; peak memory so far {peak:.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
