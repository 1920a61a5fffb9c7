"""
The schedule search on the hybrid paper's Table III: proven gap by size, limit and seed.

    python benchmarks/schedule_search.py                       # 1,319 x 200, 10 s and 60 s, 10 seeds
    python benchmarks/schedule_search.py --requests 100 --slots 20 --seconds 60
    python benchmarks/schedule_search.py --requests 10000 --seconds 30 --seeds 1
    python benchmarks/schedule_search.py --cap 2048 --seconds 60
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from batchbound.data.cost import CostModel
from batchbound.data.generators import generate
from batchbound.data.problem import Problem
from batchbound.models.bounds import best_bound
from batchbound.solvers.schedule_search import search_schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--workload", default="table3", help="a generator's name")
    parser.add_argument("--requests", type=int, default=1319)
    parser.add_argument("--slots", type=int, default=200)
    parser.add_argument("--seconds", type=float, nargs="+", default=[10.0, 60.0])
    parser.add_argument("--steps", type=int, help="steps of the search, for a figure that repeats exactly")
    parser.add_argument("--seeds", type=int, default=10, help="instances")
    parser.add_argument("--cap", type=int, help="most prompt tokens of a prefill stage")
    parser.add_argument("--kv-capacity", type=int, help="most tokens of keys and values held")
    options = parser.parse_args()
    for limit in options.seconds if options.steps is None else [None]:
        gaps = []
        for seed in range(options.seeds):
            problem = Problem(
                generate(options.workload, seed, options.requests),
                CostModel.paper(),
                options.slots,
                kv_capacity=options.kv_capacity,
                prefill_token_cap=options.cap,
            )
            bound = best_bound(problem)
            begun, cpu = time.monotonic(), time.process_time()
            found = search_schedule(problem, seconds=limit, iterations=options.steps, seed=seed)
            violation = found.schedule.check(problem)
            assert violation is None, violation
            gaps.append(100 * bound.gap(found.makespan))
            print(
                f"seed {seed}: {found.makespan:9.3f} s, bound {bound.seconds:9.3f} s ({bound.source}),"
                f" gap {gaps[-1]:.3f} %, S {found.schedule.prefill_stages()},"
                f" R {int(found.schedule.rounds.sum())}, {found.iterations} steps,"
                f" {time.monotonic() - begun:.1f} s wall, {time.process_time() - cpu:.1f} s CPU",
                flush=True,
            )
        name = f"{options.steps} steps" if limit is None else f"{limit:g} s"
        print(
            f"{options.workload} {options.requests} x {options.slots}, {name}:"
            f" gap mean {np.mean(gaps):.3f} %, max {np.max(gaps):.3f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
