"""Plans of one job for several numbers of slots and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..data.fleet import Groups
from ..data.plan import Plan
from ..data.problem import Problem
from ..solvers.result import Limits
from .fleet import fleet_of, make_fleet_plan

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """Makespan and bound for a number of slots and replicas.

    makespan: Makespan of the plan, seconds.
    bound: Lower bound with these slots and replicas, seconds, or None.
    """

    slots: int
    replicas: int
    makespan: float
    bound: float | None


def device_hours(replicas: int, seconds: float) -> float:
    """Return device-hours, one device per replica."""
    return replicas * seconds / HOUR


def slots_to_try(most: int) -> tuple[int, ...]:
    """Return a number of slots with its half, quarter and eighth."""
    return tuple(sorted({max(1, most // part) for part in (1, 2, 4, 8)}))


def sweep(
    problem: Problem,
    slots: Sequence[int],
    replicas: Sequence[int],
    *,
    limits: Limits,
    groups: Groups = "any",
    prompts: Sequence[str] = (),
) -> tuple[SweepPoint, ...]:
    """Plan a job for every number of slots and replicas.

    limits: Limits of all plans together; each plan gets an equal part of the seconds.
    """
    count = len(slots) * len(replicas)
    part = limits if limits.seconds is None else replace(limits, seconds=limits.seconds / count)

    def plan(slots: int, replicas: int) -> Plan:
        fleet = fleet_of(replace(problem, slots=slots), str(replicas), prompts)
        return make_fleet_plan(fleet, groups=groups, limits=part)

    points = []
    for number in replicas:
        for width in slots:
            made = plan(width, number)
            bound = None if made.bound is None else made.bound.seconds
            points.append(SweepPoint(width, number, made.makespan, bound))
    return tuple(points)
