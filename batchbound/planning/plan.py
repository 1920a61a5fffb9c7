"""Plans for one replica: solve, check and bound."""

from __future__ import annotations

from ..data.plan import Maker, Plan, Provenance
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..models.bounds.prove import proven_bound
from ..solvers.result import Limits, Status
from ..solvers.search.params import SearchParams
from ..solvers.solve import DEFAULT_SECONDS, DEFAULT_SOLVER, solve
from .evicting import following_plan


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
    result = solve(problem, solver, limits=limits, initial=start, params=params)
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
    plan = Plan.of(problem, result.schedule, bound, maker, provenance=provenance or Provenance())
    return following_plan(plan) if evicting else plan
