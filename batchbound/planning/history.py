"""Length predictions for a job from earlier completions."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..data.arrays import FloatArray, IntArray
from ..data.problem import Problem
from ..data.readers.completions import is_output, lengths_by_name
from ..data.readers.tables import read_lengths
from ..data.workload import Workload
from ..heuristics.unknown_lengths.agreement import prompt_scores
from ..heuristics.unknown_lengths.groups import group_numbers
from ..heuristics.unknown_lengths.lengths import (
    SHARED_LONGEST,
    SHARES,
    TRUSTS,
    Known,
    LengthModel,
    Observed,
    normal_scores,
)
from .predictive import Predictive, Source, Tail, deviation_of_steps, ranked_scores

MATCHED = 0.5
"""Least share of groups that earlier files must name for a prediction."""

BEYOND = 2.0
"""Largest expected length over the largest seen, without a cap."""


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Earlier completions that predict a job's lengths.

    workloads: Lengths and groups, one workload per earlier step.
    """

    workloads: tuple[Workload, ...]

    def names(self, problem: Problem) -> bool:
        """Return whether earlier completions name most of a job's groups."""
        return bool((~np.isnan(self._predicted(problem))).mean() >= MATCHED) if self.workloads else False

    def known(self, problem: Problem, longest: int | None = None) -> Known:
        """Return what earlier completions tell of a job.

        If earlier completions name most of its groups, they predict each group's lengths. Otherwise they give
        the distribution of lengths and the correlation within groups. ``longest`` is the cap in decode steps.
        """
        if not self.workloads:
            return Known(longest)
        if self.names(problem):
            return Known(longest, score=self._predicted(problem))
        lengths, group = self._pooled()
        ended = np.ones(len(lengths), dtype=np.bool_)
        tokens = lengths - int(problem.prefill_emits_first_token)
        return Known(longest, past=Observed(group, tokens, ended))

    def predictive(self, problem: Problem, longest: int | None = None) -> Predictive:
        """Return the sampler of a job's lengths.

        It needs at least one earlier workload.
        """
        lengths, group = self._pooled()
        cap = self._cap(problem, longest, lengths)
        numbers, groups = group_numbers(problem)
        steps = [workload.group_numbers() for workload in self.workloads]
        scores = [ranked_scores(workload.output_tokens, lengths) for workload in self.workloads]
        deviation = deviation_of_steps(scores, steps)
        ended = np.ones(len(lengths), dtype=np.bool_)
        share = LengthModel.learnt(Observed(group, lengths, ended), int(group.max()) + 1).share_weight
        if not self.names(problem):
            pooled = Source(lengths, group, Tail.fitted(lengths, cap))
            return Predictive((pooled,), numbers, len(steps), np.zeros(groups), deviation, share, cap)
        predicted = self._predicted(problem)
        score = np.nan_to_num(normal_scores(predicted))
        if len(group) == int(group.max()) + 1:
            # No two completions share a prompt: the correlation within groups is zero.
            share = np.where(SHARES == 0, 1.0, 0.0)
        worth = self._worth(problem, float(share @ SHARES))
        sources = [
            Source(workload.output_tokens, step, Tail.fitted(workload.output_tokens, cap), each)
            for workload, step, worths in zip(self.workloads, steps, worth, strict=True)
            for each in worths
        ]
        return Predictive(tuple(sources), numbers, len(steps), score, deviation, share, cap, apart=True)

    def _pooled(self) -> tuple[IntArray, IntArray]:
        group, first = [], 0
        for workload in self.workloads:
            group.append(workload.group_numbers() + first)
            first = int(group[-1].max()) + 1
        return np.concatenate([each.output_tokens for each in self.workloads]), np.concatenate(group)

    def _cap(self, problem: Problem, longest: int | None, lengths: IntArray) -> float:
        if longest is not None:
            return float(longest + int(problem.prefill_emits_first_token))
        largest = float(lengths.max())
        return largest if int((lengths == largest).sum()) >= SHARED_LONGEST else BEYOND * largest

    def _logarithms(self, problem: Problem) -> FloatArray:
        """Return log lengths, shape (files, requests)."""
        place = {name: at for at, name in enumerate(problem.workload.ids.tolist())}
        found = np.full((len(self.workloads), len(problem)), np.nan)
        for row, workload in zip(found, self.workloads, strict=True):
            at = np.array([place.get(name, -1) for name in workload.ids.tolist()])
            row[at[at >= 0]] = np.log(workload.output_tokens[at >= 0])
        return found

    def _predicted(self, problem: Problem) -> FloatArray:
        """Return each group's predicted log length, NaN if unknown."""
        return _agreed(problem, self._logarithms(problem))

    def _worth(self, problem: Problem, share: float) -> list[list[float]]:
        """Return the possible correlations of each file with the others' prediction.

        A single file leaves the correlation unknown. Several completions of a prompt estimate it from their
        shared variance; else it is any of :data:`~batchbound.heuristics.unknown_lengths.lengths.TRUSTS`.
        """
        logarithms = self._logarithms(problem)
        numbers, groups = group_numbers(problem)
        if len(logarithms) == 1:
            size = len(numbers) / groups
            alike = share * math.sqrt(size / (1 + (size - 1) * share))
            return [[alike] if share else TRUSTS.tolist()]
        found = []
        for at, row in enumerate(logarithms):
            others = _agreed(problem, np.delete(logarithms, at, axis=0))[numbers]
            both = ~np.isnan(others) & ~np.isnan(row)
            found.append([_correlation(others[both], row[both])])
        return found


