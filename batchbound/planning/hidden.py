"""Jobs whose lengths nobody knows: what to expect of them, and what a policy reaches that sees none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..data.costs.cost import FloatArray, IntArray
from ..data.problem import Problem
from ..data.trace import Trace
from ..data.workload import Workload
from ..heuristics.rollouts.agreement import prompt_scores
from ..heuristics.rollouts.hidden import CHOSEN, hidden_policy, without_lengths
from ..heuristics.rollouts.lengths import Known, LengthModel, Observed
from ..heuristics.rollouts.queues import group_numbers
from ..heuristics.rollouts.steps import StepsRun, Way, simulate_steps
from ..heuristics.simulate import simulate

COVERAGE = 0.9

SAMPLES = 39
"""Sampled sets of lengths for the interval; the second from either end is its limit."""

MATCHED = 0.5
"""Share of a job's groups that earlier files must complete for these to be predictions of its lengths."""

SPREAD = 0.15
"""Standard deviation of the logarithm of the factor by which a step's lengths differ from earlier ones."""


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """
    Completions of earlier steps, of earlier epochs, or of other models.

    Parameters
    ----------
    workloads
        One each, with its lengths and groups; none is of the job.
    """

    workloads: tuple[Workload, ...]

    def known(self, problem: Problem, longest: int | None = None) -> Known:
        """
        Return what is known of a job beforehand.

        Where most of its requests bear the names of earlier ones, these predict how long each is; else the
        earlier ones say how lengths are distributed and how alike those of a group are.

        Parameters
        ----------
        problem
            The job; its lengths are not read.
        longest
            Decode steps after which every completion is cut; None for no limit.
        """
        if not self.workloads:
            return Known(longest)
        score = self._scores(problem)
        if score is not None:
            return Known(longest, score=score)
        emitted = int(problem.prefill_emits_first_token)
        group, tokens, first = [], [], 0
        for workload in self.workloads:
            numbers = _groups(workload)
            group.append(numbers + first)
            tokens.append(workload.output_tokens - emitted)
            first += int(numbers.max()) + 1
        ended = np.ones(sum(map(len, tokens)), dtype=np.bool_)
        return Known(longest, past=Observed(np.concatenate(group), np.concatenate(tokens), ended))

    def draw(self, problem: Problem, rng: np.random.Generator) -> IntArray:
        """
        Return one set of lengths that the job may turn out to have (tokens, shape (requests,)).

        Of requests with earlier ones of their names, a file's lengths; else each group takes the lengths of
        an earlier group, drawn with its requests.

        Parameters
        ----------
        problem
            The job; its lengths are not read.
        rng
            Draws.
        """
        numbers, groups = group_numbers(problem)
        if self._scores(problem) is not None:
            one = self.workloads[int(rng.integers(len(self.workloads)))]
            length_of = dict(zip(one.ids.tolist(), one.output_tokens.tolist(), strict=True))
            rest = rng.choice(one.output_tokens, len(problem))
            named = problem.workload.ids.tolist()
            return np.array(
                [length_of.get(name, other) for name, other in zip(named, rest.tolist(), strict=True)]
            )
        pools = [
            workload.output_tokens[label == group]
            for workload in self.workloads
            for label in (_groups(workload),)
            for group in range(int(label.max()) + 1)
        ]
        found = np.empty(len(problem), dtype=np.int64)
        for group, pool in zip(range(groups), rng.integers(len(pools), size=groups).tolist(), strict=True):
            members = np.flatnonzero(numbers == group)
            have = pools[pool]
            found[members] = rng.choice(have, len(members), replace=len(members) > len(have))
        return found

    def _scores(self, problem: Problem) -> FloatArray | None:
        """Return what earlier completions of the same names say of each group, or None if few have any."""
        numbers, groups = group_numbers(problem)
        group_of = dict(zip(problem.workload.ids.tolist(), numbers.tolist(), strict=True))
        lengths = np.full((len(self.workloads), groups), np.nan)
        for row, workload in zip(lengths, self.workloads, strict=True):
            group = np.array([group_of.get(name, -1) for name in workload.ids.tolist()], dtype=np.int64)
            named, tokens = group[group >= 0], workload.output_tokens[group >= 0]
            count = np.bincount(named, minlength=groups)
            total = np.bincount(named, np.log(tokens), minlength=groups)
            row[count > 0] = (total / np.maximum(count, 1))[count > 0]
        told = ~np.isnan(lengths)
        if told.any(axis=0).mean() < MATCHED:
            return None
        prompt = np.bincount(numbers, problem.prompt_tokens, minlength=groups)
        return prompt_scores(lengths[told.any(axis=1)], prompt / np.bincount(numbers))


