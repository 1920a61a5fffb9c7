"""One function for every solver: from a problem to a result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from ..data.bound import Bound
from ..data.files.errors import check_type
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..models.bounds.makespan import best_bound, trivial_bound
from ..models.bounds.prove import bound_within
from .backends.backend import BACKENDS
from .exact.compiled_search import can_list_orders
from .exact.outcome import ExactOutcome
from .exact.small import FEWEST, can_solve_exactly, solve_small
from .mip import CP_SAT, Formulation, solve_full
from .result import Limits, Result, Status, StoppedBy, despite_interrupt
from .search.constructive import ski_rental_schedule
from .search.incumbent import Stop, TracePoint
from .search.params import SearchParams
from .search.schedule_search import ScheduleSearch

FORMULATIONS: tuple[Formulation, ...] = ("slot-free", "repaired", "literal")
DEFAULT_SOLVER = "search"
DEFAULT_SECONDS = 1.2
"""Seconds of a search without a limit."""
FEW_BOUND_SHARE = 0.4
"""Largest share of the time for the bound of few requests."""
MANY_SLOTS = 1_000
"""Slots up to which a search has all of them, also if there are fewer requests."""
NEAR_SEARCH_SHARE, NEAR_BOUND_SHARE = 0.1, 0.05
"""Shares of search and bound where an exact search is near."""


@dataclass(frozen=True, slots=True)
class Task:
    """Inputs of a solver besides the problem."""

    limits: Limits
    initial: Schedule | None
    """Schedule to improve on, for solvers that can."""
    params: SearchParams
    on_improvement: Callable[[TracePoint], None] | None
    """Function that a search calls with each better schedule."""


def solve(
    problem: Problem,
    solver: str = DEFAULT_SOLVER,
    *,
    limits: Limits | None = None,
    initial: Schedule | None = None,
    params: SearchParams | None = None,
    on_improvement: Callable[[TracePoint], None] | None = None,
) -> Result:
    """Solve a problem; return the best schedule and bound.

    Parameters
    ----------
    problem
        Problem; arrival times are ignored.
    solver
        A key of :data:`SOLVERS`.
    limits
        Stopping criteria; :data:`DEFAULT_SECONDS` by default.
    initial
        Schedule to improve on; ``lpt-ski`` and the literal model take none.
    params
        Parameters of ``search``, its bound, and ``exact``; other solvers ignore them.
    on_improvement
        Function that ``search`` calls for each better schedule with a
        :class:`~batchbound.solvers.search.incumbent.TracePoint`: seconds since the start, makespan, bound.

    Raises
    ------
    TypeError
        If an argument has another type.
    ValueError
        If the solver or a phase is unknown, or ``initial`` breaks a rule of the problem.
    """
    check_type("problem", problem, Problem)
    check_type("limits", limits, Limits, type(None), hint="Limits(seconds=...)")
    check_type("initial", initial, Schedule, type(None))
    chosen = SOLVERS.get(solver)
    if chosen is None:
        raise ValueError(f"there is no solver {solver!r}; choose from {', '.join(sorted(SOLVERS))}")
    problem = problem.without_arrivals()
    if initial is not None and (broken := initial.check(problem)) is not None:
        raise ValueError(f"the start is not a schedule of this problem: {broken}")
    limits = Limits(seconds=DEFAULT_SECONDS) if limits is None else limits
    params = SearchParams() if params is None else params
    posed = _with_slots_of_use(problem, initial)
    result = chosen(posed, Task(limits, initial, params, on_improvement))
    return replace(result, bound_of=problem.bound_of)


def _with_slots_of_use(problem: Problem, initial: Schedule | None) -> Problem:
    """Return the problem without slots beyond its requests, if there are very many.

    Each slot takes time and memory in every rule.
    """
    slots = max(len(problem), MANY_SLOTS)
    if problem.slots <= slots or (initial is not None and initial.slot_of.max() >= slots):
        return problem
    return replace(problem, slots=slots)


def _search(problem: Problem, task: Task) -> Result:
    """Run baselines, bound, phases and, for few requests, the exact search."""
    return _Search(problem, task).run()


class _Search:
    """One run of the default solver."""

    def __init__(self, problem: Problem, task: Task) -> None:
        limits, params = task.limits, task.params
        self._problem, self._task, self._begun = problem, task, time.perf_counter()
        self._seconds = limits.seconds
        if limits.seconds is None and limits.work is None:
            self._seconds = DEFAULT_SECONDS
        seconds = self._seconds
        self._few = len(problem) <= params.exact_requests and seconds is not None and limits.work is None
        self._few = self._few and can_solve_exactly(problem)
        near = self._few and (len(problem) <= FEWEST or can_list_orders(problem))
        shares = (NEAR_SEARCH_SHARE, NEAR_BOUND_SHARE) if near else (1 - params.exact_share, FEW_BOUND_SHARE)
        searched, self._bound_seconds = seconds, 0.0
        if self._few and seconds is not None:
            searched, self._bound_seconds = shares[0] * seconds, shares[1] * seconds
        stalled = math.inf if limits.stalled is None else limits.stalled
        stop = Stop(limits.gap or 0.0, stalled, task.on_improvement)
        self._search = ScheduleSearch(
            problem, seconds=searched, iterations=limits.work, seed=limits.seed, params=params, stop=stop
        )
        self._bound: Bound | None = None
        self._bounds: list[tuple[float, float]] = []

    def run(self) -> Result:
        best, exact, interrupted = self._search.incumbent, None, False
        try:
            self._search.begin(self._task.initial)
            self._prove()
            self._search.improve(0.0 if self._bound is None else self._bound.seconds)
            exact = self._exact()
            interrupted = exact is not None and exact.stopped_by is StoppedBy.INTERRUPT
        except KeyboardInterrupt:
            interrupted = True
            if not best.is_there:
                best.offer(ski_rental_schedule(self._problem))
        result, again = despite_interrupt(lambda: self._result(exact, interrupted))
        return replace(result, stopped_by=StoppedBy.INTERRUPT) if again else result

    def _prove(self) -> None:
        seconds_left = self._search.incumbent.left if self._seconds is not None else None
        self._bound, _ = bound_within(
            self._problem, seconds_left, self._bound_seconds, self._task.params.bounds
        )
        self._bounds.append((time.perf_counter() - self._begun, self._bound.seconds))

    def _exact(self) -> ExactOutcome | None:
        best, task = self._search.incumbent, self._task
        if not self._few or self._seconds is None or best.good_enough:
            return None
        outcome = solve_small(
            self._problem,
            Limits(seconds=self._seconds).left(self._begun),
            best.schedule,
            task.params.core.exact,
        )
        point = TracePoint(best.elapsed, outcome.schedule.makespan(self._problem), best.bound)
        if point.makespan < best.makespan and task.on_improvement is not None:
            task.on_improvement(point)
        return outcome

    def _result(self, exact: ExactOutcome | None, interrupted: bool) -> Result:
        best, limits = self._search.incumbent, self._task.limits
        ours = trivial_bound(self._problem) if self._bound is None else self._bound
        best_found, bound = (best.schedule, best.makespan), ours
        if exact is not None:
            best_found, bound = _made(self._problem, exact.schedule), _bound_after(self._problem, exact, ours)
        stopped_by = StoppedBy.TIME
        if interrupted:
            stopped_by = StoppedBy.INTERRUPT
        elif exact is None and best.good_enough:
            stopped_by = StoppedBy.GAP
        elif exact is None and best.stalled:
            stopped_by = StoppedBy.STALLED
        elif limits.work is not None and (self._seconds is None or best.steps >= limits.work):
            stopped_by = StoppedBy.WORK
        result = _result(best_found, bound, "search", self._begun, stopped_by, ours)
        improvements = [(point.seconds, point.makespan) for point in best.trace]
        if result.makespan is not None and result.makespan < best.makespan:
            improvements.append((result.seconds, result.makespan))
        if bound is not ours:
            self._bounds.append((result.seconds, bound.seconds))
        return replace(result, improvements=tuple(improvements), bounds=tuple(self._bounds))


def _lpt_ski(problem: Problem, task: Task) -> Result:
    begun = time.perf_counter()
    schedule = ski_rental_schedule(problem)
    bound = best_bound(problem)
    return _result(_made(problem, schedule), bound, "lpt-ski", begun, StoppedBy.FINISHED, bound)


def _exact(problem: Problem, task: Task) -> Result:
    begun, limits, initial = time.perf_counter(), task.limits, task.initial
    # Handed back after an interrupt before the exact search, which then hands back its own best.
    first = ski_rental_schedule(problem) if initial is None else initial
    outcome, ours = ExactOutcome(first, StoppedBy.INTERRUPT, 0, "states"), trivial_bound(problem)
    with suppress(KeyboardInterrupt):
        ours, seconds_left = bound_within(problem, limits.seconds)
        outcome = solve_small(problem, replace(limits, seconds=seconds_left), initial, task.params.core.exact)
    bound = _bound_after(problem, outcome, ours)
    return _result(_made(problem, outcome.schedule), bound, "exact", begun, outcome.stopped_by, ours)


def _bound_after(problem: Problem, found: ExactOutcome, ours: Bound) -> Bound:
    """Return the proven optimum with its certificate, or our own bound."""
    proven = found.bound(problem)
    if proven is None or ours.seconds >= proven.seconds:
        return ours
    if proven.certificate["kind"] == "solver":
        return replace(proven, certificate={**proven.certificate, "version": _version()})
    return proven


def _made(problem: Problem, schedule: Schedule) -> tuple[Schedule, float]:
    """Return a schedule without idle decode steps, and its makespan."""
    schedule = schedule.without_idle_steps(problem)
    return schedule, schedule.makespan(problem)


def _result(
    made: tuple[Schedule, float],
    bound: Bound,
    solver: str,
    begun: float,
    stopped_by: StoppedBy,
    ours: Bound,
) -> Result:
    schedule, makespan = made
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
    """Return the fields of :class:`~.result.Limits` that a solver obeys."""
    if solver == "lpt-ski":
        return frozenset()
    # A formulation is named with its backend.
    backend = solver.rpartition(":")[2]
    threads = backend == CP_SAT or (backend in BACKENDS and BACKENDS[backend].threads)
    stops = ["gap", "stalled"] if solver == DEFAULT_SOLVER else []
    return frozenset({"seconds", "work", "seed", *(["threads"] if threads else []), *stops})


def _formulation(formulation: Formulation, backend: str) -> Solver:
    def run(problem: Problem, task: Task) -> Result:
        return solve_full(problem, formulation, backend=backend, limits=task.limits, start=task.initial)

    return run


Solver = Callable[[Problem, Task], Result]

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
"""All solvers by name; a formulation's name includes its backend."""
