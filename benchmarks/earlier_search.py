"""
Compares the plan with what `plan` and `solve` of an earlier commit find in the same CPU seconds.

    git worktree add --detach ../earlier 77dfc78
    python benchmarks/earlier_search.py ../earlier

At that commit `plan` and `solve` were two searches, and neither was always the better one. Each instance is
planned in a process of its own, from the same lengths, which this code generates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEND = {"prefill_bend": 500.0, "prefill_per_token_beyond": 1e-3}
"""Prompt tokens of a stage beyond 500 cost a millisecond more each."""
# Generator and seed, requests, slots, and the limits, costs and replicas of each instance.
INSTANCES: tuple[tuple[str, int, int, int, dict[str, Any]], ...] = (
    ("table3", 0, 100, 20, {}),
    ("table3", 1, 1319, 200, {}),
    ("sharegpt", 0, 400, 64, {}),
    ("table3", 2, 20, 5, {"first": True}),
    ("sharegpt", 0, 400, 64, {"kv_capacity": 12_000}),
    ("sharegpt", 1, 400, 64, {"kv_capacity": 12_000}),
    ("table3", 0, 400, 64, {"kv_capacity": 12_000}),
    ("sharegpt", 0, 400, 64, {"kv_capacity": 40_000}),
    ("sharegpt", 2, 80, 24, {"kv_capacity": 6_000}),
    ("sharegpt", 3, 1300, 256, {"kv_capacity": 60_000}),
    ("table3", 3, 400, 64, {"prefill_token_cap": 512}),
    ("table3", 4, 90, 12, {"prefill_token_cap": 400}),
    ("sharegpt", 4, 400, 64, {"prefill_token_cap": 4_000}),
    ("table3", 5, 200, 32, {"bend": True}),
    ("sharegpt", 5, 200, 32, {"bend": True}),
    ("sharegpt", 6, 300, 48, {"kv_capacity": 12_000, "prefill_token_cap": 4_000}),
    ("sharegpt", 7, 100, 24, {"kv_capacity": 7_000, "prefill_token_cap": 3_000, "bend": True}),
    ("table3", 6, 400, 32, {"replicas": 4}),
    ("sharegpt", 8, 300, 32, {"replicas": 3, "kv_capacity": 9_000}),
    ("table3", 7, 300, 32, {"replicas": 2, "prefill_token_cap": 600}),
)
# Run by either commit: it knows the names of both.
PLANNED = """
import dataclasses, json, sys, time
for clock in ("monotonic", "perf_counter"):
    setattr(time, clock, time.process_time)
asked = json.load(sys.stdin)
try:
    from batchbound.data.costs.cost import CostModel
    from batchbound.planning.plan import make_plan
    from batchbound.planning.fleet import make_fleet_plan
except ImportError:
    from batchbound.data.cost import CostModel
    from batchbound.planning import make_plan
    from batchbound.fleet_planning import make_fleet_plan
from batchbound.data.fleet import Fleet
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.solvers.result import Limits
from batchbound.solvers.solve import solve
cost = dataclasses.replace(CostModel.paper(), **asked["cost"])
workload = Workload.from_lengths(asked["input"], asked["output"])
problem = Problem(workload, cost, asked["slots"], **asked["limits"])
limits = Limits(seconds=asked["seconds"], seed=asked["seed"])
if asked["replicas"] > 1:
    makespan = make_fleet_plan(Fleet.of(problem, asked["replicas"]), limits=limits).makespan
else:
    makespan = {"plan": make_plan, "solve": solve}[asked["by"]](problem, limits=limits).makespan
print(json.dumps({"makespan_s": float(makespan), "took_s": time.process_time()}))
"""


def problems(seconds: float, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each instance's name and what a process needs to plan it."""
    from batchbound.data.readers.generators import generate

    for generator, number, requests, slots, rest in INSTANCES:
        workload = generate(generator, number, requests)
        limits: dict[str, object] = {
            name: rest[name] for name in ("kv_capacity", "prefill_token_cap") if name in rest
        }
        if rest.get("first"):
            limits["prefill_emits_first_token"] = True
        said = " ".join(f"{name} {value}" for name, value in rest.items())
        yield (
            f"{generator}:{number}:{requests} on {slots} {said}".strip(),
            {
                "input": workload.input_tokens.tolist(),
                "output": workload.output_tokens.tolist(),
                "cost": BEND if rest.get("bend") else {},
                "slots": slots,
                "limits": limits,
                "replicas": rest.get("replicas", 1),
                "seconds": seconds,
                "seed": seed,
            },
        )


def planned(code: Path, asked: dict[str, Any], by: str) -> float:
    """Return the makespan, in seconds, that one commit's code plans in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", PLANNED],
        input=json.dumps({**asked, "by": by}),
        env={**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"},
        cwd=code,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        sys.exit(f"{code}: {found.stderr}")
    makespan: float = json.loads(found.stdout)["makespan_s"]
    return makespan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("earlier", type=Path, help="a checkout of the earlier commit")
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU seconds of each search")
    parser.add_argument(
        "--seeds", type=int, default=1, help="seeds of each search; makespans are their means"
    )
    parser.add_argument("--most", type=int, default=len(INSTANCES), help="of the instances, the first ones")
    options = parser.parse_args()
    here, worse = Path(__file__).resolve().parents[1], 0
    print(
        "| instance | earlier plan, s | earlier solve, s | plan, s | to the better, % |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    names = [name for name, _ in problems(options.seconds, 0)][: options.most]
    for at, name in enumerate(names):
        sums = [0.0, 0.0, 0.0]
        for seed in range(options.seeds):
            asked = list(problems(options.seconds, seed))[at][1]
            earlier = planned(options.earlier.resolve(), asked, "plan")
            other = earlier
            if asked["replicas"] == 1:
                other = planned(options.earlier.resolve(), asked, "solve")
            for column, value in enumerate((earlier, other, planned(here, asked, "plan"))):
                sums[column] += value / options.seeds
        change = 100 * (sums[2] / min(sums[:2]) - 1)
        worse += change > 1e-6
        print(f"| {name} | {sums[0]:.3f} | {sums[1]:.3f} | {sums[2]:.3f} | {change:+.3f} |", flush=True)
    print(f"\n{worse} of {len(names)} worse than the better of the earlier two")


if __name__ == "__main__":
    main()
