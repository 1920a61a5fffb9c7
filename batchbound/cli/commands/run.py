"""``batchbound run``: run prompts or a plan on a model or server."""

from __future__ import annotations

from ...options.run import JobOptions

OPTIONS = JobOptions


def run(options: JobOptions) -> int:
    """Run the unfinished requests and print the report."""
    from ...running import run_or_send
    from ...screen.run import show
    from ...screen.watching import Watch

    watch = Watch(options)
    return watch.status_of(lambda: show(run_or_send(options, watch), options))
