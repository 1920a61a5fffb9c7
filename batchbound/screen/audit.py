"""Screen of ``batchbound audit``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from ..auditing import Audit
from ..options.judging import AuditOptions
from .streams import say
from .terminal import WRONG_BOUND, is_verbose, note


def show(audit: Audit, options: AuditOptions) -> int:
    """Print the bound and the loss by cause."""
    for assumption in audit.assumptions:
        note(assumption)
    if options.json:
        claims = {"assumptions": [asdict(claim) for claim in audit.claims]} if audit.claims else {}
        say(json.dumps({**audit.tables, **claims}))
    else:
        show_tables(audit.tables)
    return WRONG_BOUND if audit.is_defect else 0


def show_tables(tables: Mapping[str, Mapping[str, object]]) -> None:
    """Print tables of figures on stdout; the certificate, which a program checks, only with ``--verbose``."""
    for title, table in tables.items():
        if title == "certificate" and not is_verbose():
            continue
        say(title)
        for name, value in table.items():
            say(f"  {name:46s} {_figure(value)}")


def _figure(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "unknown" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:12,d}"
    return f"{value:12,.4g}" if abs(value) < 1 else f"{value:12,.2f}"
