"""``batchbound audit``: lower bound and losses of a finished server run."""

from __future__ import annotations

from ...options.judging import AuditOptions

OPTIONS = AuditOptions


def run(options: AuditOptions) -> int:
    """Read the run, and print the bound and the loss by cause."""
    from ...auditing import audit
    from ...screen.audit import show

    return show(audit.of(options), options)
