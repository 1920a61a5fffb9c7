"""
A solver of your own beside the others: ``python examples/own_solver.py``.

It takes a problem and returns a schedule, which the referee checks; the gaps are to one proven bound.
"""

from __future__ import annotations

import numpy as np

from batchbound import CostModel, Limits, Problem, Schedule, Workload, compare


def in_batches(problem: Problem, limits: Limits) -> Schedule:
    """Return what padded ``generate`` does: the longest requests together, until the longest of them ends."""
    order = np.argsort(-problem.decode_steps, kind="stable")
    batch = np.empty(len(order), dtype=np.int64)
    batch[order] = np.arange(len(order)) // problem.slots
    longest = [problem.decode_steps[batch == each].max() for each in range(int(batch.max()) + 1)]
    return Schedule.from_bins(problem, batch, longest)


def main() -> None:
    """Compare on three jobs of random lengths."""
    jobs = {}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        prompts, completions = rng.integers(20, 200, 40), 1 + rng.lognormal(5, 0.7, 40).astype(np.int64)
        jobs[f"job {seed}"] = Problem(Workload.from_lengths(prompts, completions), CostModel.paper(), slots=6)
    solvers = {"batches": in_batches, "longest first": "policy:lpt", "ours": "search"}
    print(compare(jobs, solvers, Limits(seconds=1)))


if __name__ == "__main__":
    main()
