"""
Plans made from predicted lengths: what they reach on the true ones, and how often their interval holds it.

Requests of the hybrid paper's Table III (1,319 on 200 slots) with predictions off by a log-normal factor, and
with the answer lengths and predicted classes of a real predictor (SSJF), half of whose pairs are the measured
error and half the jobs. Beside the plan: no order, and longest prediction first, with the ski-rental rule.

Run: ``python benchmarks/uncertain.py --seeds 100`` (``BATCHBOUND_DATA`` names the folder of public data).
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.lengths.prediction_error import LogNormalError, MeasuredError, PredictionError
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.heuristics.follow import following
from batchbound.heuristics.queues.ordered import arrival_order, longest_first
from batchbound.heuristics.simulate import simulate
from batchbound.planning.uncertain import make_robust_plan
from batchbound.solvers.result import Limits
from batchbound.solvers.search.constructive import ski_rental_schedule

SLOTS = 200
DATA = Path(os.environ.get("BATCHBOUND_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))

Case = tuple[IntArray, IntArray, PredictionError]
"""True lengths, predicted lengths, and what is known about the error."""


def noisy(sd: float) -> Callable[[int], Case]:
    """Give Table III's lengths with predictions off by a factor of this log-deviation."""

    def case(seed: int) -> Case:
        truth = generate("table3", seed).output_tokens
        factor = np.exp(sd * np.random.default_rng((seed, 1)).standard_normal(len(truth)))
        return truth, np.maximum(1, np.rint(truth * factor)).astype(np.int64), LogNormalError(sd)

    return case


def ssjf(path: Path) -> Callable[[int], Case]:
    """Give a real predictor's lengths; a class stands for the mean length of its half of the pairs."""
    with path.open() as stream:
        rows = [
            (int(row["predicted_length"]), int(row["output_token_length"])) for row in csv.DictReader(stream)
        ]
    label, actual = np.array(rows).T
    known = np.random.default_rng(0).random(len(actual)) < 0.5
    means = np.array([round(actual[known & (label == k)].mean()) for k in range(label.max() + 1)])
    error = MeasuredError(means[label[known]], actual[known])
    unseen = np.flatnonzero(~known)

    def case(seed: int) -> Case:
        drawn = np.random.default_rng((seed, 2)).choice(unseen, len(generate("table3", 0)))
        return actual[drawn], means[label[drawn]], error

    return case


def measure(case: Callable[[int], Case], seed: int, seconds: float) -> tuple[FloatArray, bool, str]:
    """
    Return seconds, whether the interval held the makespan, and what was followed.

    The seconds are those of the plan, no order and longest first, and the interval's width.
    """
    truth, predicted, error = case(seed)
    workload = generate("table3", seed)
    problem = Problem(workload.with_output_tokens(predicted), CostModel.paper(), SLOTS)
    plan = make_robust_plan(problem, error, limits=Limits(seconds=seconds, seed=seed))
    assert plan.expected is not None
    policy = following(plan.expected, plan.schedule, plan.problem)
    reached = simulate(plan.problem, policy, truth).makespan
    true = replace(problem, workload=workload.with_output_tokens(truth))
    orders = arrival_order(problem), longest_first(problem)
    baselines = [ski_rental_schedule(true, order=order).makespan(true) for order in orders]
    held = plan.expected.low <= reached <= plan.expected.high
    width = plan.expected.high - plan.expected.low
    return np.array([reached, *baselines, width]), held, f"{plan.expected.follow} {plan.expected.held_back}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=1.2, help="seconds of each plan's search")
    parser.add_argument("--only", metavar="NAME", help="of the cases: a log-deviation, or SSJF")
    args = parser.parse_args()
    cases = {f"log-sd {sd}": noisy(sd) for sd in (0.2, 0.5, 1.0)}
    path = DATA / "ssjf" / "predictions_warmup_cls_1000K.csv"
    if path.exists():
        cases["SSJF classes"] = ssjf(path)
    print(
        "| predictions | plan (s) | no order | longest first | worst against the better, first 20 seeds |"
        " of all | interval holds | its width | follows, holding back |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, case in cases.items():
        if args.only is not None and args.only not in name:
            continue
        measured = [measure(case, seed, args.time_limit) for seed in range(args.seeds)]
        seconds = np.array([row[0] for row in measured])
        worse = seconds[:, 0] / seconds[:, 1:3].min(axis=1) - 1
        held = sum(row[1] for row in measured)
        follows = ", ".join(sorted({row[2] for row in measured}))
        plan, none, longest, width = seconds.mean(axis=0)
        print(
            f"| {name} | {plan:.2f} | {none:.2f} | {longest:.2f} | {worse[:20].max():+.2%}"
            f" | {worse.max():+.2%} | {held} of {args.seeds} | {width / plan:.1%} | {follows} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
