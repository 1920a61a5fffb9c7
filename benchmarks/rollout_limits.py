"""
What part of the loss no policy without foresight can recover, on the traces of ``rollouts.py``.

Requests that nothing tells apart are exchangeable: whatever order they are served in, the makespan has the
same distribution, so that an order recovers what the prefill rule does and no more. What can tell them apart
is the group, earlier completions of the same prompt, and how long a request has run. Each figure tells a
policy more of one of these than any can know:

- ``groups told`` draws each step's own lengths anew, as the model of lengths has them with the correlation
  that the step shows, and orders requests by the true effects of their groups. A policy has to learn these.
- ``lengths of groups told`` orders the true requests by the mean of what is left of their group, told which
  lengths each group has and not whose they are. What that recovers beyond ``groups told`` is foresight of
  single long completions.
- ``free moves`` lets any running request give way to any other at every instant at no cost, told the
  distribution of all lengths: the longest expected remaining first, or the one expected to end the latest
  beyond the time that is left. Of exchangeable requests that are ever less likely to end the longer they
  run, those begun first go on, which is arrival's order (Weber 1982, J. Appl. Prob. 19, 167-182).
- ``usual lengths told``, where other models' completions are the history, knows every completion of up to
  four times the median, and places the few longer ones by their scores, as anybody has to.

Run: ``python benchmarks/rollout_limits.py --draws 20 --json limits.json`` (``BATCHBOUND_DATA`` names the
folder of public data); prints a line for each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from group_orders import told_lengths, told_tendencies
from rollouts import BASELINE, DATASETS, TRACES, Step

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.heuristics.queues.queue_policy import QueuedPolicy
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.unknown_lengths.groups import group_numbers
from batchbound.heuristics.unknown_lengths.lengths import SHARES, LengthModel, Observed
from batchbound.heuristics.unknown_lengths.registry import CHOSEN, hidden_policy, without_lengths
from batchbound.models.bounds.makespan import best_bound

LONG = 4.0
"""Times the median from which a completion counts as one of the few long ones."""

LONGEST = 0.02
"""Share of a step's completions that are its longest."""

QUANTA = 40
"""Instants in a mean length at which requests can be moved at no cost."""


class Judged:
    """
    A step, its bound, and what orders of its groups come to.

    Parameters
    ----------
    step
        The job.
    slots
        Requests in progress at a time.
    """

    def __init__(self, step: Step, slots: int) -> None:
        problem = Problem(step.workload, CostModel.paper(), slots)
        self.step, self.lengths = step, step.workload.output_tokens
        self.group, self.groups = group_numbers(problem)
        self._bound, self._blind = best_bound(problem).seconds, without_lengths(problem)

    def of_policy(self, name: str) -> float:
        """Return the loss of a policy that sees no length, as a share of the bound."""
        return self._loss(hidden_policy(name, self._blind, self.step.known))

    def of_tendency(self, tendency: FloatArray) -> float:
        """Return the loss of the groups ordered by any number of each, prefilled by the ski-rental rule."""
        return self._loss(told_tendencies(self._blind, tendency))

    def of_lengths_told(self) -> float:
        """Return the loss of a policy told which lengths each group has, and not whose."""
        return self._loss(told_lengths(self._blind, self.lengths))

    def _loss(self, policy: QueuedPolicy) -> float:
        return simulate(self._blind, policy, self.lengths).makespan / self._bound - 1


def correlation(job: Judged) -> float:
    """Return the intraclass correlation that the lengths of a step show."""
    ended = np.ones(len(job.lengths), dtype=np.bool_)
    return LengthModel.learnt(Observed(job.group, job.lengths - 1, ended), job.groups).share


def drawn_like(job: Judged, slots: int, rng: np.random.Generator) -> tuple[Judged, FloatArray]:
    """Return the step's own lengths shared out anew by the model of lengths, and each group's effect."""
    share = min(correlation(job), float(SHARES[-1]))
    effect = rng.standard_normal(job.groups)
    own = rng.standard_normal(len(job.lengths))
    score = np.sqrt(share) * effect[job.group] + np.sqrt(1 - share) * own
    lengths = np.sort(job.lengths)[np.argsort(np.argsort(score))]
    workload = job.step.workload.with_output_tokens(lengths)
    return Judged(Step(job.step.name, workload, job.step.known), slots), effect


def groups_told(job: Judged, slots: int, rng: np.random.Generator) -> dict[str, float]:
    """Return the losses on a step drawn anew: of the baseline, ours, and an order by the true effects."""
    drawn, effect = drawn_like(job, slots, rng)
    found = {name: drawn.of_policy(name) for name in (BASELINE, "fcfs-ski", CHOSEN)}
    return found | {"groups told": drawn.of_tendency(effect)}


def usual_lengths_told(job: Judged) -> float:
    """Return the loss of longest first where long completions are placed by their scores alone."""
    score = job.step.known.score
    assert score is not None
    lengths = job.lengths.astype(np.float64)
    usual = lengths <= LONG * np.median(lengths)
    place = (np.argsort(np.argsort(score[job.group])) + 0.5) / len(lengths)
    lengths[~usual] = np.quantile(lengths[usual], place[~usual])
    return job.of_tendency(lengths[np.argsort(job.group)])


