"""``batchbound audit``: lower bound and losses of a finished server run."""

from __future__ import annotations

from ...auditing import audit
from ...options.judging import AuditOptions
from ...screen.audit import show

OPTIONS = AuditOptions


def run(options: AuditOptions) -> int:
    """Read the run, and print the bound and the loss by cause."""
    return show(audit.of(options), options)
