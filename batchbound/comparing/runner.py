"""Comparisons of solvers on the same instances under equal limits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..data.bound import Bound
from ..data.files.disk import atomic_write
from ..data.files.errors import check_type
from ..data.fleet import Fleet
from ..data.plan import Plan
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..heuristics.loop import schedule_of
from ..heuristics.registry import POLICIES, policy_named
from ..heuristics.simulate import simulate
from ..models.bounds.prove import evicting_bound
from ..models.formulations.full_model import UnsupportedProblemError
from ..models.formulations.linear_model import TOLERANCE, LinearModel
from ..planning.fleet import make_fleet_plan
from ..solvers.backends.backend import BACKENDS
from ..solvers.backends.linear import BackendError, LinearResult, solve_linear
from ..solvers.result import Limits, Result, Status, StoppedBy
from ..solvers.solve import DEFAULT_SECONDS, DEFAULT_SOLVER, SOLVERS, limits_heeded, solve
from ..version import __version__
from .result import (
    BEST_KNOWN,
    NO_EVICTIONS,
    NOT_APPLICABLE,
    NOT_INSTALLED,
    NOT_STARTED,
    Comparison,
    Measurement,
    with_gaps,
)

POLICY = "policy:"
"""Prefix of a policy's name, as in ``policy:fcfs``; policies are simulated."""

Instance = Problem | Fleet | LinearModel | Plan
OwnSolver = Callable[[Problem, Limits], Result | Schedule]
"""A user's own solver; it may prove a bound of its own."""


@dataclass(frozen=True, slots=True)
class OwnLinearSolver:
    """A user's own solver of linear models.

    solve: Function of a model and limits; the values of its result are checked against the model.
    """

    solve: Callable[[LinearModel, Limits], LinearResult]


Solver = str | OwnSolver | OwnLinearSolver


def compare(
    instances: Mapping[str, Instance],
    solvers: str | Sequence[str] | Mapping[str, Solver],
    limits: Limits | None = None,
    *,
    on_begin: Callable[[str, str], None] | None = None,
    on_done: Callable[[Measurement], None] | None = None,
) -> Comparison:
    """Run every solver on every instance, one after the other.

    Parameters
    ----------
    instances
        Problems, fleets, or linear models (:func:`~batchbound.models.formulations.linear_files.read_mps`), by
        name. Arrivals are ignored; only the search takes fleets. A plan, as in
        :func:`~batchbound.comparing.instance_library.suite`, gives its problem; its makespan and bound become
        the first row.
    solvers
        One name, several names, or a mapping of labels to names, :data:`OwnSolver` or
        :class:`OwnLinearSolver`. Names are keys of :data:`~batchbound.solvers.solve.SOLVERS`; ``policy:`` and
        a key of :data:`~batchbound.heuristics.registry.POLICIES`; or, for linear models, keys of
        :data:`~batchbound.solvers.backends.backend.BACKENDS`.
    limits
        Limits of each run; a few seconds by default.
    on_begin
        Function called with the names of an instance and a solver before it runs.
    on_done
        Function called with each measurement, before the gaps of the instance are known.

    Returns
    -------
    Comparison
        All measurements, or those finished before Ctrl-C.

    Raises
    ------
    ValueError
        If a name is unknown, an own solver's schedule or values break a rule, or its bound is above a valid
        solution.
    TypeError
        If an argument has another type, or an own solver has no label or returns a wrong type.
    """
    hint = "problems by name, {'mine': problem}, or the path of a file of requests"
    check_type("instances", instances, Mapping, hint=hint)
    for name, instance in instances.items():
        check_type(f"instance {name!r}", instance, Problem, Fleet, LinearModel, Plan)
    check_type("limits", limits, Limits, type(None), hint="Limits(seconds=...)")
    limits = Limits(seconds=DEFAULT_SECONDS) if limits is None else limits
    chosen = _labelled(solvers)
    rows: list[Measurement] = []
    for name, given in instances.items():
        instance = _posed(given)
        found = [_known(name, given)] if isinstance(given, Plan) else []
        for label, solver in chosen.items():
            if on_begin is not None:
                on_begin(name, label)
            found.append(_measured(name, instance, label, solver, limits))
            if on_done is not None:
                on_done(found[-1])
            if found[-1].stopped_by == StoppedBy.INTERRUPT:
                return Comparison((*rows, *with_gaps(found)))
        _refuse_false_bound(found)
        rows += with_gaps(found)
    return Comparison(tuple(rows))


