"""``batchbound replay``: forced lengths on a server."""

from __future__ import annotations

from ...options.replay import ReplayOptions

OPTIONS = ReplayOptions


def run(options: ReplayOptions) -> int:
    """Replay an instance, and print the server's counts next to simulation and bound."""
    from ...run_job.replaying import replay
    from ...screen.checks import show_replayed

    return show_replayed(replay.of(options), options)
