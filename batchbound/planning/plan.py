"""From a problem to a plan: solve, check, bound."""

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
    """No plan came out: the solver found no schedule, or what it found breaks a rule."""


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
    """
    Return a plan for a problem: a checked schedule, its predicted makespan, and the best bound proven.

    Under a KV capacity it follows a policy that evicts requests, if one takes less than the schedule.

    problem: Requests, costs and limits; arrivals are ignored, as a batch job has everything at the start.
    solver: A name that :func:`~batchbound.solvers.solve.solve` knows.
    limits: When to stop; after :data:`DEFAULT_SECONDS` by default.
    start: A schedule to improve on, for solvers that can.
    params: Parameters of the default solver.
    provenance: Where the numbers come from, which the plan records.
    evicting: Whether the plan may follow a policy that evicts requests.
    Raises PlanningError if the solver found no schedule, or one that the referee rejects.
    """
    problem = problem.without_arrivals()
    limits = Limits(seconds=DEFAULT_SECONDS) if limits is None else limits
    result = solve(problem, solver, limits=limits, initial=start, params=params)
    if result.schedule is None:
        said = f": {result.message}" if result.message else ""
        raise PlanningError(
            f"the solver {result.solver!r} found no schedule"
            f" ({result.status}, stopped by {result.stopped_by}{said})."
            " Give it more time or choose another solver."
        )
    violation = result.schedule.check(problem)
    if violation is not None:
        raise PlanningError(f"the solver {result.solver!r} broke a rule: {violation}")
    # A plan's bound is one that `verify` can derive again without the solver.
    bound = proven_bound(problem) if result.repeatable is None else result.repeatable
    optimal = bound.proves(result.schedule.makespan(problem))
    maker = Maker(
        solver=result.solver,
        version=result.version,
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        stopped_by=result.stopped_by,
        seconds=result.seconds,
        seed=limits.seed,
        message=result.message,
    )
    plan = Plan.of(problem, result.schedule, bound, maker, provenance=provenance or Provenance())
    return following_plan(plan) if evicting else plan
