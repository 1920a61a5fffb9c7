"""Curves of least decode steps over stages, and arguments that prove them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.bound import Bound
from ...data.problem import Problem
from ..deadline import Deadline
from .least_counts import Counts, cost_terms, prefill_seconds

LARGEST = 2**62
"""A number that 64 bits hold with room for a sum."""

Part = Literal["decode_steps", "charges", "intervals", "growth"]
"""Field of a certificate that holds the claims of an argument."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Least decode steps of any schedule with each number of prefill stages.

    part: Field of the certificate for its claim.
    steps: From the fewest stages to one a request, shape (numbers of stages,).
    claim: Data with which a checker repeats the proof, as JSON values.
    """

    part: Part
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
            fewer = known.with_curves(each for each in known.curves if each is not curve)
            if fewer.seconds >= self.seconds:
                known = fewer
        return known

    def bound(self) -> Bound:
        """Return the bound with its certificate."""
        terms = cost_terms(self.problem, *self.cheapest)
        claims: dict[Part, list[object]] = {}
        for curve in self.curves:
            claims.setdefault(curve.part, []).append(curve.claim)
        certificate: dict[str, object] = {"kind": "trivial", "slots": self.counts.slots, **self.counts.claims}
        for claim in claims.pop("decode_steps", []):
            certificate["decode_steps"] = claim
        source = "fewest stages and decode steps"
        growth = claims.pop("growth", None)
        if growth is not None:
            (certificate["growth"],) = growth
            certificate["kind"], source = "growth", "growing keys and values"
        if claims:
            certificate |= {"kind": "difference set", "charges": [], "intervals": []}
            certificate.update({str(part): claim for part, claim in claims.items()})
            source = "difference set"
            source += " and intervals" if "intervals" in claims else ""
            source += " and growth" if growth is not None else ""
        return Bound(sum(terms.values()), source, terms, certificate)


class Argument(Protocol):
    """Search for proofs of one kind, for one problem."""

    @property
    def name(self) -> str:
        """Field of :class:`~.params.BoundParams` that switches it off."""

    def prove(self, known: Known, deadline: Deadline) -> Curve | None:
        """Return a curve that may raise the bound, or None."""


def exact(stages: IntArray, largest: int) -> IntArray:
    """Return numbers of stages whose products do not overflow."""
    return stages.astype(object) if largest > LARGEST else stages
