"""Screen of ``batchbound demo``."""

from __future__ import annotations

from ..options.run import JobOptions
from ..run_job.demo import read_pairs
from .streams import say
from .terminal import keep_typed, note

SHOWN = 3
"""Number of completions to print."""


def show_command(job: JobOptions) -> None:
    """Note the command of the demo's run."""
    words = ["run", str(job.plan), "--model", str(job.model), "--threads", str(job.threads)]
    words += ["--slots", str(job.slots), "-o", job.answers, "--overwrite"]
    keep_typed(words)
    note(f"$ batchbound {' '.join(words)}")


def show_completions(job: JobOptions) -> None:
    """Print some completions."""
    say("completions:")
    for prompt, completion in read_pairs(str(job.plan), job.answers)[:SHOWN]:
        short = completion if len(completion) <= 44 else f"{completion[:40]} ..."
        say(f"  {prompt:32.32} {short}")