def _refuse_false_bound(rows: Sequence[Measurement]) -> None:
    values = [(row.value, row.solver) for row in rows if row.value is not None and not row.evictions]
    if not values:
        return
    value, solver = min(values, key=lambda found: found[0])
    for row in rows:
        if row.bound is not None and row.bound - value > TOLERANCE * max(1.0, abs(value)):
            what = f"the bound of {row.solver!r} for {row.instance!r}, {row.bound:.6g}"
            raise ValueError(f"{what}, is above what {solver!r} found, {value:.6g}")


def known_solvers() -> list[str]:
    """Return the solver names that :func:`compare` takes."""
    return [*SOLVERS, *(POLICY + name for name in POLICIES), *BACKENDS]


def limits_heeded_by(solver: str) -> frozenset[str]:
    """Return the fields of :class:`Limits` that a solver obeys."""
    return frozenset() if solver.startswith(POLICY) else limits_heeded(solver)


def _labelled(solvers: str | Sequence[str] | Mapping[str, Solver]) -> Mapping[str, Solver]:
    labelled: dict[str, Solver] = {}
    if isinstance(solvers, Mapping):
        labelled.update(solvers)
    else:
        for name in [solvers] if isinstance(solvers, str) or callable(solvers) else solvers:
            if not isinstance(name, str):
                raise TypeError(f"the solver {name!r} has no label; give it one: {{'mine': ...}}")
            labelled[name] = name
    for solver in labelled.values():
        if isinstance(solver, str) and solver not in known_solvers():
            raise ValueError(f"there is no solver {solver!r}; choose from {', '.join(known_solvers())}")
    return labelled


def _posed(given: Instance) -> Problem | Fleet | LinearModel:
    """Return the problem to solve, without arrivals."""
    if isinstance(given, Plan):
        return given.problem.without_arrivals() if len(given.fleet.replicas) == 1 else given.fleet
    return given.without_arrivals() if isinstance(given, Problem) else given


def _known(name: str, plan: Plan) -> Measurement:
    bound, maker, fleet = plan.bound, plan.maker, plan.fleet
    runs_out = any(fleet.problem(k).memory_can_run_out for k in range(len(fleet.replicas)))
    return Measurement(
        name,
        BEST_KNOWN,
        plan.makespan,
        None if bound is None else bound.proven,
        None,
        maker.seconds,
        maker.status,
        maker.stopped_by,
        f"{maker.solver} {maker.version}",
        f"seed {maker.seed}",
        "" if bound is None else _source(bound, evictions_help=runs_out),
        _point(maker.seconds, plan.makespan),
    )


def _source(bound: Bound, *, evictions_help: bool) -> str:
    """Return the argument of a bound, with its restriction where evictions could beat it."""
    return f"{bound.source}, {NO_EVICTIONS}" if evictions_help else bound.source


def _measured(
    name: str, instance: Problem | Fleet | LinearModel, label: str, solver: Solver, limits: Limits
) -> Measurement:
    begun = time.perf_counter()
    try:
        if isinstance(instance, LinearModel):
            return _linear(name, instance, label, solver, limits)
        if isinstance(solver, OwnLinearSolver):
            raise BackendError(f"{label} takes linear models")
        if isinstance(instance, Fleet):
            return _fleet(name, instance, label, solver, limits)
        if not isinstance(solver, str):
            return _of_result(name, label, instance, _own(label, solver, instance, limits))
        if solver.startswith(POLICY):
            return _policy(name, instance, label, solver.removeprefix(POLICY))
        if solver in SOLVERS:
            return _of_result(name, label, instance, solve(instance, solver, limits=limits))
        raise BackendError(f"{solver} takes linear models")
    except (BackendError, UnsupportedProblemError, ImportError) as error:
        took = time.perf_counter() - begun
        status = NOT_INSTALLED if isinstance(error, ImportError) else NOT_APPLICABLE
        return Measurement(name, label, None, None, None, took, status, "", "", str(error))


