"""``batchbound report``: print the gap and the losses of a run."""

from __future__ import annotations

from ...options.judging import ReportOptions

OPTIONS = ReportOptions


def run(options: ReportOptions) -> int:
    """Print the report and write its pictures."""
    from ...reporting import report
    from ...screen.report import show

    return show(report.of(options), options)
