"""
The default plan on real rollouts: proven gap, and the best built-in rule, for jobs of RL steps and of models.

    BATCHBOUND_DATA=../shared/data python benchmarks/rollouts_plan.py --seconds 1.2 10 --every 8 > gaps.json
    BATCHBOUND_DATA=../shared/data python benchmarks/rollouts_plan.py --steps --replicas 4 > replicas.json

The second shares each job among replicas of a quarter of the slots each, 8 and 16 for steps. Its best rule is
the best of the rules that share requests out, each replica with its own best policy.

Takes the folder of data/README's rollouts (17 RL steps, planned on 32 and 64 slots; the answers of 44 models,
on 64 and 200), at the hybrid paper's costs. Limits are CPU seconds. Prints one JSON object: the jobs, and the
mean and worst gap for each limit.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from cpu_clock import limit_cpu_seconds

from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.dispatch import RULES, dispatch
from batchbound.heuristics.registry import POLICIES
from batchbound.planning.fleet import make_fleet_plan
from batchbound.solvers import Limits, solve
from batchbound.solvers.search.baselines import simulated_schedule

STEPS = ("dapo_qwen32b", "deepcoder14b", "video_qwen7b")
MODELS = ("gsm8k_models", "math_level5_models")


def rollouts(folder: Path) -> list[tuple[str, Workload, int]]:
    """Return every job: its name, its requests, and its slots."""
    jobs = []
    for name in (*STEPS, *MODELS):
        key, prompt = ("step", "input_tokens") if name in STEPS else ("model", "prompt_tokens")
        rows: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
        with (folder / f"{name}.csv").open(newline="") as stream:
            for row in csv.DictReader(stream):
                if int(row["output_tokens"]) > 0:
                    rows[row[key]].append((int(row[prompt]), int(row["output_tokens"])))
        for part, lengths in rows.items():
            workload = Workload.from_lengths(*zip(*lengths, strict=True))
            jobs += [(f"{name}:{part}", workload, n) for n in ((32, 64) if name in STEPS else (64, 200))]
    return jobs


@dataclass(frozen=True)
class Row:
    """What one plan came to: seconds, and the gap as a fraction of the bound."""

    job: str
    requests: int
    slots: int
    limit_s: float
    cpu_s: float
    makespan_s: float
    bound_s: float
    gap: float
    best_rule_s: float
    prefill_stages: int
    decode_steps: int


def measured(name: str, problem: Problem, limits: Limits, best_rule: float) -> Row:
    """Return what one plan comes to, after the referee has looked at it."""
    begun = time.process_time()
    found = solve(problem, limits=limits)
    cpu = time.process_time() - begun
    schedule, bound = found.schedule, found.bound
    assert schedule is not None
    assert bound is not None
    assert limits.seconds is not None
    broken = schedule.check(problem)
    assert broken is None, broken
    makespan = schedule.makespan(problem)
    stages, decode_steps = schedule.prefill_stages(), int(schedule.decode_steps.sum())
    figures = makespan, bound.seconds, bound.gap(makespan), best_rule, stages, decode_steps
    return Row(name, len(problem), problem.slots, limits.seconds, round(cpu, 3), *figures)


def measured_fleet(name: str, fleet: Fleet, limits: Limits, best_rule: float) -> Row:
    """Return what one plan for replicas comes to, after the referee has looked at it."""
    begun = time.process_time()
    plan = make_fleet_plan(fleet, limits=limits)
    cpu = time.process_time() - begun
    assert limits.seconds is not None
    schedules = [schedule for schedule in plan.shares.schedules if schedule is not None]
    stages = sum(schedule.prefill_stages() for schedule in schedules)
    decode_steps = sum(int(schedule.decode_steps.sum()) for schedule in schedules)
    bound = plan.bound
    assert bound is not None
    figures = plan.makespan, bound.seconds, bound.gap(plan.makespan), best_rule, stages, decode_steps
    slots = sum(replica.slots for replica in fleet.replicas)
    return Row(name, len(fleet), slots, limits.seconds, round(cpu, 3), *figures)


def best_fleet_rule(fleet: Fleet) -> float:
    """Return the seconds of the best rule that shares requests out, each replica with its best policy."""
    return min(
        max(
            best_rule(fleet.problem_of(k, np.flatnonzero(replica_of == k)))
            for k in np.unique(replica_of).tolist()
        )
        for replica_of in (dispatch(fleet, rule, "any") for rule in RULES)
    )


def best_rule(problem: Problem) -> float:
    """Return the seconds of the best built-in rule that follows the limits."""
    made = [simulated_schedule(problem, policy, np.inf) for policy in POLICIES]
    return min(schedule.makespan(problem) for schedule in made if schedule is not None)


def summary(rows: list[Row]) -> dict[str, object]:
    """Return the mean and the worst of plans made within the same limit."""
    return {
        "jobs": len(rows),
        "mean_gap": float(np.mean([row.gap for row in rows])),
        "worst_gap": max(row.gap for row in rows),
        "worst_cpu_s": max(row.cpu_s for row in rows),
        "worse_than_a_rule": [row.job for row in rows if row.makespan_s > row.best_rule_s * (1 + 1e-12)],
    }


def main() -> None:
    """Plan the jobs, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.2])
    parser.add_argument("--every", type=int, default=1, help="plan only every so many-th job")
    parser.add_argument("--steps", action="store_true", help="steps alone, no models")
    parser.add_argument("--replicas", type=int, default=1, help="replicas that share each job")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    limit_cpu_seconds()
    folder = Path(os.environ.get("BATCHBOUND_DATA", "../shared/data")) / "rollouts"
    rows: list[Row] = []
    jobs = [job for job in rollouts(folder) if not options.steps or job[0].partition(":")[0] in STEPS]
    for name, workload, slots in jobs[:: options.every]:
        problem = Problem(workload, CostModel.paper(), slots)
        fleet = (
            Fleet.of(replace(problem, slots=slots // 4), options.replicas) if options.replicas > 1 else None
        )
        rule = best_rule(problem) if fleet is None else best_fleet_rule(fleet)
        for seconds in options.seconds:
            limits = Limits(seconds=seconds, seed=options.seed)
            if fleet is None:
                rows.append(measured(name, problem, limits, rule))
            else:
                rows.append(measured_fleet(name, fleet, limits, rule))
            print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
    by_limit = {str(s): summary([row for row in rows if row.limit_s == s]) for s in options.seconds}
    print(json.dumps({"limits": by_limit, "jobs": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
