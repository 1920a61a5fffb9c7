"""Screen of ``batchbound report``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import astuple

from ..data.report import Report
from ..executor.reports.tables import Row, report_rows, rows_table
from .streams import escaped, say

FILE_WIDTH = 120
"""Width in columns of a table in a file or a pipe."""


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
