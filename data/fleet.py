"""Fleet of replicas that share one job, and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .arrays import IntArray
from .costs.cost import CostModel
from .files.record import Positive
from .problem import LIMITS, Problem, settle_limits
from .schedule import Schedule, Violation
from .workload import Workload

Groups = Literal["any", "together", "spread"]
"""Placement of a prompt's completions: anywhere, together or spread."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine of a fleet.

    cost: Cost model of its stages.
    slots, kv_capacity, prefill_token_cap, max_position, prefix_cache: Fields of
    :class:`~batchbound.data.problem.Problem`.
    busy: Seconds until it has finished earlier work.
    """

    cost: CostModel
    slots: Positive
    kv_capacity: Positive | None = None
    prefill_token_cap: Positive | None = None
    max_position: Positive | None = None
    busy: float = 0.0
    prefix_cache: int = 0

    def __post_init__(self) -> None:
        settle_limits(self)
        if not 0 <= self.busy < float("inf"):
            raise ValueError(f"busy is {self.busy}; it must be seconds, not negative")

    def problem(self, workload: Workload, *, prefill_emits_first_token: bool) -> Problem:
        """Return the problem of this replica alone."""
        return Problem(
            workload,
            self.cost,
            **{name: getattr(self, name) for name in LIMITS},
            prefill_emits_first_token=prefill_emits_first_token,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """One job on several replicas (MICO's queries and clouds).

    workload: Requests, all of which arrive at the start.
    replicas: One or more replicas; every request must fit each of them.
    prefill_emits_first_token: Field of :class:`~batchbound.data.problem.Problem`.
    """

    workload: Workload
    replicas: tuple[Replica, ...]
    prefill_emits_first_token: bool = False

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("a fleet has at least one replica")
        for replica in dict.fromkeys(self.replicas):
            replica.problem(self.workload, prefill_emits_first_token=self.prefill_emits_first_token)

    @classmethod
    def of(cls, problem: Problem, replicas: int) -> Fleet:
        """Return equal replicas with the problem's slots, costs and limits."""
        limits = {name: getattr(problem, name) for name in LIMITS}
        replica = Replica(problem.cost, **limits)
        return cls(problem.workload, (replica,) * replicas, problem.prefill_emits_first_token)

    def __len__(self) -> int:
        return len(self.workload)

    @property
    def decode_steps(self) -> IntArray:
        """Decode steps of each request, shape (requests,)."""
        return self.workload.output_tokens - int(self.prefill_emits_first_token)

    @property
    def kv_token_steps(self) -> IntArray:
        """KV tokens that each request reads in all steps, shape (requests,)."""
        return self._over_steps(self.workload.input_tokens)

    @property
    def own_token_steps(self) -> IntArray:
        """KV tokens that each request holds for itself, summed over its steps, shape (requests,)."""
        return self._over_steps(self.workload.own_tokens)

    def _over_steps(self, prompt: IntArray) -> IntArray:
        decode_steps, at_start = self.decode_steps, prompt + int(self.prefill_emits_first_token)
        tokens: IntArray = decode_steps * at_start + decode_steps * (decode_steps - 1) // 2
        return tokens

    def problem(self, replica: int = 0) -> Problem:
        """Return the problem of serving every request on one replica."""
        emits = self.prefill_emits_first_token
        return self.replicas[replica].problem(self.workload, prefill_emits_first_token=emits)

    def problem_of(self, replica: int, requests: npt.ArrayLike) -> Problem:
        """Return the problem of some requests on one replica."""
        return self.replicas[replica].problem(
            self.workload.select(requests), prefill_emits_first_token=self.prefill_emits_first_token
        )

    def with_output_tokens(self, output_tokens: npt.ArrayLike) -> Fleet:
        """Return the fleet with other completion lengths (tokens, shape (requests,))."""
        return Fleet(
            self.workload.with_output_tokens(output_tokens), self.replicas, self.prefill_emits_first_token
        )


@dataclass(frozen=True, slots=True, eq=False)
class FleetSchedule:
    """Assignment of requests to replicas, and each replica's schedule.

    replica_of: Replica of each request, shape (requests,).
    schedules: Schedule of each replica's requests in the workload's order; None without requests.
    """

    replica_of: IntArray
    schedules: tuple[Schedule | None, ...]

    def __post_init__(self) -> None:
        column = np.array(self.replica_of, dtype=np.int64)
        column.setflags(write=False)
        object.__setattr__(self, "replica_of", column)

    @classmethod
    def of(cls, schedule: Schedule) -> FleetSchedule:
        """Return the schedule of a fleet of one."""
        return cls(np.zeros_like(schedule.bin_of), (schedule,))

    def members(self, replica: int) -> IntArray:
        """Return the requests of a replica, ascending."""
        return np.flatnonzero(self.replica_of == replica)

    def finishes(self, fleet: Fleet) -> tuple[float, ...]:
        """Return the seconds at which each replica is done.

        Earlier work is included.
        """
        seconds = []
        for k, (replica, schedule) in enumerate(zip(fleet.replicas, self.schedules, strict=True)):
            work = 0.0 if schedule is None else schedule.makespan(fleet.problem_of(k, self.members(k)))
            seconds.append(replica.busy + work)
        return tuple(seconds)

    def computed_tokens(self, fleet: Fleet) -> int:
        """Return the prompt tokens that all stages compute."""
        return sum(
            int(schedule.stage_tokens(fleet.problem_of(k, self.members(k))).sum())
            for k, schedule in enumerate(self.schedules)
            if schedule is not None
        )

    def makespan(self, fleet: Fleet) -> float:
        """Return the seconds until every replica is done."""
        return max(self.finishes(fleet))

    def check(self, fleet: Fleet, groups: Groups = "any") -> Violation | None:
        """Return the first rule that this schedule breaks, or None."""
        if self.replica_of.shape != (len(fleet),):
            what = f"replica_of has shape {self.replica_of.shape} for {len(fleet)} requests"
            return Violation("every request is scheduled", what)
        if len(self.schedules) != len(fleet.replicas):
            what = f"{len(self.schedules)} schedules for {len(fleet.replicas)} replicas"
            return Violation("every replica has a schedule", what)
        wrong = np.flatnonzero((self.replica_of < 0) | (self.replica_of >= len(fleet.replicas)))
        if wrong.size:
            i = int(wrong[0])
            what = f"on replica {self.replica_of[i]} of {len(fleet.replicas)}"
            return Violation("every request is scheduled", what, request=i)
        for k, schedule in enumerate(self.schedules):
            members = self.members(k)
            if schedule is None:
                if members.size:
                    what = f"replica {k} has requests and no schedule"
                    return Violation("every request is scheduled", what, request=int(members[0]))
                continue
            if not members.size:
                return Violation(
                    "every replica has its own schedule", f"replica {k} has a schedule, no request"
                )
            violation = schedule.check(fleet.problem_of(k, members))
            if violation is not None:
                return Violation(violation.rule, f"replica {k}: {violation}")
        return self._check_groups(fleet, groups)

    def _check_groups(self, fleet: Fleet, groups: Groups) -> Violation | None:
        grouped = np.flatnonzero(fleet.workload.group >= 0)
        if groups == "any" or not grouped.size:
            return None
        replica_of, replicas = self.replica_of[grouped], len(fleet.replicas)
        names, group_of, sizes = np.unique(
            fleet.workload.group[grouped], return_inverse=True, return_counts=True
        )
        _, place, counts = np.unique(
            group_of * replicas + replica_of, return_inverse=True, return_counts=True
        )
        here, size = counts[place], sizes[group_of]
        wrong = np.flatnonzero(here < size if groups == "together" else here > -(-size // replicas))
        if not wrong.size:
            return None
        at = int(wrong[0])
        what = (
            f"replica {replica_of[at]} has {here[at]} of {size[at]} requests of group {names[group_of[at]]}"
        )
        rule = "a group stays together" if groups == "together" else "a group is spread"
        return Violation(rule, what, request=int(grouped[at]))
