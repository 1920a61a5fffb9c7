"""
Every policy on the hybrid offline-online paper's Table III, beside the figures the paper gives.

Run ``python benchmarks/table3.py`` (100 seeds) or with ``--seeds N``; ``--plan 1.2`` adds the default plan
(with ``--cpu`` its limit is in CPU seconds, on a machine that others share). ``--json`` writes the means.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cpu_clock import limit_cpu_seconds

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.heuristics.loop import schedule_of
from batchbound.heuristics.policy import Policy
from batchbound.heuristics.queues.admission import Admission
from batchbound.heuristics.queues.algorithm1 import SortingPreemptive
from batchbound.heuristics.queues.assignment import round_robin
from batchbound.heuristics.queues.prefill_rules import Lagrangian
from batchbound.heuristics.queues.queue_policy import QueuePolicy
from batchbound.heuristics.registry import POLICIES, policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.models.bounds.packing.partition import solve_partition
from batchbound.models.bounds.prove import proven_bound
from batchbound.planning.plan import make_plan
from batchbound.solvers import Limits

SLOTS = 200
COLUMNS = ("makespan_s", "utilization", "prefill_stages", "decode_steps", "gap_percent")


@dataclass(frozen=True, slots=True)
class Row:
    """A policy of the table: its name there and in the registry, and what the paper measured for it."""

    label: str
    policy: str
    optimal_packing: bool = False
    paper: str = ""


ROWS = (
    Row("first come, first served", "fcfs", paper="201.00  .802"),
    Row("Algorithm 1, round-robin clients", "algorithm1"),
    Row("  the same, rule (41)-(43) per decode step", "lagrangian", paper="193.33  .862"),
    Row("  the same, rule (41)-(43) per token", "lagrangian-token", paper="193.33  .862"),
    Row("  the same, all tokens decoded", "lagrangian-literal", paper="193.33  .862"),
    Row("optimal bin packing", "packing", True, paper="197.08  .855"),
    Row("optimal bin packing + Algorithm 1", "packing-algorithm1", True),
    Row("  the same, rule (41)-(43) per decode step", "lagrangian", True, "190.58  .891"),
    Row("  the same, rule (41)-(43) per token", "lagrangian-token", True, "190.58  .891"),
    Row("  the same, all tokens decoded", "lagrangian-literal", True, "190.58  .891"),
    Row("LPT order, prefill first", "lpt"),
    Row("LPT order, a tenth of the slots free", "threshold"),
    Row("LPT order, ski-rental rule", "lpt-ski"),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="instances (default %(default)s)")
    parser.add_argument("--plan", type=float, metavar="SECONDS", help="also plan each, in this time")
    parser.add_argument("--cpu", action="store_true", help="that time is CPU seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the mean of each column there")
    args = parser.parse_args()
    if args.cpu:
        limit_cpu_seconds()
    seeds, time_limit = args.seeds, args.plan
    figures = np.empty((len(ROWS), seeds, 5))
    bounds, packing_seconds, plans = np.empty(seeds), np.empty(seeds), np.empty((seeds, 5))
    proven = 0
    for seed in range(seeds):
        problem = Problem(generate("table3", seed), CostModel.paper(), SLOTS)
        bounds[seed] = proven_bound(problem).seconds
        begun = time.process_time()
        packed = solve_partition(problem.decode_steps, SLOTS)
        packing_seconds[seed] = time.process_time() - begun
        proven += packed.optimal
        packing = packed.assignment
        for row, figure in zip(ROWS, figures[:, seed], strict=True):
            policy = _policy(row, problem, packing)
            trace = simulate(problem, policy)
            makespan = trace.makespan
            utilization = schedule_of(trace).utilization(problem)
            gap = 100 * (makespan / bounds[seed] - 1)
            figure[:] = makespan, utilization, trace.prefill_stages, trace.decode_steps, gap
        if time_limit is not None:
            plan = make_plan(problem, limits=Limits(seconds=time_limit, seed=seed))
            schedule = plan.schedule
            plans[seed] = (
                plan.makespan,
                schedule.utilization(problem),
                schedule.prefill_stages(),
                schedule.decode_steps.sum(),
                100 * plan.bound.gap(plan.makespan) if plan.bound is not None else np.nan,
            )
    print(f"Table III, {seeds} seeds, {SLOTS} slots, no token cap; makespan in seconds")
    print(f"{'':36}{'makespan':>15}{'util.':>8}{'stages':>8}{'decode_steps':>8}{'gap %':>8}   the paper")
    for row, figure in zip(ROWS, figures, strict=True):
        _print_row(row.label, figure, row.paper)
    if time_limit is not None:
        _print_row(f"batchbound plan, {time_limit:g} s", plans, f"largest gap {plans[:, 4].max():.2f} %")
    print(f"{'proven lower bound':36}{bounds.mean():8.2f} +- {bounds.std():3.1f}{'':32}   180 (not a bound)")
    if args.json is not None:
        means = [figure.mean(axis=0).tolist() for figure in figures]
        rows = [{"policy": row.policy, "packed": row.optimal_packing} for row in ROWS]
        found = [row | dict(zip(COLUMNS, mean, strict=True)) for row, mean in zip(rows, means, strict=True)]
        args.json.write_text(
            json.dumps({"seeds": seeds, "bound_s": bounds.mean(), "rows": found}, indent=1) + "\n"
        )
    print(
        f"bin packing: {proven} of {seeds} proven optimal, CPU seconds mean {packing_seconds.mean():.2f},"
        f" largest {packing_seconds.max():.2f}"
    )


def _policy(row: Row, problem: Problem, packing: IntArray) -> Policy:
    """Return the policy of a row; the most literal reading of (42) is so slow that no list offers it."""
    assignment = packing if row.optimal_packing else round_robin(problem)
    if row.policy == "lagrangian-literal":
        lists = SortingPreemptive(problem, assignment)
        return QueuePolicy(lists, Lagrangian("literal"), Admission(problem))
    assigned = POLICIES[row.policy].assignment is not None
    return policy_named(row.policy, problem, assignment if assigned else None)


def _print_row(label: str, figure: FloatArray, note: str) -> None:
    makespan, utilization, stages, decode_steps, gap = figure.mean(axis=0)
    spread = figure[:, 0].std()
    print(
        f"{label:36}{makespan:8.2f} +- {spread:3.1f}{utilization:8.3f}"
        f"{stages:8.0f}{decode_steps:8.0f}{gap:8.2f}   {note}".rstrip()
    )


if __name__ == "__main__":
    main()
