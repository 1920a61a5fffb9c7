"""One call for every solver: a problem in, a result out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from ..data.bound import Bound
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..models.bounds.makespan import best_bound, trivial_bound
from ..models.bounds.prove import LEAST_LEFT, bound_within
from .backends.backend import BACKENDS
from .exact.enumeration import FEWEST, best_by_enumeration, can_enumerate
from .exact.from_the_end import can_search_from_the_end
from .exact.outcome import ExactOutcome
from .formulated import CP_SAT, Formulation, solve_full
from .result import Limits, Result, Status, StoppedBy
from .search.constructive import ski_rental_schedule
from .search.schedule_search import ScheduleSearch

FORMULATIONS: tuple[Formulation, ...] = ("slot-free", "repaired", "literal")
DEFAULT_SOLVER = "search"
DEFAULT_SECONDS = 1.2
"""Seconds of a search that is given no limit: with bound and start-up, a plan in two."""
FEW = 24
"""Requests up to which a search that is limited by time alone ends with an enumeration."""
FEW_BOUND_SHARE = 0.4
"""The share of its time that the bound of few requests gets at most, which mostly ends by itself before."""
PROOF_SHARE = 0.8
"""The share of its time that bound and enumeration get."""
NEAR_SEARCH_SHARE, NEAR_BOUND_SHARE = 0.1, 0.05
"""The shares of search and of bound where an exact search is near, or, as memory is scarce, nothing else."""


def solve(
    problem: Problem,
    solver: str = DEFAULT_SOLVER,
    *,
    limits: Limits | None = None,
    start: Schedule | None = None,
) -> Result:
    """
    Return the best schedule a solver finds, with the bound that is proven.

    Parameters
    ----------
    problem
        The problem. Everything is taken to be there at the start.
    solver
        A key of :data:`SOLVERS`.
    limits
        When to stop; after :data:`DEFAULT_SECONDS` by default.
    start
        A schedule to improve on, for solvers that can; ``lpt-ski`` and the literal model cannot.

    Raises
    ------
    ValueError
        If there is no such solver, or ``start`` breaks a rule of the problem.
    """
    chosen = SOLVERS.get(solver)
    if chosen is None:
        raise ValueError(f"there is no solver {solver!r}; choose from {', '.join(sorted(SOLVERS))}")
    problem = problem.without_arrivals()
    if start is not None and (broken := start.check(problem)) is not None:
        raise ValueError(f"the start is not a schedule of this problem: {broken}")
    return chosen(problem, Limits(seconds=DEFAULT_SECONDS) if limits is None else limits, start)


def _search(problem: Problem, limits: Limits, start: Schedule | None) -> Result:
    begun = time.perf_counter()
    seconds = limits.seconds if limits.seconds is not None or limits.work is not None else DEFAULT_SECONDS
    few = len(problem) <= FEW and seconds is not None and limits.work is None and can_enumerate(problem)
    near = few and (len(problem) <= FEWEST or can_search_from_the_end(problem, seconds))
    shares = (NEAR_SEARCH_SHARE, NEAR_BOUND_SHARE) if near else (1 - PROOF_SHARE, FEW_BOUND_SHARE)
    searched = seconds if seconds is None or not few else seconds * shares[0]
    search = ScheduleSearch(problem, seconds=searched, iterations=limits.work, seed=limits.seed)
    ours, enumerated, interrupted = None, None, False
    try:
        # First whatever could be run instead: a bound or a search may take all the time there is.
        search.begin(start)
        left = search.incumbent.left if seconds else None
        least = shares[1] * seconds if few and seconds else 0.0
        ours, _ = bound_within(problem, left, least)
        search.improve(ours.seconds)
        found = search.outcome()
        if few and seconds is not None and not ours.proves(found.makespan):
            left = max(LEAST_LEFT, seconds - (time.perf_counter() - begun))
            enumerated = best_by_enumeration(problem, Limits(seconds=left), found.schedule)
            interrupted = enumerated.stopped_by is StoppedBy.INTERRUPT
    except KeyboardInterrupt:
        # Users of a solver expect the best schedule so far; without any there is nothing to hand back.
        if search.incumbent.schedule is None:
            raise
        interrupted, found = True, search.outcome()
    ours = trivial_bound(problem) if ours is None else ours
    schedule, bound = found.schedule, ours
    if enumerated is not None:
        schedule, bound = enumerated.schedule, _bound_after(problem, enumerated, ours)
    stopped_by = StoppedBy.TIME
    if interrupted:
        stopped_by = StoppedBy.INTERRUPT
    elif limits.work is not None and (seconds is None or found.iterations >= limits.work):
        stopped_by = StoppedBy.WORK
    result = _result(problem, schedule, bound, "search", begun, stopped_by, ours)
    improvements = list(found.improvements)
    if result.makespan is not None and result.makespan < found.makespan:
        improvements.append((result.seconds, result.makespan))
    return replace(result, improvements=tuple(improvements))


def _lpt_ski(problem: Problem, limits: Limits, start: Schedule | None) -> Result:
    begun = time.perf_counter()
    schedule = ski_rental_schedule(problem)
    bound = best_bound(problem)
    return _result(problem, schedule, bound, "lpt-ski", begun, StoppedBy.GAVE_UP, bound)


def _exact(problem: Problem, limits: Limits, start: Schedule | None) -> Result:
    begun = time.perf_counter()
    # What is handed back after an interrupt before the enumeration, which then hands back its own best.
    first = ski_rental_schedule(problem) if start is None else start
    found, ours = ExactOutcome(first, StoppedBy.INTERRUPT, 0, "packings"), trivial_bound(problem)
    with suppress(KeyboardInterrupt):
        ours, left = bound_within(problem, limits.seconds)
        found = best_by_enumeration(problem, replace(limits, seconds=left), start)
    bound = _bound_after(problem, found, ours)
    return _result(problem, found.schedule, bound, "exact", begun, found.stopped_by, ours)


def _bound_after(problem: Problem, found: ExactOutcome, ours: Bound) -> Bound:
    """Return the optimum that an enumeration has proven, with what repeats it, or our own bound."""
    proven = found.bound(problem)
    if proven is None or ours.seconds >= proven.seconds:
        return ours
    if proven.certificate["kind"] == "solver":
        return replace(proven, certificate={**proven.certificate, "version": _version()})
    return proven


def _result(
    problem: Problem,
    schedule: Schedule,
    bound: Bound,
    solver: str,
    begun: float,
    stopped_by: StoppedBy,
    ours: Bound,
) -> Result:
    schedule = schedule.without_idle_rounds(problem)
    makespan = schedule.makespan(problem)
    optimal = bound.proves(makespan)
    return Result(
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        stopped_by=StoppedBy.PROOF if optimal else stopped_by,
        schedule=schedule,
        makespan=makespan,
        bound=bound,
        seconds=time.perf_counter() - begun,
        solver=solver,
        version=_version(),
        repeatable=ours if bound.certificate.get("kind") == "solver" else bound,
    )


def _version() -> str:
    try:
        return version("batchbound")
    except PackageNotFoundError:
        return "from source"


def limits_heeded(solver: str) -> frozenset[str]:
    """Return the fields of :class:`~.result.Limits` that have an effect on a solver or backend of a name."""
    if solver == "lpt-ski":
        return frozenset()
    # A formulation is named with its backend.
    backend = solver.rpartition(":")[2]
    threads = backend == CP_SAT or (backend in BACKENDS and BACKENDS[backend].threads)
    return frozenset({"seconds", "work", "seed", *(["threads"] if threads else [])})


def _formulation(formulation: Formulation, backend: str) -> Solver:
    def run(problem: Problem, limits: Limits, start: Schedule | None) -> Result:
        return solve_full(problem, formulation, backend=backend, limits=limits, start=start)

    return run


Solver = Callable[[Problem, Limits, Schedule | None], Result]

SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {
        "search": _search,
        "lpt-ski": _lpt_ski,
        "exact": _exact,
        f"slot-free:{CP_SAT}": _formulation("slot-free", CP_SAT),
        **{
            f"{formulation}:{backend}": _formulation(formulation, backend)
            for formulation in FORMULATIONS
            for backend, entry in BACKENDS.items()
            if not entry.whole_numbers_only
        },
    }
)
"""Every solver by name; a formulation of the full problem is named with the backend that solves it."""
