"""A plan of several steps of rollouts whose lengths nobody knows: what `plan --steps` writes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from ..costs.cost import IntArray
from ..files.disk import InputError, read_json_object, write_json
from ..files.kinds import refuse_other_kinds
from ..files.record import plain, record
from ..fleet import Fleet
from ..plan import Provenance, holds_requests, relative_path
from ..problem import Problem

COVERAGE = 0.9
"""Probability of the intervals that are stated."""


@dataclass(frozen=True, slots=True)
class Way:
    """
    When a step ends, and what becomes of requests that are not complete then.

    Parameters
    ----------
    ahead
        Groups in play beyond those that a step waits for, as a share of the step's: 0 is a barrier. A step
        ends when as many groups are complete as it has; the others go on in the next one (APRIL's
        over-provision and recycling, Zhou et al. 2025).
    keep
        Completions of each group that are kept, the first to end; the others are stopped, and their group
        is complete. None for all.
    restart
        Whether groups that are not complete start again from nothing, in rounds of their own that have a
        barrier (RollPacker's tail batching, Gao et al. 2025), in place of going on in the next step.
    keep_kv
        Whether requests that go on keep the KV cache of the weights before; else it is computed anew.

    Raises
    ------
    ValueError
        If a number is out of its range, or an option has no effect.
    """

    ahead: float = 0.0
    keep: int | None = None
    restart: bool = False
    keep_kv: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ahead) and self.ahead >= 0):
            raise ValueError(f"ahead is {self.ahead!r}; it must be a share, not negative")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}; at least one completion of a group is kept")
        for name in ("restart", "keep_kv"):
            if getattr(self, name) and self.ahead == 0:
                raise ValueError(f"{name} has no effect where nothing goes on: ahead is 0")
        if self.restart and self.keep_kv:
            raise ValueError(
                "keep_kv has no effect on requests that start again: leave restart or keep_kv out"
            )


BARRIER = Way()
"""Every step waits for all of its completions."""


@dataclass(frozen=True, slots=True)
class Interval:
    """
    A quantity to expect.

    Parameters
    ----------
    mean
        Over the sampled lengths.
    low, high
        Limits that it is between with probability :data:`COVERAGE`.
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return what to expect of the next value after these, all drawn alike."""
        tails = ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2)
        low, high = np.quantile(values, tails, method="weibull").tolist()
        return cls(float(np.mean(values)), low, high)


@dataclass(frozen=True, slots=True)
class StepsExpectation:
    """
    What to expect of several steps over the lengths that may come out.

    Parameters
    ----------
    total
        Seconds of all steps.
    seconds
        Of each step.
    first_come
        Seconds of all steps by arrival with a barrier, over the same lengths.
    bound
        Seconds that no schedule beats that knows all lengths: of each step alone where all have a barrier,
        of all steps together where completions go on, of the shortest of each group where some are stopped.
    stale_share
        Share of kept completions begun in an earlier step than they ended.
    staleness
        Steps between the two, on average.
    kept_bias
        By what share kept completions are longer than all.
    early_bias
        By what share those kept before the last step are.
    samples
        Sets of lengths that were drawn.
    compared
        Mean seconds of all steps by each way and policy that were compared, empty if there was no choice.
    told_tendencies, told_lengths
        Seconds of all steps, in the same way, by policies told more than can be known: how long each group
        tends to be, and which lengths each has but not whose. No bounds: estimates of what is left to
        foresight. None of a plan under way.
    """

    total: Interval
    seconds: tuple[Interval, ...]
    first_come: Interval
    bound: Interval
    stale_share: float
    staleness: float
    kept_bias: float
    early_bias: float
    samples: int
    compared: Mapping[str, float] = field(default_factory=dict)
    told_tendencies: Interval | None = None
    told_lengths: Interval | None = None

    def recovered(self, seconds: Interval) -> float | None:
        """Return what share of first come, first served's loss above the bound a time does not have."""
        lost = self.first_come.mean - self.bound.mean
        return None if lost <= 0 else (self.first_come.mean - seconds.mean) / lost


@dataclass(frozen=True, slots=True, eq=False)
class StepsPlan:
    """
    Several steps of rollouts whose lengths nobody knows: how to serve them, and what to expect of it.

    There is no schedule in it, as nothing that is known could be followed to the end: the policy decides as
    completions end. So there is no bound to verify either, only one to expect.

    Parameters
    ----------
    fleet
        The requests of all steps with their groups, step by step, and the one replica that serves them. What
        stands for the lengths is one token each.
    step
        The step of each request, counted from zero, shape (requests,).
    permitted
        What may become of completions that are not complete at a step's end, by the user.
    way
        What was chosen of it.
    policy
        A key of :data:`~batchbound.heuristics.unknown_lengths.registry.WITHOUT_LENGTHS`.
    longest
        Tokens after which every completion is cut; None for no limit.
    ended
        Tokens of each completion that had ended when the plan was made or updated, 0 for the others, shape
        (requests,).
    expected
        What to expect.
    seed
        Of the drawn lengths.
    column
        Of the history's tables, that tells its steps apart; None where each file is of one.
    history
        The files of earlier completions, and the SHA-256 of each. A plan's file names them as seen from it.
    provenance
        Where costs and prompts come from.
    """

    JSON_HEADER: ClassVar = ("batchbound_steps_plan", 1)
    JSON_HINT: ClassVar = "Plan again."

    fleet: Fleet
    step: IntArray
    permitted: Way
    way: Way
    policy: str
    longest: int | None
    ended: IntArray
    expected: StepsExpectation
    seed: int
    column: str | None = None
    history: Mapping[str, str] = field(default_factory=dict)
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def problem(self) -> Problem:
        """The requests, costs and limits, without lengths."""
        return self.fleet.problem()

    def digest(self) -> str:
        """Return the SHA-256 of what does not change as completions end."""
        value = {name: one for name, one in self.to_json().items() if name not in ("ended", "expected")}
        # What they hold, wherever they are.
        value["history"] = list(self.history.values())
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    def seen_from(self, path: str | os.PathLike[str], planned_at: str | os.PathLike[str]) -> Self:
        """Return the plan of one file for another, from which its prompts are seen."""
        prompts = self.provenance.prompts
        if prompts is None:
            return self
        folder, planned_in = (os.path.dirname(os.path.realpath(each)) for each in (path, planned_at))
        seen = prompts.seen_from(folder, planned_in)
        return replace(self, provenance=replace(self.provenance, prompts=seen))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        value: dict[str, Any] = plain(self)
        return value

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path``, whole or not at all."""
        folder = os.path.dirname(os.path.realpath(path))
        seen = {relative_path(name, folder): digest for name, digest in self.history.items()}
        write_json(path, replace(self, history=seen).to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepsPlan:
        """
        Return the plan that :meth:`save` wrote.

        Raises
        ------
        InputError
            If the file is not such a plan, or its columns do not fit its requests.
        """
        refuse_other_kinds(path, "no plan of several steps", {"batchbound_steps_plan"})
        if holds_requests(path):
            hint = "Make a plan of it: batchbound plan FILE --steps COLUMN --history FILE."
            raise InputError("holds requests, it is no plan of several steps", file=path, hint=hint)
        plan = record(cls, read_json_object(path), file=path)
        for name in ("step", "ended"):
            if len(getattr(plan, name)) != len(plan.fleet):
                what = f"has {len(getattr(plan, name))} entries for {len(plan.fleet)} requests"
                raise InputError(what, file=path, where=f"field '{name}'", hint=cls.JSON_HINT)
        folder = os.path.dirname(os.path.realpath(path))
        there = {os.path.normpath(os.path.join(folder, name)): one for name, one in plan.history.items()}
        return replace(plan, history=there)