@dataclass(frozen=True, slots=True)
class Interval:
    """
    Seconds to expect.

    Parameters
    ----------
    mean
        Over the sampled lengths.
    low, high
        Limits that the makespan is between with probability :data:`COVERAGE`.
    """

    mean: float
    low: float
    high: float


def expected_makespan(
    problem: Problem,
    history: History,
    *,
    policy: str = CHOSEN,
    longest: int | None = None,
    swap: float | None = None,
    seed: int = 0,
) -> Interval:
    """
    Return the makespan to expect before a job begins, by what earlier ones were like.

    Each set of lengths that is drawn is longer or shorter by a factor of its own, as steps differ.

    Parameters
    ----------
    problem
        The job; its lengths are not read.
    history
        At least one earlier workload.
    policy
        A key of :data:`~batchbound.heuristics.rollouts.hidden.WITHOUT_LENGTHS`.
    longest
        Decode steps after which every completion is cut; None for no limit.
    swap
        Seconds a token of KV cache takes to the host or back; None if it cannot be moved.
    seed
        Draws the lengths.
    """
    blind, rng = without_lengths(problem), np.random.default_rng(seed)
    known, seconds = history.known(problem, longest), []
    for _ in range(SAMPLES):
        truth = history.draw(problem, rng) * np.exp(SPREAD * rng.standard_normal())
        most = np.inf if longest is None else longest + int(problem.prefill_emits_first_token)
        truth = np.maximum(1, np.minimum(np.rint(truth), most)).astype(np.int64)
        made = hidden_policy(policy, blind, known, swap)
        seconds.append(simulate(blind, made, truth, swap=swap).makespan)
    tails = ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2)
    low, high = np.quantile(seconds, tails, method="weibull").tolist()
    return Interval(float(np.mean(seconds)), low, high)


def simulate_hidden(
    problem: Problem,
    policy: str = CHOSEN,
    known: Known | None = None,
    swap: float | None = None,
) -> Trace:
    """
    Return the trace of a job whose policy sees no length.

    Parameters
    ----------
    problem
        The job with its true lengths.
    policy
        A key of :data:`~batchbound.heuristics.rollouts.hidden.WITHOUT_LENGTHS`.
    known
        What is known beforehand; nothing by default.
    swap
        Seconds a token of KV cache takes to the host or back; None if it cannot be moved.
    """
    blind = without_lengths(problem)
    made = hidden_policy(policy, blind, Known() if known is None else known, swap)
    return simulate(blind, made, problem.workload.output_tokens, swap=swap)


def simulate_hidden_steps(
    problem: Problem, step: IntArray, way: Way, policy: str = CHOSEN, known: Known | None = None
) -> StepsRun:
    """
    Return what steps come to whose policy sees no length.

    Parameters
    ----------
    problem
        The requests of all steps with their true lengths, step by step.
    step
        The step of each, shape (requests,).
    way
        When a step ends.
    policy, known
        As of :func:`simulate_hidden`.
    """
    blind = without_lengths(problem)
    made = hidden_policy(policy, blind, Known() if known is None else known)
    return simulate_steps(blind, step, way, made, problem.workload.output_tokens)


def shared_variance(problem: Problem, trace: Trace) -> float:
    """Return the intraclass correlation that the lengths of a finished job show, from 0 to 1."""
    numbers, groups = group_numbers(problem)
    emitted = int(problem.prefill_emits_first_token)
    ended = np.ones(len(problem), dtype=np.bool_)
    return LengthModel.learnt(Observed(numbers, trace.tokens - emitted, ended), groups).share


def sharing_prompts(problem: Problem, kept: int) -> Problem:
    """Return the problem in which each group's prompt is computed once, with room to keep ``kept`` tokens."""
    return replace(problem, workload=problem.workload.with_shared_prompts(), prefix_cache=kept)


def joined_steps(steps: Sequence[Workload]) -> tuple[Workload, IntArray]:
    """Return the requests of several steps as one workload, and the step of each."""
    columns = {name: np.concatenate([getattr(step, name) for step in steps]) for name in Workload.__slots__}
    groups, first = [], 0
    for step in steps:
        numbers = _groups(step)
        groups.append(numbers + first)
        first += int(numbers.max()) + 1
    columns["group"] = np.concatenate(groups)
    return Workload(**columns), np.repeat(np.arange(len(steps)), [len(step) for step in steps])


def _groups(workload: Workload) -> IntArray:
    """Return the group of each request, counted from zero; those without one are groups of their own."""
    group = workload.group.copy()
    alone = group < 0
    group[alone] = group.max(initial=-1) + 1 + np.arange(int(alone.sum()))
    return np.unique(group, return_inverse=True)[1].astype(np.int64)
