"""``batchbound plan``: make a checked schedule with a lower bound."""

from __future__ import annotations

import time

from ...options.plan import PlanOptions

OPTIONS = PlanOptions


def run(options: PlanOptions) -> int:
    """Make the plan, write it, and print its summary."""
    from ...plan_requests import plan_for_any
    from ...screen.plan import show

    begun, options = time.perf_counter(), options.saved()
    return show(plan_for_any(options), options, time.perf_counter() - begun)
