"""Solvers side by side: every solver on every instance under the same limits, as a table and as curves."""

from __future__ import annotations

import csv
import io
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from . import __version__
from .data.files import atomic_write
from .data.problem import Problem
from .executor.loop import schedule_of
from .executor.simulate import simulate
from .heuristics.registry import POLICIES, policy_named
from .models.bounds import best_bound
from .models.full_model import UnsupportedProblemError
from .models.linear_model import LinearModel
from .solvers.backend import BACKENDS
from .solvers.linear import BackendError, solve_linear
from .solvers.result import Limits, Result, Status, StoppedBy
from .solvers.schedule_search import search_schedule
from .solvers.solve import DEFAULT_SECONDS, OPTIMAL_WITHIN, SOLVERS, solve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICY = "policy:"
"""Before the name of a policy, which is simulated: ``policy:fcfs``."""

NOT_APPLICABLE = "not applicable"
"""Status of a solver that cannot be asked for an instance."""

Instance = Problem | LinearModel
OwnSolver = Callable[[Problem, Limits], Result]
"""A user's own solver: a problem and limits in, a result out."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """
    What one solver did on one instance.

    Parameters
    ----------
    instance, solver
        Their names.
    value
        Seconds of the makespan, or the objective of a linear model; None without a solution.
    bound
        The bound it proved itself, or None.
    gap
        How far the value is above the best bound that any solver of the comparison proved for the instance,
        as a fraction of it; None without both.
    seconds
        Wall-clock seconds it took.
    status, stopped_by
        What is in hand and why it stopped; see :class:`~batchbound.solvers.result.Status`.
    version
        Of the solver.
    message
        What else a person should know.
    improvements
        Seconds since the start and the value found then, in order.
    """

    instance: str
    solver: str
    value: float | None
    bound: float | None
    gap: float | None
    seconds: float
    status: str
    stopped_by: str
    version: str
    message: str = ""
    improvements: tuple[tuple[float, float], ...] = ()


_COLUMNS = tuple(field.name for field in fields(Measurement) if field.name != "improvements")


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    All measurements, instance by instance.

    Parameters
    ----------
    rows
        One per solver and instance.
    """

    rows: tuple[Measurement, ...]

    def to_csv(self) -> str:
        """Return the table as CSV, a header line first."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for row in self.rows:
            cells = [getattr(row, name) for name in _COLUMNS]
            writer.writerow(["" if cell is None else cell for cell in cells])
        return text.getvalue()

    def to_markdown(self) -> str:
        """Return the table in Markdown, rounded for people."""
        lines = [
            "| instance | solver | value | bound | gap | seconds | status | version |",
            "|---|---|---:|---:|---:|---:|---|---|",
        ]
        for row in self.rows:
            value, bound = ("" if number is None else f"{number:.3f}" for number in (row.value, row.bound))
            gap = "" if row.gap is None else f"{row.gap:.2%}"
            cells = (
                row.instance,
                row.solver,
                value,
                bound,
                gap,
                f"{row.seconds:.2f}",
                row.status,
                row.version,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines) + "\n"

    def to_json(self) -> list[dict[str, object]]:
        """Return the measurements as plain JSON values."""
        return [
            {name: getattr(row, name) for name in _COLUMNS}
            | {"improvements": [list(step) for step in row.improvements]}
            for row in self.rows
        ]

    def ratios(self, by: Literal["value", "seconds"] = "value") -> dict[str, list[float]]:
        """
        Return each solver's performance ratio on each instance: its measure over the least of all solvers.

        Dolan and More (2002), section 2. Infinite where the solver has no solution, or, by seconds, has
        not proved it best.

        Parameters
        ----------
        by
            What is compared.
        """
        found: dict[str, list[float]] = {row.solver: [] for row in self.rows}
        for instance in dict.fromkeys(row.instance for row in self.rows):
            measures = {row.solver: _measure(row, by) for row in self.rows if row.instance == instance}
            least = min(measures.values())
            for solver, measure in measures.items():
                found[solver].append(measure / least if 0 < least < math.inf else math.inf)
        return found

    def plot_profile(self, path: str | os.PathLike[str], by: Literal["value", "seconds"] = "value") -> None:
        """
        Write the performance profile: the share of instances within a factor of the best, by factor.

        Parameters
        ----------
        path
            A PNG, SVG or PDF file.
        by
            What is compared.
        """
        ratios = self.ratios(by)
        finite = [ratio for of_solver in ratios.values() for ratio in of_solver if ratio < math.inf]
        end = max([*finite, 1.0]) * 1.02 + 0.005
        figure = _figure()
        axes = figure.subplots()
        for solver, of_solver in ratios.items():
            steps = np.sort([ratio for ratio in of_solver if ratio < math.inf])
            share = np.arange(len(steps) + 1) / max(1, len(of_solver))
            axes.step([1.0, *steps, end], [0.0, *share[1:], share[-1]], where="post", label=solver)
        axes.set(xlabel=f"factor of the least {'makespan' if by == 'value' else 'seconds'}", ylim=(0, 1.02))
        axes.set_ylabel("share of instances")
        axes.legend(loc="lower right", fontsize="small")
        figure.savefig(path)

    def plot_over_time(self, path: str | os.PathLike[str]) -> None:
        """
        Write the gap to the best bound over time, one curve per solver and instance.

        Parameters
        ----------
        path
            A PNG, SVG or PDF file.
        """
        figure = _figure()
        axes = figure.subplots()
        solvers = list(dict.fromkeys(row.solver for row in self.rows))
        labelled: set[str] = set()
        for row in self.rows:
            if row.gap is None or row.value is None or not row.improvements:
                continue
            bound = row.value / (1 + row.gap)
            times, values = zip(*row.improvements, strict=True)
            gaps = [100 * max(0.0, value / bound - 1) for value in (*values, values[-1])]
            label = "_" + row.solver if row.solver in labelled else row.solver
            labelled.add(row.solver)
            colour = f"C{solvers.index(row.solver) % 10}"
            axes.step([*times, max(row.seconds, times[-1])], gaps, where="post", color=colour, label=label)
            axes.plot([times[-1]], [gaps[-1]], "o", color=colour, markersize=3)
        axes.set(xlabel="seconds", ylabel="gap to the best bound (%)")
        if labelled:
            axes.legend(fontsize="small")
        figure.savefig(path)


def compare(
    instances: Mapping[str, Instance],
    solvers: Sequence[str] | Mapping[str, str | OwnSolver],
    limits: Limits | None = None,
    *,
    on_done: Callable[[Measurement], None] | None = None,
) -> Comparison:
    """
    Return what every solver does on every instance, one after the other.

    Parameters
    ----------
    instances
        Problems, or linear models (:func:`~batchbound.models.linear_files.read_mps`), by name.
    solvers
        Names, or a mapping of a label to a name or to an :data:`OwnSolver`. A name is a key of
        :data:`~batchbound.solvers.solve.SOLVERS`, ``policy:`` and a key of
        :data:`~batchbound.heuristics.registry.POLICIES`, or, for linear models, a key of
        :data:`~batchbound.solvers.backend.BACKENDS`.
    limits
        The same for all; a few seconds by default.
    on_done
        Called with each measurement, before the gaps of the instance are known.

    Raises
    ------
    ValueError
        If there is no solver of a name, or an own solver's schedule breaks a rule of the problem.
    """
    limits = Limits(seconds=DEFAULT_SECONDS) if limits is None else limits
    chosen: Mapping[str, str | OwnSolver]
    chosen = solvers if isinstance(solvers, Mapping) else {name: name for name in solvers}
    for solver in chosen.values():
        if isinstance(solver, str) and solver not in known_solvers():
            raise ValueError(f"there is no solver {solver!r}; choose from {', '.join(known_solvers())}")
    rows: list[Measurement] = []
    for name, instance in instances.items():
        found = []
        for label, solver in chosen.items():
            found.append(_measured(name, instance, label, solver, limits))
            if on_done is not None:
                on_done(found[-1])
        rows += _with_gaps(found)
    return Comparison(tuple(rows))


def known_solvers() -> list[str]:
    """Return the names that :func:`compare` knows."""
    return [*SOLVERS, *(POLICY + name for name in POLICIES), *BACKENDS]


def _measured(
    name: str, instance: Instance, label: str, solver: str | OwnSolver, limits: Limits
) -> Measurement:
    begun = time.perf_counter()
    try:
        if isinstance(instance, LinearModel):
            return _linear(name, instance, label, solver, limits)
        if not isinstance(solver, str):
            return _of_result(name, label, instance, solver(instance, limits))
        if solver.startswith(POLICY):
            return _policy(name, instance, label, solver.removeprefix(POLICY))
        if solver == "search":
            return _search(name, instance, label, limits)
        if solver in SOLVERS:
            return _of_result(name, label, instance, solve(instance, solver, limits=limits))
        raise BackendError(f"{solver} takes linear models")
    except (BackendError, UnsupportedProblemError, ImportError) as error:
        return _refused(name, label, time.perf_counter() - begun, str(error))


def _linear(
    name: str, model: LinearModel, label: str, solver: str | OwnSolver, limits: Limits
) -> Measurement:
    if not isinstance(solver, str) or solver not in BACKENDS:
        raise BackendError("it takes scheduling problems, not linear models")
    found = solve_linear(model, solver, limits)
    return Measurement(
        name,
        label,
        found.objective,
        found.bound,
        None,
        found.seconds,
        str(found.status),
        str(found.stopped_by),
        found.version,
        found.message,
        _point(found.seconds, found.objective),
    )


def _policy(name: str, problem: Problem, label: str, policy: str) -> Measurement:
    begun = time.perf_counter()
    trace = simulate(problem, policy_named(policy, problem))
    seconds = time.perf_counter() - begun
    message = f"{trace.evictions} evictions" if trace.evictions else ""
    if not trace.evictions and (violation := schedule_of(trace).check(problem)) is not None:
        raise ValueError(f"the policy {policy!r} breaks a rule on {name!r}: {violation}")
    status, stopped = str(Status.FEASIBLE), str(StoppedBy.GAVE_UP)
    steps = _point(seconds, trace.makespan)
    return Measurement(
        name, label, trace.makespan, None, None, seconds, status, stopped, __version__, message, steps
    )


def _search(name: str, problem: Problem, label: str, limits: Limits) -> Measurement:
    """Measure the schedule search by itself, as it alone tells when it found what."""
    begun = time.perf_counter()
    unlimited = limits.seconds is None and limits.work is None
    seconds = DEFAULT_SECONDS if unlimited else limits.seconds
    outcome = search_schedule(problem, seconds=seconds, iterations=limits.work, seed=limits.seed)
    schedule, bound = outcome.schedule.trimmed(problem), best_bound(problem)
    makespan = schedule.makespan(problem)
    optimal = bound.seconds > 0 and bound.gap(makespan) <= OPTIMAL_WITHIN
    stopped_by = StoppedBy.WORK if outcome.iterations == limits.work else StoppedBy.TIME
    result = Result(
        Status.OPTIMAL if optimal else Status.FEASIBLE,
        StoppedBy.PROOF if optimal else stopped_by,
        schedule,
        makespan,
        bound,
        time.perf_counter() - begun,
        label,
        __version__,
    )
    return replace(_of_result(name, label, problem, result), improvements=outcome.improvements)


def _of_result(name: str, label: str, problem: Problem, result: Result) -> Measurement:
    value = None
    if result.schedule is not None:
        violation = result.schedule.check(problem)
        if violation is not None:
            raise ValueError(f"the schedule of {label!r} for {name!r} breaks a rule: {violation}")
        value = result.schedule.makespan(problem)
    bound = result.bound.seconds if result.bound is not None and result.bound.valid else None
    return Measurement(
        name,
        label,
        value,
        bound,
        None,
        result.seconds,
        str(result.status),
        str(result.stopped_by),
        result.version,
        result.message,
        _point(result.seconds, value),
    )


def _refused(name: str, label: str, seconds: float, message: str) -> Measurement:
    return Measurement(name, label, None, None, None, seconds, NOT_APPLICABLE, "", "", message)


def _with_gaps(rows: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements of one instance with their gaps to the best bound among them."""
    best = max((row.bound for row in rows if row.bound is not None), default=None)
    if best is None or best <= 0:
        return list(rows)
    return [row if row.value is None else replace(row, gap=row.value / best - 1) for row in rows]


def _point(seconds: float, value: float | None) -> tuple[tuple[float, float], ...]:
    return () if value is None else ((seconds, value),)


def _measure(row: Measurement, by: Literal["value", "seconds"]) -> float:
    if row.value is None or (by == "seconds" and row.status != Status.OPTIMAL):
        return math.inf
    return row.value if by == "value" else row.seconds


def _figure() -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a table to a file, whole or not at all."""
    with atomic_write(Path(path)) as stream:
        stream.write(text)
