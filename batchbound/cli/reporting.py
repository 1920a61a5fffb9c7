"""Reports of runs that several commands print."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

from ..data.plan import Plan
from ..data.report import Report
from ..data.trace import Trace
from ..judging import calibration_of
from ..run_job.earlier import ASSUMED
from ..run_job.server_result import ServerResult
from .output import note
from .streams import escaped, say

if TYPE_CHECKING:
    from ..executor.reports.tables import Row

FILE_WIDTH = 120
"""Width in columns of a table in a file or a pipe."""


def warn_of_other_machine(plan: Plan, trace: Trace) -> None:
    """Note that a plan's costs are of another machine or model."""
    calibrated = calibration_of(plan)
    if calibrated is None:
        name = plan.provenance.cost_source.get("name", "unknown")
        if name == ASSUMED:
            return  # assumed costs predict no seconds
        note(
            f"the plan's cost model ({name}) was not measured on this machine, so its seconds are not this"
            " run's: measure with `batchbound profile`, then `plan --cost`"
        )
        return
    different = calibrated.differences(trace.engine)
    if different:
        note(f"the plan's cost model is of another machine or model: {'; '.join(different)}")


def run_line(report: Report) -> str:
    """Return a run's seconds and gap in one line."""
    from ..executor.reports.tables import duration, percent

    took = duration(report.makespan)
    pace = (
        "" if report.pace is None else f" ({report.pace:.2f} x the cost model's seconds in the median stage)"
    )
    if report.run_gap is None or report.run_bound is None:
        return f"in {took}{pace}; it has no bound"
    model, bound = duration(report.model_makespan), duration(report.run_bound)
    gap = percent(report.run_gap, 2)
    return f"in {took}{pace}; {model} by the model, {gap} above the proven bound of {bound}"


def print_report(value: Report, *, as_json: bool) -> None:
    """Print a report on stdout, as JSON or as tables."""
    if as_json:
        say(json.dumps(value.to_json()))
        return
    from ..executor.reports.tables import report_rows

    print_rows(report_rows(value))


def print_rows(rows: Sequence[Row]) -> None:
    """Print the lines of a report on stdout, as a table."""
    from rich.console import Console

    from ..executor.reports.tables import Row, rows_table

    # Names and values may come from a file or a server.
    shown = [Row(*map(escaped, astuple(row))) for row in rows]
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(rows_table(shown))


def show_server(result: ServerResult, output: str, *, as_json: bool) -> bool:
    """Print a server run's figures; return whether its bound is wrong."""
    if result.finished_before:
        note(f"{output}: this job is finished; --overwrite would serve it again")
    elif not len(result.run):
        note(f"{output}: every request already has its completion")
    if not as_json and (result.finished_before or not len(result.run)):
        return False
    summary = result.figures(note) | {"output": output}
    wrong = bool(summary.get("bound_is_wrong"))
    if as_json:
        say(json.dumps(summary))
        return wrong
    before = f" after {summary['resumed']:,} from before" if summary["resumed"] else ""
    retried = f", {summary['retries']:,} retries" if summary["retries"] else ""
    rate = summary["output_tokens_per_s"]
    speed = f", {rate:,.0f} output tokens/s" if isinstance(rate, float) else ""
    made = f"{summary['requests']:,} requests{before} in {summary['makespan_s']:,.2f} s{speed}{retried}"
    say(f"{output}: {made}")
    _show_counted(summary)
    return wrong


def _show_counted(summary: Mapping[str, object]) -> None:
    bound = summary.get("bound_iterations")
    if bound is None:
        return
    assert isinstance(bound, int)
    counted, predicted = summary.get("iterations"), summary.get("predicted_iterations")
    broken = isinstance(counted, int) and counted < bound
    if bound:
        say(f"  {summary['bound_label']!s:28s} {bound:9,d} iterations, by {summary['bound_source']}")
    if summary.get("assuming"):
        say(f"  {summary['assuming']}")
    if isinstance(predicted, int):
        say(f"  {'predicted at planned lengths':28s} {predicted:9,d}")
    if isinstance(counted, int):
        say(
            f"  {'counted by the server':28s} {counted:9,d}"
            + ("" if broken or not bound else f"  {counted / bound - 1:+.2%} of the bound")
        )
    else:
        say(f"  {'counted by the server':28s} {'unknown':>9s}  (it has no such counter, or restarted)")
    simulated = summary.get("simulated_iterations")
    for name, value in (simulated if isinstance(simulated, dict) else {}).items():
        say(f"  {'simulated, ' + name:28s} {value:9,d}" + (f"  {value / bound - 1:+.2%}" if bound else ""))
    losses = summary.get("losses")
    for name, value in (losses if isinstance(losses, dict) else {}).items():
        say(f"  {'lost: ' + name:52s} {value:+9,d}")


def print_tables(tables: Mapping[str, Mapping[str, object]]) -> None:
    """Print tables of figures on stdout."""
    for title, table in tables.items():
        say(title)
        for name, value in table.items():
            say(f"  {name:46s} {_figure(value)}")


def _figure(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "unknown" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:12,d}"
    return f"{value:12,.4g}" if abs(value) < 1 else f"{value:12,.2f}"
