"""
Every policy on the hybrid offline-online paper's Table III, beside the figures the paper gives.

Run ``python benchmarks/table3.py`` (100 seeds) or with ``--seeds N``; ``--plan 1.2`` adds the default plan
(with ``--cpu`` its limit is in CPU seconds, on a machine that others share).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
from cpu_clock import limit_cpu_seconds

from batchbound.data.costs.cost import CostModel, FloatArray
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.heuristics.loop import schedule_of
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.planning.plan import make_plan
from batchbound.solvers import Limits
from batchbound.solvers.bounds.proven_bound import proven_bound
from batchbound.solvers.packing.partition import solve_partition

SLOTS = 200


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
    Row("  the same, rule (41)-(43) per round", "lagrangian", paper="193.33  .862"),
    Row("  the same, rule (41)-(43) per token", "lagrangian-token", paper="193.33  .862"),
    Row("optimal bin packing", "packing", True, paper="197.08  .855"),
    Row("optimal bin packing + Algorithm 1", "packing-algorithm1", True),
    Row("  the same, rule (41)-(43) per round", "lagrangian", True, "190.58  .891"),
    Row("  the same, rule (41)-(43) per token", "lagrangian-token", True, "190.58  .891"),
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
        packed = solve_partition(problem.rounds, SLOTS)
        packing_seconds[seed] = time.process_time() - begun
        proven += packed.optimal
        packing = packed.assignment
        for row, figure in zip(ROWS, figures[:, seed], strict=True):
            policy = policy_named(row.policy, problem, packing if row.optimal_packing else None)
            trace = simulate(problem, policy)
            makespan = trace.makespan
            utilization = schedule_of(trace).utilization(problem)
            gap = 100 * (makespan / bounds[seed] - 1)
            figure[:] = makespan, utilization, trace.prefill_stages, trace.decode_rounds, gap
        if time_limit is not None:
            plan = make_plan(problem, limits=Limits(seconds=time_limit, seed=seed))
            schedule = plan.schedule
            plans[seed] = (
                plan.makespan,
                schedule.utilization(problem),
                schedule.prefill_stages(),
                schedule.rounds.sum(),
                100 * plan.bound.gap(plan.makespan) if plan.bound is not None else np.nan,
            )
    print(f"Table III, {seeds} seeds, {SLOTS} slots, no token cap; makespan in seconds")
    print(f"{'':36}{'makespan':>15}{'util.':>8}{'stages':>8}{'rounds':>8}{'gap %':>8}   the paper")
    for row, figure in zip(ROWS, figures, strict=True):
        _print_row(row.label, figure, row.paper)
    if time_limit is not None:
        _print_row(f"batchbound plan, {time_limit:g} s", plans, f"largest gap {plans[:, 4].max():.2f} %")
    print(f"{'proven lower bound':36}{bounds.mean():8.2f} +- {bounds.std():3.1f}{'':32}   180 (not a bound)")
    print(
        f"bin packing: {proven} of {seeds} proven optimal, CPU seconds mean {packing_seconds.mean():.2f},"
        f" largest {packing_seconds.max():.2f}"
    )


def _print_row(label: str, figure: FloatArray, note: str) -> None:
    makespan, utilization, stages, rounds, gap = figure.mean(axis=0)
    spread = figure[:, 0].std()
    print(
        f"{label:36}{makespan:8.2f} +- {spread:3.1f}{utilization:8.3f}"
        f"{stages:8.0f}{rounds:8.0f}{gap:8.2f}   {note}".rstrip()
    )


if __name__ == "__main__":
    main()
