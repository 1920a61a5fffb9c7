"""
The default plan on generated jobs over the regimes: requests, slots, costs, caps, memory, tails, the bend.

    python benchmarks/plan_grid.py --seconds 1.2 10 --requests 100 1300 --slots 16 64 > grid.json

Limits are CPU seconds. Prints one JSON object, as `rollouts_plan.py` does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
from cpu_clock import limit_cpu_seconds
from rollouts_plan import best_rule, measured, summary

from batchbound.data.arrays import IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.solvers import Limits

GPU = CostModel(0.004, 2e-5, 0.012, 2e-5)
BENT = CostModel(0.004, 2e-5, 0.012, 2e-5, prefill_bend=4096, prefill_per_token_beyond=2e-5)
LAUNCHED = CostModel(0.0, 1.8e-5, 0.0028, 4.7e-6, prefill_floor=0.046, decode_per_kv_token=4.4e-8)
"""A model of 1.7 billion weights on an H100, as profiled: launches rule what a small prefill stage takes."""

SHARE_OF_PEAK = 0.4


def _whole(values: np.ndarray, most: int) -> IntArray:
    whole: IntArray = np.clip(values, 1, most).astype(np.int64)
    return whole


def _chat(rng: np.random.Generator, count: int) -> Workload:
    prompts = _whole(rng.lognormal(np.log(200), 0.8, count), 3000)
    return Workload.from_lengths(prompts, _whole(rng.gamma(1.5, 150, count), 2000))


def _long_prompts(rng: np.random.Generator, count: int) -> Workload:
    prompts = _whole(rng.lognormal(np.log(3000), 0.5, count), 8000)
    return Workload.from_lengths(prompts, _whole(rng.lognormal(np.log(60), 0.7, count), 600))


def _heavy_tail(rng: np.random.Generator, count: int) -> Workload:
    prompts = _whole(rng.lognormal(np.log(200), 0.8, count), 3000)
    return Workload.from_lengths(prompts, _whole(20 + 100 * rng.pareto(1.3, count), 16_000))


def _scarce(workload: Workload, slots: int) -> Problem:
    """Memory for two fifths of what the largest requests, one a slot, could hold at once."""
    peaks = np.sort(Problem(workload, GPU, slots).kv_peak)[::-1]
    return Problem(
        workload, GPU, slots, kv_capacity=max(int(SHARE_OF_PEAK * peaks[:slots].sum()), int(peaks[0]))
    )


REGIMES: dict[
    str, tuple[Callable[[np.random.Generator, int], Workload], Callable[[Workload, int], Problem]]
] = {
    "paper": (_chat, lambda workload, slots: Problem(workload, CostModel.paper(), slots)),
    "gpu": (_chat, lambda workload, slots: Problem(workload, GPU, slots)),
    "launched": (_chat, lambda workload, slots: Problem(workload, LAUNCHED, slots)),
    "prefill-heavy": (_long_prompts, lambda job, slots: Problem(job, GPU, slots, prefill_token_cap=8192)),
    "scarce-memory": (_chat, _scarce),
    "heavy-tail": (_heavy_tail, lambda workload, slots: Problem(workload, GPU, slots)),
    "bend": (_long_prompts, lambda workload, slots: Problem(workload, BENT, slots)),
}


def main() -> None:
    """Plan the grid, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.2])
    parser.add_argument("--requests", type=int, nargs="+", default=[30, 100, 300, 1300, 5000])
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    limit_cpu_seconds()
    rows = []
    for regime in options.regimes:
        draw, pose = REGIMES[regime]
        for count in options.requests:
            for slots in options.slots:
                problem = pose(draw(np.random.default_rng(options.seed), count), slots)
                rule = best_rule(problem)
                for seconds in options.seconds:
                    limits = Limits(seconds=seconds, seed=options.seed)
                    rows.append(measured(f"{regime}:{count}x{slots}", problem, limits, rule))
                    print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
    limits_ = {str(s): summary([row for row in rows if row.limit_s == s]) for s in options.seconds}
    print(json.dumps({"limits": limits_, "jobs": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
