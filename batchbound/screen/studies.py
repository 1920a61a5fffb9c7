"""Screens of ``compare`` and ``serve``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..comparing.result import Comparison
from ..options.compare import CompareOptions
from ..options.serve import ServeOptions
from .streams import say


def show_comparison(comparison: Comparison, options: CompareOptions) -> int:
    """Print the table of all measurements."""
    say(json.dumps({"rows": comparison.to_json()}) if options.json else str(comparison))
    return 0


def show_serving(figures: Mapping[str, Any], options: ServeOptions) -> int:
    """Print the figures of a serving run; return whether a completion is wrong."""
    if options.json:
        say(json.dumps(figures))
    else:
        say(f"  {options.policy}, {figures['requests']} requests")
        for name, value in figures.items():
            if value is not None and name not in ("policy", "requests"):
                say(f"  {name.replace('_', ' '):26s} {value:12.5g}")
    return 0 if figures.get("wrong_answers", 0) == 0 else 1
