"""Plans for one replica: solve, check and bound."""

from __future__ import annotations

import time
from dataclasses import replace

from ..data.fleet import Fleet
from ..data.plan import Maker, Plan, Provenance
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..models.bounds.prove import proven_bound
from ..solvers.result import Limits, Result, Status, StoppedBy, despite_interrupt, ended
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

    Under a KV capacity the plan follows a policy that evicts requests, if one takes less than the schedule.

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
    begun = time.perf_counter()
    part = searched(Fleet.of(problem, 1), limits) if evicting else limits
    plan = _planned(problem, solver, part, start, params, provenance or Provenance())
    if not evicting:
        return plan
    return following_plan(plan, until=None if limits.seconds is None else begun + limits.seconds)


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
            f" ({result.status}, {ended(result.stopped_by)}{why})."
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
