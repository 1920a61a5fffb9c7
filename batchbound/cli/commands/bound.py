"""``batchbound bound``: lower bounds of a workload."""

from __future__ import annotations

from ...options.bound import BoundOptions

OPTIONS = BoundOptions


def run(options: BoundOptions) -> int:
    """Print every bound, the strongest first and the paper's formula last."""
    from ...checking import bounds
    from ...screen.checks import show_bounds

    return show_bounds(bounds.of(options), options)
