"""Objectives of plans beside the makespan: total completion time, and the first K requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .arrays import FloatArray, IntArray
from .files.record import Count, Positive

MAKESPAN = "makespan"


@dataclass(frozen=True, slots=True)
class Objective:
    """Objective of a plan.

    Parameters
    ----------
    kind
        ``total``: sum of the times at which requests are complete. ``first``: time at which the first
        ``count`` requests are complete. ``groups``: the same of groups of requests.
    count
        Requests or groups that must be complete; None for ``total``.

    Raises
    ------
    ValueError
        If the count does not fit the kind.
    """

    kind: Literal["total", "first", "groups"]
    count: Positive | None = None

    def __post_init__(self) -> None:
        if (self.kind == "total") != (self.count is None) or (self.count is not None and self.count < 1):
            raise ValueError(f"{self.kind} with a count of {self.count} is no objective")

    @classmethod
    def of(cls, text: str) -> Objective | None:
        """Return the objective of a text such as ``first:80``; None for the makespan."""
        if text == MAKESPAN:
            return None
        if text == "total":
            return cls("total")
        parts = re.fullmatch(r"(first|groups):([1-9][0-9]*)", text)
        if parts is None:
            raise ValueError(f"{text!r} is none of makespan, total, first:K and groups:K")
        return cls("first" if parts[1] == "first" else "groups", int(parts[2]))

    def __str__(self) -> str:
        return self.kind if self.count is None else f"{self.kind}:{self.count}"

    @property
    def title(self) -> str:
        """The objective in words."""
        return "total completion time" if self.count is None else f"first {self.count:,} {self.items}"

    @property
    def items(self) -> str:
        """Name of what is to be complete."""
        return "groups" if self.kind == "groups" else "requests"


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """Objective of a job's completions.

    Parameters
    ----------
    objective
        The objective.
    item
        Number of each completion's request or group, shape (completions,), which is complete with its last
        completion; None if each completion is one.
    """

    objective: Objective
    item: IntArray | None = None

    @classmethod
    def of(cls, objective: Objective, request: IntArray, group: IntArray) -> Goal:
        """Return the goal of a job; raise ValueError if it is never reached.

        request, group: Request and group of each completion, shape (completions,); a negative group is none.
        """
        label = request
        if objective.kind == "groups":
            label = np.where(group >= 0, group, int(group.max()) + 1 + request)
        _, item = np.unique(label, return_inverse=True)
        items = int(item.max()) + 1
        if objective.count is not None and objective.count > items:
            raise ValueError(
                f"there are {items:,} {objective.items}, and {objective.count:,} are to be complete"
            )
        return cls(objective, None if items == len(item) else item.astype(np.int64))

    def value(self, ended: IntArray | FloatArray) -> float:
        """Return the objective's value, from the iterations or seconds up to each completion's end."""
        ends, count = last_of(ended, self.item), self.objective.count
        return float(ends.sum() if count is None else np.partition(ends, count - 1)[count - 1])

    def select(self, members: IntArray) -> Goal:
        """Return the goal of some completions, in that order."""
        return self if self.item is None else Goal(self.objective, self.item[members])


def last_of(values: npt.NDArray[Any], item: IntArray | None) -> npt.NDArray[Any]:
    """Return the largest value of each item, shape (items,)."""
    if item is None:
        return values
    most = np.zeros(int(item.max()) + 1, dtype=values.dtype)
    np.maximum.at(most, item, values)
    return most


def sums_of(values: FloatArray | IntArray, item: IntArray | None) -> FloatArray:
    """Return the sum over each item, shape (items,)."""
    if item is None:
        return values.astype(np.float64)
    return np.bincount(item, values, int(item.max()) + 1).astype(np.float64)


@dataclass(frozen=True, slots=True)
class ObjectiveBound:
    """Least value of an objective, for any order of the requests on an engine of iterations.

    value: Iterations, or their sum over all requests.
    source: Name of the argument that proves it.
    certificate: Data from which an independent check derives it again; plain JSON values.
    """

    value: Count
    source: str
    certificate: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Aim:
    """Goal of an iteration plan, and its least value for any order.

    Parameters
    ----------
    goal
        The goal.
    bound
        Its bound.
    """

    goal: Goal
    bound: ObjectiveBound

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of certificates whose assumptions the bound relies on."""
        weights = self.bound.certificate.get("weights")
        if isinstance(weights, Mapping):
            return tuple(name for name, weight in weights.items() if weight)
        return ("longest" if self.bound.certificate.get("kind") == "longest" else "slots",)
