"""
Every policy on the hybrid offline-online paper's Table III, beside the figures the paper gives.

Run ``python benchmarks/table3.py`` (100 seeds) or with ``--seeds N``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from batchbound.data.cost import CostModel
from batchbound.data.generators import generate
from batchbound.data.problem import Problem
from batchbound.executor.loop import schedule_of
from batchbound.executor.simulate import simulate
from batchbound.heuristics.registry import policy_named
from batchbound.models.bounds import best_bound
from batchbound.solvers.partition import solve_partition

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
    Row("Algorithm 1, round-robin clients", "algorithm1", paper="193.33  .862"),
    Row("optimal bin packing", "packing", True, paper="197.08  .855"),
    Row("optimal bin packing + Algorithm 1", "packing-algorithm1", True, paper="190.58  .891"),
    Row("  the same, rule (41)-(43) per round", "lagrangian", True),
    Row("  the same, rule (41)-(43) per token", "lagrangian-token", True),
    Row("LPT order, prefill first", "lpt"),
    Row("LPT order, a tenth of the slots free", "threshold"),
    Row("LPT order, ski-rental rule", "lpt-ski"),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="instances (default %(default)s)")
    seeds = parser.parse_args().seeds
    figures = np.empty((len(ROWS), seeds, 5))
    bounds = np.empty(seeds)
    for seed in range(seeds):
        problem = Problem(generate("table3", seed), CostModel.paper(), SLOTS)
        bounds[seed] = best_bound(problem).seconds
        packing = solve_partition(problem.rounds, SLOTS).assignment
        for row, figure in zip(ROWS, figures[:, seed], strict=True):
            policy = policy_named(row.policy, problem, packing if row.optimal_packing else None)
            trace = simulate(problem, policy)
            makespan = trace.makespan
            utilization = schedule_of(trace).utilization(problem)
            gap = 100 * (makespan / bounds[seed] - 1)
            figure[:] = makespan, utilization, trace.prefill_stages, trace.decode_rounds, gap
    print(f"Table III, {seeds} seeds, {SLOTS} slots, no token cap; makespan in seconds")
    print(f"{'':36}{'makespan':>15}{'util.':>8}{'stages':>8}{'rounds':>8}{'gap %':>8}   the paper")
    for row, figure in zip(ROWS, figures, strict=True):
        makespan, utilization, stages, rounds, gap = figure.mean(axis=0)
        spread = figure[:, 0].std()
        print(
            f"{row.label:36}{makespan:8.2f} +- {spread:3.1f}{utilization:8.3f}"
            f"{stages:8.0f}{rounds:8.0f}{gap:8.2f}   {row.paper}".rstrip()
        )
    print(f"{'proven lower bound':36}{bounds.mean():8.2f} +- {bounds.std():3.1f}{'':32}   180 (not a bound)")


if __name__ == "__main__":
    main()