def in_turn(lengths: IntArray, slots: int) -> float:
    """Return the decode steps of requests served in order without prefill stages."""
    free = np.zeros(slots)
    for length in lengths.tolist():
        free[free.argmin()] += length
    return float(free.max())


def moved_freely(lengths: IntArray, slots: int, order: IntArray, *, beyond: bool) -> float:
    """
    Return the decode steps of a job whose running requests change at no cost, by the steps expected left.

    Parameters
    ----------
    lengths
        True lengths; the policy knows them but not whose they are.
    slots
        Requests in progress at a time.
    order
        Decides among equals.
    beyond
        Whether what counts is the steps left beyond the time that the job needs at least, not all.
    """
    ascending = np.sort(lengths).astype(np.float64)
    above = np.append(np.cumsum(ascending[::-1])[::-1], 0.0)
    count = len(lengths)

    def expected(age: IntArray, horizon: float) -> FloatArray:
        alive = count - np.searchsorted(ascending, age, side="right")
        later = np.searchsorted(ascending, age + horizon, side="right")
        late = above[later] - (count - later) * (age + horizon)
        return np.asarray(np.where(alive > 0, late / np.maximum(alive, 1), 0.0))

    rank = np.argsort(order)
    age, running = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    quantum, steps = max(1, round(float(lengths.mean()) / QUANTA)), 0
    while (open_ := np.flatnonzero(age < lengths)).size:
        horizon = float(expected(age[open_], 0.0).sum() / slots) if beyond else 0.0
        index = np.round(expected(age[open_], horizon), 6)
        chosen = open_[np.lexsort((rank[open_], ~running[open_], -index))[:slots]]
        running[:] = False
        running[chosen] = True
        most = int((lengths - age)[chosen].max())
        now = most if len(open_) <= slots else min(quantum, most)
        age[chosen] = np.minimum(lengths[chosen], age[chosen] + now)
        steps += now
    return float(steps)


def free_moves(job: Judged, slots: int, rng: np.random.Generator) -> dict[str, float]:
    """Return the losses in decode steps alone, prefill stages taking no time."""
    least = max(job.lengths.sum() / slots, float(job.lengths.max()))
    order = rng.permutation(len(job.lengths))
    steps = {
        BASELINE: in_turn(job.lengths[order], slots),
        "longest expected left": moved_freely(job.lengths, slots, order, beyond=False),
        "latest expected end": moved_freely(job.lengths, slots, order, beyond=True),
    }
    return {name: each / least - 1 for name, each in steps.items()}


def longest_together(jobs: Sequence[Judged]) -> float:
    """Return how often another of the group is among a step's longest, given that one is."""
    both, one = 0, 0
    for job in jobs:
        longest = job.lengths >= np.quantile(job.lengths, 1.0 - LONGEST)
        count, size = np.bincount(job.group, longest), np.bincount(job.group)
        both += int((count * (count - 1)).sum())
        one += int((count * (size - 1)).sum())
    return both / one


def recovered(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the baseline's mean loss, and of it the share that each other has not; 0 where there is none."""
    mean = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    base = mean.pop(BASELINE)
    shares = {name: round(1 - each / base, 3) if base else 0.0 for name, each in mean.items()}
    return {"loss": round(base, 4)} | shares


def limits_of(name: str, draws: int, most: int | None) -> dict[str, dict[str, float]]:
    """Return what each limit comes to on a data set."""
    slots, read = DATASETS[name]
    jobs = [Judged(step, slots) for step in read()[:most]]
    told: Callable[[Judged], dict[str, float]] = (
        (lambda job: {"lengths of groups told": job.of_lengths_told()})
        if name in TRACES
        else (lambda job: {"usual lengths told": usual_lengths_told(job)})
    )
    policies = (BASELINE, "fcfs-ski", CHOSEN)
    as_they_are = [{policy: job.of_policy(policy) for policy in policies} | told(job) for job in jobs]
    found = {"as they are": recovered(as_they_are)}
    if name in TRACES:
        rngs = [np.random.default_rng(seed) for seed in range(draws)]
        found["drawn anew"] = recovered([groups_told(job, slots, rng) for job in jobs for rng in rngs])
        found["free moves"] = recovered([free_moves(job, slots, rng) for job in jobs for rng in rngs])
    return found


def main() -> None:
    """Print what each limit comes to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1] if __doc__ else None)
    parser.add_argument("--data", nargs="*", choices=list(DATASETS), default=list(DATASETS))
    parser.add_argument("--draws", type=int, default=20, help="of each step (default %(default)s)")
    parser.add_argument("--most", type=int, help="steps of each data set, at most (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    args = parser.parse_args()
    report = {}
    for name in args.data:
        report[name] = limits_of(name, args.draws, args.most)
        for kind, row in report[name].items():
            shares = ", ".join(f"{key} {value:.0%}" for key, value in row.items() if key != "loss")
            print(
                f"{name}, {kind}: first come, first served {row['loss']:.1%} above the bound; {shares}",
                flush=True,
            )
        if name in TRACES:
            slots, read = DATASETS[name]
            together = longest_together([Judged(step, slots) for step in read()[: args.most]])
            print(
                f"{name}: {together:.1%} of a group's others are among the longest {LONGEST:.0%} where one is"
            )
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
