"""``batchbound simulate``: simulate a policy on a workload."""

from __future__ import annotations

from ...options.simulate import SimulateOptions

OPTIONS = SimulateOptions


def run(options: SimulateOptions) -> int:
    """Simulate, and print the makespan and the bound."""
    from ...screen.simulate import show
    from ...simulating import simulate

    return show(simulate.of(options), options)
