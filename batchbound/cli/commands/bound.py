"""``batchbound bound``: lower bounds of a workload."""

from __future__ import annotations

from ...checking import bounds
from ...options.bound import BoundOptions
from ...screen.checks import show_bounds

OPTIONS = BoundOptions


def run(options: BoundOptions) -> int:
    """Print every bound, the strongest first and the paper's formula last."""
    return show_bounds(bounds.of(options), options)
