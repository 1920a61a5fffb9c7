"""Curves of least decode steps over stages, and arguments that prove them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ..deadline import Deadline
from .least_counts import BY_MEMORY, TREE_AREA, Counts, cost_terms, prefill_seconds
from .packing.heuristics import longest_processing_time, machine_loads
from .params import BoundParams

LARGEST = 2**62
"""A number that 64 bits hold with room for a sum."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Least decode steps of any schedule with each number of prefill stages.

    part: Field of the certificate for its claim.
    steps: From the fewest stages to one a request, shape (numbers of stages,).
    claim: Data with which a checker repeats the proof, as JSON values.
    """

    part: str
    steps: IntArray
    claim: object


@dataclass(frozen=True, eq=False)
class Known:
    """Proofs about a problem so far; of several curves the largest applies.

    counts: Least prefill stages and decode steps.
    prefill: Least seconds of prefill with each number of stages, shape (numbers of stages,).
    fixed: Seconds of every schedule, for any number of stages and steps.
    curves: Proofs beyond the counts.
    """

    problem: Problem
    counts: Counts
    prefill: FloatArray
    fixed: float
    curves: tuple[Curve, ...] = ()

    @classmethod
    def of(cls, problem: Problem, counts: Counts) -> Known:
        """Return the proof by counts alone."""
        terms = cost_terms(problem, counts.stages, 0)
        fixed = terms["slot-steps"] + terms["KV reads"]
        return cls(problem, counts, prefill_seconds(problem, counts.stages), fixed)

    def with_curves(self, curves: Iterable[Curve]) -> Known:
        """Return these proofs with other curves."""
        return replace(self, curves=tuple(curves))

    @property
    def stages(self) -> IntArray:
        """Numbers of prefill stages, from the fewest to one a request."""
        return np.arange(self.counts.stages, self.counts.stages + len(self.prefill))

    @cached_property
    def steps(self) -> IntArray:
        """Least decode steps with each number of stages, shape (numbers of stages,)."""
        steps = np.full(len(self.prefill), self.counts.decode_steps)
        for curve in self.curves:
            steps = np.maximum(steps, curve.steps)
        return steps

    @cached_property
    def place(self) -> int:
        """Index of the number of stages that costs least."""
        return int((self.prefill + self.problem.cost.decode_base * self.steps).argmin())

    @property
    def cheapest(self) -> tuple[int, int]:
        """Stages and decode steps that cost least."""
        return self.counts.stages + self.place, int(self.steps[self.place])

    @property
    def seconds(self) -> float:
        """Proven seconds, up to rounding."""
        decode = self.problem.cost.decode_base * self.steps[self.place]
        return float(self.prefill[self.place] + decode + self.fixed)

    def pruned(self) -> Known:
        """Return these proofs without curves that the bound does not need."""
        known = self
        for curve in self.curves:
            fewer = known.with_curves(other_curve for other_curve in known.curves if other_curve is not curve)
            if fewer.seconds >= self.seconds:
                known = fewer
        return known


@dataclass(frozen=True, eq=False)
class Task:
    """A problem to bound, its counts, and the seconds and parameters for further proofs."""

    problem: Problem
    counts: Counts
    seconds: float
    params: BoundParams

    @cached_property
    def lengths(self) -> tuple[IntArray, IntArray]:
        """Distinct positive decode steps, ascending, and the number of requests of each."""
        decode_steps = self.problem.decode_steps
        lengths, numbers = np.unique(decode_steps[decode_steps > 0], return_counts=True)
        return lengths, numbers

    @cached_property
    def memory_binds(self) -> bool:
        """True if the KV capacity needs more steps than the slots."""
        if self.counts.claims["decode_steps"]["kind"] not in (BY_MEMORY, TREE_AREA):
            return False
        decode_steps, slots = self.problem.decode_steps, self.counts.slots
        packed = longest_processing_time(decode_steps, slots)
        loads = machine_loads(decode_steps, packed, slots)
        return self.counts.decode_steps > self.params.memory_binds * int(loads.max())

    @property
    def prices_lengths(self) -> bool:
        """True if slots bind, and the checker of prices of lengths is fast enough."""
        return not self.memory_binds and 0 < len(self.lengths[0]) <= self.params.most_lengths


class Argument(ABC):
    """Search for proofs of one kind, for one problem; a row of :data:`~.prove.ARGUMENTS`."""

    name: ClassVar[str]
    """Name by which :class:`~.params.BoundParams` leaves it out."""
    part: ClassVar[str]
    """Field of a certificate for its claims; the row of that part in ``checker.CHECKS`` checks it."""
    kind: ClassVar[str]
    """Kind of a certificate that it leads."""
    source: ClassVar[str]
    """Name of a bound whose certificate it leads; arguments after the first are named by their parts."""
    lists_claims: ClassVar[bool] = True
    """Whether the field holds a list of claims, not one."""
    counts_whole_prompts: ClassVar[bool] = False
    """Whether it is false where requests hold shared beginnings once."""

    @classmethod
    @abstractmethod
    def of(cls, task: Task) -> Self | None:
        """Return the search for a problem, or None if it proves nothing there."""

    @abstractmethod
    def prove(self, known: Known, deadline: Deadline) -> Curve | None:
        """Return a curve that may raise the bound, or None."""


def exact(stages: IntArray, largest: int) -> IntArray:
    """Return numbers of stages whose products do not overflow."""
    return stages.astype(object) if largest > LARGEST else stages
