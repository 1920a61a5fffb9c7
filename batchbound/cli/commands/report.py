"""``batchbound report``: print the gap and the losses of a run."""

from __future__ import annotations

from ...options.judging import ReportOptions
from ...reporting import report
from ...screen.report import show

OPTIONS = ReportOptions


def run(options: ReportOptions) -> int:
    """Print the report and write its pictures."""
    return show(report.of(options), options)
