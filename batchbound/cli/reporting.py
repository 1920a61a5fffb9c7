"""From a plan and a trace to a report: what `run`, `report` and `demo` have in common."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..data.plan import Plan
from ..data.report import Report
from ..data.trace import Trace
from ..judging import calibration_of
from .output import note

if TYPE_CHECKING:
    from ..executor.reports.tables import Row

FILE_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""


def warn_of_other_machine(plan: Plan, trace: Trace) -> None:
    """Say on stderr if the plan's cost model is not of the machine and model that ran it."""
    calibrated = calibration_of(plan)
    if calibrated is None:
        name = plan.provenance.cost_source.get("name", "unknown")
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
    pace = (
        "" if report.pace is None else f" ({report.pace:.2f} x the cost model's seconds in the median stage)"
    )
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
