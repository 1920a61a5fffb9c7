"""
Policies that know no length on real rollouts: how far above the clairvoyant bound, and what they recover.

Each step of each trace is a job of its own, all there at the start, on the hybrid paper's costs. A policy's
loss is its makespan above the proven bound of the step with all lengths known. ``recovered`` is the share of
first come, first served's loss that it does not have; ``worst`` the largest makespan beside that of first
come, first served on any step.

Run: ``python benchmarks/tails.py`` (``BATCHBOUND_DATA`` names the folder of public data); prints JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.solvers.bounds.proven_bound import proven_bound

DATA = Path(os.environ.get("BATCHBOUND_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
TRACES = {"deepcoder14b": 32, "dapo_qwen32b": 64, "video_qwen7b": 64}
"""The traces, and the slots they are served on."""

BASELINE = "fcfs"
POLICIES = ("fcfs-ski", "scouts", "moving-average", "survival")
CLAIRVOYANT = "lpt-ski"
"""Knows all lengths: how near the bound a simple rule comes."""


def steps(name: str) -> dict[str, Workload]:
    """Return the requests of each step of a trace, in the file's order."""
    with (DATA / "rollouts" / f"{name}.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    found = {}
    for step in dict.fromkeys(row["step"] for row in rows):
        mine = [row for row in rows if row["step"] == step]
        number = {group: k for k, group in enumerate(dict.fromkeys(row["group"] for row in mine))}
        found[step] = Workload(
            np.array([row["id"] for row in mine]),
            np.array([int(row["input_tokens"]) for row in mine]),
            np.array([int(row["output_tokens"]) for row in mine]),
            group=np.array([number[row["group"]] for row in mine]),
        )
    return found


def losses(workload: Workload, slots: int, seconds: float) -> dict[str, float]:
    """Return each policy's loss on a step, as a share of the bound."""
    problem = Problem(workload, CostModel.paper(), slots)
    bound = proven_bound(problem, seconds).seconds
    names = (BASELINE, *POLICIES, CLAIRVOYANT)
    return {name: simulate(problem, policy_named(name, problem)).makespan / bound - 1 for name in names}


def summary(loss: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return each policy's mean loss, the share of the baseline's that it recovers, and its worst step."""
    steps_ = list(loss.values())
    base = np.array([step[BASELINE] for step in steps_])
    found = {}
    for name in steps_[0]:
        mine = np.array([step[name] for step in steps_])
        found[name] = {
            "loss": round(float(mine.mean()), 4),
            "recovered": round(float(1 - mine.mean() / base.mean()), 4),
            "worst": round(float(((1 + mine) / (1 + base) - 1).max()), 4),
        }
    return found


def main() -> None:
    """Print the losses of every policy on every step of every trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1] if __doc__ else None)
    parser.add_argument(
        "--bound-seconds", type=float, default=0.5, help="for each bound (default %(default)s)"
    )
    parser.add_argument("--traces", nargs="*", choices=list(TRACES), default=list(TRACES))
    args = parser.parse_args()
    report = {}
    for name in args.traces:
        loss = {
            step: losses(workload, TRACES[name], args.bound_seconds) for step, workload in steps(name).items()
        }
        rounded = {
            step: {policy: round(value, 4) for policy, value in row.items()} for step, row in loss.items()
        }
        report[name] = {"slots": TRACES[name], "mean": summary(loss), "steps": rounded}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