def _linear(name: str, model: LinearModel, label: str, solver: Solver, limits: Limits) -> Measurement:
    if isinstance(solver, OwnLinearSolver):
        found = solver.solve(model, limits)
    elif isinstance(solver, str) and solver in BACKENDS:
        found = solve_linear(model, solver, limits)
    else:
        raise BackendError("it takes scheduling problems, not linear models")
    value = None
    if found.values is not None:
        values = model.rounded(found.values)
        if (violation := model.violation(values)) is not None:
            raise ValueError(f"the values of {label!r} for {name!r} break a rule: {violation}")
        value = model.objective_value(values)
    return Measurement(
        name,
        label,
        value,
        found.bound,
        None,
        found.seconds,
        str(found.status),
        str(found.stopped_by),
        found.version,
        found.message,
        "" if found.bound is None else found.backend,
        _point(found.seconds, value),
    )


def _policy(name: str, problem: Problem, label: str, policy: str) -> Measurement:
    begun = time.perf_counter()
    trace = simulate(problem, policy_named(policy, problem))
    seconds = time.perf_counter() - begun
    if not trace.evictions and (violation := schedule_of(trace).check(problem)) is not None:
        raise ValueError(f"the policy {policy!r} breaks a rule on {name!r}: {violation}")
    status, stopped = str(Status.FEASIBLE), str(StoppedBy.FINISHED)
    steps = _point(seconds, trace.makespan)
    # A run with evictions is compared with a bound that allows them.
    bound = evicting_bound(problem) if trace.evictions else None
    return Measurement(
        name,
        label,
        trace.makespan,
        None if bound is None else bound.seconds,
        None,
        seconds,
        status,
        stopped,
        __version__,
        bound_source="" if bound is None else bound.source,
        improvements=steps,
        evictions=trace.evictions,
    )


def _own(label: str, solver: OwnSolver, problem: Problem, limits: Limits) -> Result:
    begun = time.perf_counter()
    found = solver(problem, limits)
    seconds = time.perf_counter() - begun
    if isinstance(found, Result):
        return found
    if not isinstance(found, Schedule):
        raise TypeError(f"{label!r} returned {type(found).__name__}, neither a Schedule nor a Result")
    makespan = found.makespan(problem) if found.check(problem) is None else None
    return Result(Status.FEASIBLE, StoppedBy.FINISHED, found, makespan, None, seconds, label, "")


def _fleet(name: str, fleet: Fleet, label: str, solver: Solver, limits: Limits) -> Measurement:
    if solver != DEFAULT_SOLVER:
        raise BackendError(f"{label} takes the problem of one machine, not a fleet")
    begun = time.perf_counter()
    plan = make_fleet_plan(fleet, limits=limits)
    took, version = time.perf_counter() - begun, plan.maker.version
    found = replace(_known(name, plan), solver=label, version=version, message="", seconds=took)
    return replace(found, improvements=_point(took, plan.makespan))


def _of_result(name: str, label: str, problem: Problem, result: Result) -> Measurement:
    value = None
    if not result.started:
        # The rule's schedule and our own bound are not the solver's.
        result = replace(result, schedule=None, bound=None, improvements=())
    if result.schedule is not None:
        violation = result.schedule.check(problem)
        if violation is not None:
            raise ValueError(f"the schedule of {label!r} for {name!r} breaks a rule: {violation}")
        value = result.schedule.makespan(problem)
    bound = result.bound if result.bound is not None and result.bound.valid else None
    return Measurement(
        name,
        label,
        value,
        None if bound is None else bound.seconds,
        None,
        result.seconds,
        str(result.status) if result.started else NOT_STARTED,
        str(result.stopped_by),
        result.version,
        result.message,
        "" if bound is None else _source(bound, evictions_help=problem.memory_can_run_out),
        result.improvements or _point(result.seconds, value),
    )


def _point(seconds: float | None, value: float | None) -> tuple[tuple[float, float], ...]:
    return () if value is None or seconds is None else ((seconds, value),)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a table to a file atomically."""
    with atomic_write(Path(path)) as stream:
        stream.write(text)