def known_lengths(
    problem: Problem, history: Iterable[str | os.PathLike[str]], longest: int | None = None
) -> Known:
    """Return a prior for a job's lengths from earlier completions.

    Parameters
    ----------
    problem
        The job; its own lengths are not read.
    history
        Files of earlier completions: tables of lengths, traces or outputs of runs.
    longest
        Decode steps after which every completion is cut; None for no limit.

    Returns
    -------
    Known
        A prediction for each group that ``history`` names; else the distribution of lengths and their
        correlation within groups.

    Raises
    ------
    InputError
        If a file holds no completions.
    """
    return History(tuple(earlier_completions(path) for path in history)).known(problem, longest)


def earlier_completions(path: str | os.PathLike[str]) -> Workload:
    """Read the lengths and groups of earlier completions.

    ``path`` is a table of lengths, the trace of a run or its output. A run names the completions of request
    ``a`` ``a#0``, ``a#1`` and so on. Prompts count as one token unless a table has them.
    """
    if not is_output(path):
        return read_lengths(path)
    lengths = lengths_by_name(path, apart=True)
    request = [name.rpartition("#")[0] if re.search(r"#\d+$", name) else "" for name in lengths]
    first = {name.removesuffix("#0") for name in lengths if name.endswith("#0")}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(request)) if name in first}
    group = np.array([numbers.get(name, -1) for name in request], dtype=np.int64)
    tokens = np.array(list(lengths.values()), dtype=np.int64)
    return Workload(np.array(list(lengths), dtype=np.object_), np.ones_like(tokens), tokens, group=group)


def _correlation(one: FloatArray, other: FloatArray) -> float:
    if len(one) < 3 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return max(0.0, float(np.corrcoef(normal_scores(one), normal_scores(other))[0, 1]))


def _agreed(problem: Problem, logarithms: FloatArray) -> FloatArray:
    """Return each group's mean log length over all files."""
    numbers, groups = group_numbers(problem)
    mean = np.full((len(logarithms), groups), np.nan)
    for row, file in zip(mean, logarithms, strict=True):
        told = ~np.isnan(file)
        count = np.bincount(numbers[told], minlength=groups)
        total = np.bincount(numbers[told], file[told], minlength=groups)
        row[count > 0] = total[count > 0] / count[count > 0]
    some = ~np.isnan(mean).all(axis=1)
    if not some.any():
        return np.full(groups, np.nan)
    prompt = np.bincount(numbers, problem.prompt_tokens, minlength=groups)
    return prompt_scores(mean[some], prompt / np.bincount(numbers))
