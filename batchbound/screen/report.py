"""Screen of ``batchbound report``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import astuple

from ..data.report import Report
from ..executor.reports.tables import Row, report_rows, rows_table, rows_without_costs
from ..options.judging import ReportOptions
from ..reporting import Reported, ReportedServers
from .audit import show_tables
from .gain import gain_lines
from .iterations import iteration_summary, show_iterations
from .streams import escaped, say
from .terminal import is_verbose, note

FILE_WIDTH = 120
"""Width in columns of a table in a file or a pipe."""


def show(reported: Reported | ReportedServers, options: ReportOptions) -> int:
    """Print the gain of a run, and its report."""
    if isinstance(reported, ReportedServers):
        _show_servers(reported, as_json=options.json)
        return 0
    if reported.gain is not None and not options.json:
        repeats = reported.report.repeats
        for line in gain_lines(reported.gain, reported.model, None, repeats=repeats):
            say(line)
    endings = reported.endings
    if endings is not None and endings.line is not None and not options.json:
        say(endings.line)
        if endings.retry is not None:
            say(f"  the same run with {endings.retry} completes these alone")
    # One run has one bound on the screen: the lines above have it at the run's own costs.
    is_shown = reported.plan.provenance.assumes_costs or (reported.gain is not None and not is_verbose())
    if is_shown and not options.json:
        show_rows(rows_without_costs(reported.report))
    else:
        show_report(reported.report, as_json=options.json)
    return 0


def _show_servers(reported: ReportedServers, *, as_json: bool) -> None:
    summary, audit = iteration_summary(reported.plan), reported.audit
    for assumption in () if audit is None else audit.assumptions:
        note(assumption)
    if as_json:
        say(json.dumps(summary if audit is None else {"planned": summary, "run": audit.tables}))
        return
    say(f"{reported.path}: planned" + (", not run" if audit is None else ""))
    show_iterations(summary)
    if audit is not None:
        say(f"{reported.trace}: run")
        show_tables(audit.tables)


def show_report(report: Report, *, as_json: bool) -> None:
    """Print a report on stdout, as JSON or as a table."""
    if as_json:
        say(json.dumps(report.to_json()))
    else:
        show_rows(report_rows(report))


def show_rows(rows: Sequence[Row]) -> None:
    """Print the lines of a report on stdout, as a table."""
    from rich.console import Console

    # Names and values may come from a file or a server.
    shown = [Row(*map(escaped, astuple(row))) for row in rows]
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(rows_table(shown))
