"""``batchbound demo``: plan and run bundled prompts on a small model."""

from __future__ import annotations

from ...options.demo import DemoOptions

OPTIONS = DemoOptions


def run(options: DemoOptions) -> int:
    """Run the prompts and print some completions."""
    from ...run_job.demo import demo_job
    from ...screen.demo import show_command, show_completions
    from .run import run as run_job

    job = demo_job(options)
    show_command(job)
    status = run_job(job)
    if not status:
        show_completions(job)
    return status
