"""From a plan and a trace to a report: what `run`, `report` and `demo` have in common."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..data.costs.calibration import CalibratedCost
from ..data.files.disk import InputError
from ..data.plan import Plan
from ..data.problem import Problem
from ..data.report import Report
from ..data.trace import Trace
from ..executor.reports.report import report
from ..executor.reports.steady_state import reached
from ..solvers.bounds.proven_bound import proven_bound
from .output import note

if TYPE_CHECKING:
    from ..executor.reports.tables import Row

FILE_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""


def report_of(plan: Plan, trace: Trace, *, seconds: float | None = None) -> Report:
    """
    Return the report of a run of a plan, its gap taken to the bound of the lengths that came out.

    Parameters
    ----------
    plan
        What was run.
    trace
        Of the run.
    seconds
        What the work behind the report took.

    Raises
    ------
    InputError
        If the trace is of another plan.
    """
    calibrated = calibration_of(plan)
    run_bound = proven_bound(_served(plan.problem, trace))
    try:
        found = report(
            plan.problem,
            trace,
            plan.bound,
            plan.makespan,
            None if calibrated is None else calibrated.error,
            run_bound=run_bound,
            seconds=seconds,
        )
    except ValueError as error:
        raise InputError(str(error), hint="Give the plan that was run.") from None
    configuration = plan.configuration
    came_of_it = None if configuration is None or found.clock == "model" else reached(configuration, trace)
    return replace(found, expected=plan.expected, reached=came_of_it)


def calibration_of(plan: Plan) -> CalibratedCost | None:
    """Return the calibration behind a plan's cost model, or None if its costs were not measured by us."""
    if "cost" not in plan.cost_source:
        return None
    recorded = {name: value for name, value in plan.cost_source.items() if name != "name"}
    return CalibratedCost.from_json(recorded)


def warn_of_other_machine(plan: Plan, trace: Trace) -> None:
    """Say on stderr if the plan's cost model is not of the machine and model that ran it."""
    calibrated = calibration_of(plan)
    if calibrated is None:
        name = plan.cost_source.get("name", "unknown")
        note(
            f"the plan's cost model ({name}) was not measured on this machine:"
            " its seconds are not this run's. Measure with `batchbound profile`, then `plan --cost`"
        )
        return
    different = calibrated.differences(trace.engine)
    if different:
        note(f"the plan's cost model is of another machine or model: {'; '.join(different)}")


def run_line(report: Report) -> str:
    """Return a run in one line: what the clock says, and, on the clock of its bound, its gap."""
    from ..executor.reports.tables import duration, percent

    took = duration(report.makespan)
    pace = "" if report.pace is None else f" (the machine took {report.pace:.2f} x the cost model's seconds)"
    if report.run_gap is None or report.run_bound is None:
        return f"in {took}{pace}; nothing is proven of it"
    model, bound = duration(report.model_makespan), duration(report.run_bound)
    gap = percent(report.run_gap, 2)
    return f"in {took}{pace}; {model} by the model, {gap} above the proven bound of {bound}"


def print_report(value: Report, *, as_json: bool) -> None:
    """Print a report on stdout: as one JSON object, or as tables."""
    if as_json:
        print(json.dumps(value.to_json()))
        return
    from ..executor.reports.tables import report_rows

    print_rows(report_rows(value))


def print_rows(rows: Sequence[Row]) -> None:
    """Print the lines of a report on stdout, as a table."""
    from rich.console import Console

    from ..executor.reports.tables import rows_table

    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(rows_table(rows))


def _served(problem: Problem, trace: Trace) -> Problem:
    """
    Return the problem that the run turned out to solve: its own requests, at the lengths they had.

    Without the capacities, which actual lengths may have outgrown: a bound without them holds all the more.
    """
    row_of = {name: row for row, name in enumerate(problem.workload.ids.tolist())}
    rows = [row_of[name] for name in trace.ids if name in row_of]
    if len(rows) != len(trace.ids):
        raise InputError("the trace is of another plan", hint="Give the plan that was run.")
    workload = problem.workload.select(rows).with_output_tokens(trace.tokens)
    return replace(problem, workload=workload, kv_capacity=None, prefill_token_cap=None, max_position=None)
