"""Screen of ``batchbound compare``."""

from __future__ import annotations

import json

from ..comparing.result import Comparison
from ..options.compare import CompareOptions
from .streams import say


def show(comparison: Comparison, options: CompareOptions) -> int:
    """Print the table of all measurements."""
    rows = (
        json.dumps({"rows": comparison.to_json()}) if options.json else comparison.to_markdown().rstrip("\n")
    )
    say(rows)
    return 0
