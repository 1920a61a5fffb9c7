"""Plans for one replica: solve, check and bound."""

from __future__ import annotations

import time
from dataclasses import replace

from ..data.fleet import Fleet
from ..data.plan import Maker, Plan, Provenance
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..listening import note
from ..models.bounds.divisions import is_divided
from ..models.bounds.makespan import best_bound
from ..models.bounds.prove import proven_bound
from ..solvers.cache_choice import divisions
from ..solvers.result import Limits, Result, Status, StoppedBy, despite_interrupt
from ..solvers.search.params import SearchParams
from ..solvers.solve import DEFAULT_SECONDS, DEFAULT_SOLVER, solve
from .evicting import following_plan, searched


class PlanningError(RuntimeError):
    """Error of a solver without a valid schedule."""


def make_plan(
    problem: Problem,
    *,
    solver: str = DEFAULT_SOLVER,
    limits: Limits | None = None,
    start: Schedule | None = None,
    params: SearchParams | None = None,
    provenance: Provenance | None = None,
    evicting: bool = True,
) -> Plan:
    """Plan one replica: solve, check and bound.

    Where the search may divide the KV capacity, several divisions are planned, and the best is kept. Under a
    KV capacity the plan follows a policy that evicts requests, if one takes less than the schedule.

    problem: Requests, costs and limits; arrivals are ignored.
    solver: Name of the solver, see :func:`~batchbound.solvers.solve.solve`.
    limits: Stopping criteria; :data:`DEFAULT_SECONDS` by default.
    start: Schedule to improve on, for solvers that can.
    params: Parameters of the default solver.
    provenance: Sources of the numbers, for the plan's record.
    evicting: True if the plan may follow a policy that evicts requests.

    Raises PlanningError if the solver finds no valid schedule.
    """
    problem = problem.without_arrivals()
    limits = Limits(seconds=DEFAULT_SECONDS) if limits is None else limits
    problems = divisions(problem) if is_divided(problem) else [problem]
    plans, begun, part = list[Plan](), time.perf_counter(), limits.part(1 / len(problems))
    if evicting:
        part = searched(Fleet.of(problem, 1), part)
    for number, divided in enumerate(problems, start=1):
        first = start if number == 1 else None
        plan = _planned(divided, solver, part, first, params, provenance or Provenance())
        until = None if limits.seconds is None else begun + limits.seconds * number / len(problems)
        plans.append(following_plan(plan, until=until) if evicting else plan)
        if plan.maker.stopped_by == StoppedBy.INTERRUPT:
            break
    best = _best_division(plans)
    if best.problem.prefix_cache != problem.prefix_cache:
        note(f"{best.problem.prefix_cache:,} tokens instead: that plan takes less")
    return best


def _best_division(plans: list[Plan]) -> Plan:
    """Return the plan that takes least, with the best bound of every division."""
    best = min(plans, key=lambda plan: plan.seconds)
    if len(plans) == 1:
        return best
    bound = max((plan.bound for plan in plans if plan.bound is not None), key=lambda bound: bound.seconds)
    claim = bound if best.followed is None else best.followed.bound
    status = Status.OPTIMAL if claim.proves(best.seconds) else Status.FEASIBLE
    spent = [plan.maker.seconds for plan in plans]
    message = best.maker.message
    if status is Status.FEASIBLE and best.followed is None and _is_best_of_its_division(best):
        message = "best for this division of the KV capacity"
    maker = replace(
        best.maker,
        status=status,
        seconds=None if None in spent else sum(filter(None, spent)),
        stopped_by=plans[-1].maker.stopped_by if status is Status.FEASIBLE else StoppedBy.PROOF,
        message=message,
    )
    return replace(best, bound=bound, maker=maker)


def _is_best_of_its_division(plan: Plan) -> bool:
    return best_bound(replace(plan.problem, memory_divided=False)).proves(plan.makespan)


def _planned(
    problem: Problem,
    solver: str,
    limits: Limits,
    start: Schedule | None,
    params: SearchParams | None,
    provenance: Provenance,
) -> Plan:
    result = solve(problem, solver, limits=limits, initial=start, params=params)
    plan, interrupted = despite_interrupt(lambda: _plan_of(problem, result, solver, limits, provenance))
    if interrupted:
        plan = replace(plan, maker=replace(plan.maker, stopped_by=StoppedBy.INTERRUPT))
    return plan


def _plan_of(problem: Problem, result: Result, solver: str, limits: Limits, provenance: Provenance) -> Plan:
    """Return the plan of a solver's result, checked by the referee."""
    if result.schedule is None:
        why = f": {result.message}" if result.message else ""
        raise PlanningError(
            f"the solver {result.solver!r} found no schedule"
            f" ({result.status}, stopped by {result.stopped_by}{why})."
            " Give it more time or choose another solver."
        )
    violation = result.schedule.check(problem)
    if violation is not None:
        raise PlanningError(f"the solver {result.solver!r} broke a rule: {violation}")
    # `verify` must derive the bound again without the solver.
    bound = proven_bound(problem) if result.repeatable is None else result.repeatable
    optimal = bound.proves(result.schedule.makespan(problem))
    maker = Maker(
        solver=result.solver,
        version=result.version,
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        stopped_by=result.stopped_by,
        seconds=limits.noted(result.seconds),
        seed=limits.seed,
        message=result.message,
    )
    return Plan.of(problem, result.schedule, bound, maker, provenance=provenance)
