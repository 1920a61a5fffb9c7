"""Plans for a fleet of replicas: dispatch, schedule, check and bound."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from ..data.arrays import IntArray
from ..data.costs.cost import CostModel
from ..data.expectation import Expectation
from ..data.files.disk import InputError, read_json_object
from ..data.files.record import Positive, record, refuse_unknown
from ..data.fleet import Fleet, FleetSchedule, Groups, Replica
from ..data.lengths.prediction_error import LogNormalError, PredictionError
from ..data.plan import Maker, Plan, Provenance
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..heuristics.dispatch import dispatch, group_members
from ..heuristics.fleet.policy import choose_fleet_policy, serve_with_backoff
from ..models.bounds.fleet import fleet_bound
from ..solvers.fleet import plan_fleet
from ..solvers.result import Limits, StoppedBy
from ..solvers.search.constructive import ski_rental_schedule
from ..solvers.solve import DEFAULT_SECONDS
from ..version import __version__
from .evicting import following_plan, searched
from .plan import PlanningError, make_plan

COMPARED, COMPARED_OF_MANY = 5, 2
"""Sampled sets of lengths that compare policies, below and from 5,000 requests."""

SAMPLES = 19
"""Sampled sets of lengths for the interval, from least to largest."""

MOST_REPLICAS = 100_000
"""Most replicas of a fleet; a larger number is probably a mistake."""

_HINT = "Give a number of replicas, or a JSON file like the documentation's."


def make_fleet_plan(
    fleet: Fleet,
    *,
    groups: Groups = "any",
    rule: str | None = None,
    limits: Limits | None = None,
    provenance: Provenance | None = None,
) -> Plan:
    """Plan all replicas of a fleet, with the fleet's bound.

    A single replica that is not busy gets the plan of :func:`~batchbound.planning.plan.make_plan`.
    """
    limits = Limits(seconds=DEFAULT_SECONDS) if limits is None else limits
    if len(fleet.replicas) == 1 and not fleet.replicas[0].busy:
        return replace(make_plan(fleet.problem(), limits=limits, provenance=provenance), groups=groups)
    return _planned(fleet, groups, rule, limits, provenance or Provenance())


def _planned(fleet: Fleet, groups: Groups, rule: str | None, limits: Limits, provenance: Provenance) -> Plan:
    begun = time.perf_counter()
    result = plan_fleet(
        fleet,
        limits=searched(fleet, limits),
        groups=None if groups == "any" else group_members(fleet),
        keep="spread" if groups == "spread" else "together",
        shares=None if rule is None else _dispatched(fleet, rule, groups),
    )
    violation = result.schedule.check(fleet)
    if violation is not None:
        raise PlanningError(f"the fleet's schedule broke a rule: {violation}")
    seconds = limits.noted(result.seconds)
    maker = Maker(
        "fleet", __version__, result.status, result.stopped_by, seconds, limits.seed, result.message
    )
    plan = Plan(fleet, result.schedule, result.makespan, result.bound, maker, groups, provenance)
    return following_plan(plan, until=None if limits.seconds is None else begun + limits.seconds)


def make_robust_fleet_plan(
    fleet: Fleet,
    error: PredictionError,
    *,
    groups: Groups = "any",
    rule: str | None = None,
    longest: IntArray | None = None,
    seed: int = 0,
    provenance: Provenance | None = None,
) -> Plan:
    """Plan a fleet from predicted lengths with a stated error.

    Each replica follows a queue, with backoff. Sampled lengths choose its order and its patience. They also
    decide if nearly finished requests give way near the end. The schedules are the queues' at the expected
    lengths.

    longest: Most tokens of each completion (its ``max_tokens``), shape (requests,); None for no limit.
    """
    begun = time.perf_counter()
    predicted = fleet.workload.output_tokens
    if isinstance(error, LogNormalError):
        error = error.for_predictions(predicted, longest)
    planned = fleet.with_output_tokens(error.expected(predicted, longest))
    if rule is not None:
        _dispatched(planned, rule, groups)
    policy, replica_of = choose_fleet_policy(
        fleet,
        error,
        samples=COMPARED if len(fleet) < 5000 else COMPARED_OF_MANY,
        seed=seed,
        rule=rule or "lpt",
        groups=groups,
        longest=longest,
    )
    schedules: list[Schedule | None] = []
    for k in range(len(fleet.replicas)):
        mine = np.flatnonzero(replica_of == k)
        problem = planned.problem_of(k, mine) if mine.size else None
        schedules.append(
            None
            if problem is None
            else ski_rental_schedule(
                problem, order=policy.queue(problem), patience=policy.patience
            ).without_idle_steps(problem)
        )
    shares = FleetSchedule(replica_of, tuple(schedules))
    violation = shares.check(planned, groups)
    if violation is not None:
        raise PlanningError(f"the fleet's schedule broke a rule: {violation}")
    drawn = error.sample(predicted, np.random.default_rng((seed, 1)), SAMPLES, longest)
    backoff = groups == "any"
    ends = [serve_with_backoff(planned, replica_of, policy, row, backoff=backoff).makespan for row in drawn]
    makespan, bound = shares.makespan(planned), fleet_bound(planned)
    took, status = time.perf_counter() - begun, "optimal" if bound.proves(makespan) else "feasible"
    maker = Maker(f"{policy.order} queues", __version__, status, StoppedBy.FINISHED, took, seed)
    expected = Expectation.of(
        ends, policy.order, policy.patience, tail=policy.tail, error=error.to_json(), compared=policy.compared
    )
    return Plan(planned, shares, makespan, bound, maker, groups, provenance or Provenance(), expected)


def _dispatched(fleet: Fleet, rule: str, groups: Groups) -> IntArray:
    try:
        return dispatch(fleet, rule, groups)
    except ValueError as error:
        raise InputError(
            str(error), where="--dispatch", hint="Choose another rule, or leave it out."
        ) from None


def shared_out(plan: Plan, replicas: int) -> Plan:
    """Return a plan of the same job on several equal replicas."""
    return make_fleet_plan(Fleet.of(plan.problem, replicas), provenance=plan.provenance)


def fleet_of(problem: Problem, spec: str, prompts: Sequence[str] = ()) -> Fleet:
    """Return the fleet that ``spec`` describes.

    ``spec`` is a number of replicas, or a JSON file ``{"replicas": [{...}, ...]}``. Each entry overrides the
    problem: ``speed`` (2 for half the seconds), ``slots``, ``kv_capacity``, ``prefill_token_cap``, ``busy``
    (seconds), and ``count`` for several equal replicas.
    """
    workload = problem.workload
    if prompts and (workload.group < 0).all():
        group = np.unique(np.array(prompts, dtype=object).astype(str), return_inverse=True)[1]
        workload = replace(workload, group=group.astype(np.int64))
    one = Fleet.of(problem, 1).replicas[0]
    if re.fullmatch(r"0*[1-9]\d{0,17}", spec):
        _refuse_many(int(spec), where="replicas")
        replicas: tuple[Replica, ...] = (one,) * int(spec)
    else:
        replicas = tuple(_read_replicas(spec, one))
    return Fleet(workload, replicas, problem.prefill_emits_first_token)


def _read_replicas(spec: str, one: Replica) -> list[Replica]:
    if re.fullmatch(r"-?0*", spec):
        raise InputError(f"{spec} replicas serve nothing", where="--replicas", hint=_HINT)
    if not Path(spec).is_file():
        raise InputError(f"{spec!r} is neither a number of replicas nor a file", hint=_HINT)
    entries = read_json_object(spec).get("replicas")
    if not isinstance(entries, list) or not entries:
        raise InputError("lists no replicas", file=spec, where="field 'replicas'", hint=_HINT)
    replicas: list[Replica] = []
    for number, entry in enumerate(entries):
        within, hint = f"replicas.{number}", "Correct it there."
        refuse_unknown(_Differing, entry, file=spec, within=within, hint=hint)
        given = record(_Differing, entry, file=spec, within=within, hint=hint)
        limits = {name: getattr(given, name) for name in _LIMITS if getattr(given, name) is not None}
        if one.kv_capacity is not None and "kv_capacity" in limits:
            # Shared prompts are kept in the replica's memory, too.
            limits["kv_capacity"] = max(1, limits["kv_capacity"] - one.prefix_cache)
        where = f"field '{within}'"
        try:
            replica = replace(one, cost=_faster(one.cost, given.speed), busy=given.busy, **limits)
        except ValueError as error:
            raise InputError(str(error), file=spec, where=where, hint=hint) from None
        _refuse_many(len(replicas) + given.count, file=spec, where=where)
        replicas += [replica] * given.count
    return replicas


@dataclass(frozen=True, slots=True)
class _Differing:
    """One entry of a fleet file."""

    speed: float = 1.0
    count: Positive = 1
    slots: Positive | None = None
    kv_capacity: Positive | None = None
    prefill_token_cap: Positive | None = None
    busy: float = 0.0

    def __post_init__(self) -> None:
        if self.speed <= 0:
            raise ValueError(f"speed is {self.speed}; it must be above 0")


_LIMITS = ("slots", "kv_capacity", "prefill_token_cap")


def _refuse_many(count: int, *, file: str | None = None, where: str) -> None:
    if count > MOST_REPLICAS:
        message = f"{count:,} replicas are more than {MOST_REPLICAS:,}"
        raise InputError(message, file=file, where=where, hint="Correct the number.")


def _faster(cost: CostModel, speed: float) -> CostModel:
    seconds = {entry.name: getattr(cost, entry.name) / speed for entry in fields(cost)}
    return CostModel(**seconds)
