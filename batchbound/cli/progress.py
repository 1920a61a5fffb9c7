"""Progress on stderr, for work that takes more than a second."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..executor.reports.tables import clock_text
from .output import is_quiet
from .streams import say

if TYPE_CHECKING:
    from ..executor.jobs.plan_clock import Standing

DELAY, BETWEEN, BETWEEN_LINES = 1.0, 0.2, 30.0
"""Seconds before progress is shown, between updates, and between lines of a file."""


@contextlib.contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of units done."""
    with _shown(total) as show:
        yield lambda done: show(done, f"{done:,}/{total:,} {unit}")


@contextlib.contextmanager
def plan_progress(begin: Standing) -> Iterator[Callable[[Standing], None]]:
    """Yield a callback that shows a run's progress through its plan."""
    with _shown(begin.planned) as show:
        yield lambda standing: show(standing.done, standing_text(standing))


@contextlib.contextmanager
def _shown(total: float) -> Iterator[Callable[[float, str], None]]:
    """Yield a function that shows progress as a bar or as lines."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    columns = (TaskProgressColumn(), BarColumn(20), TextColumn("{task.description}", markup=False))
    # No refreshing thread: the work reports often enough.
    bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
    task, due = bar.add_task("", total=total), time.monotonic() + DELAY

    def show(done: float, text: str) -> None:
        nonlocal due
        if is_quiet() or time.monotonic() < due:
            return
        if console.is_terminal:
            bar.start()
            bar.update(task, completed=done, description=text, refresh=True)
            due = time.monotonic() + BETWEEN
        else:
            say(f"batchbound: {text}", sys.stderr)
            due = time.monotonic() + BETWEEN_LINES

    try:
        yield show
    finally:
        bar.stop()


def standing_text(standing: Standing) -> str:
    """Return a run's progress in a line: prompts, speed, time left."""
    done = f"{standing.finished:,}/{standing.requests:,} prompts  {standing.speed:,.0f} tokens/s"
    if not standing.speed:
        return done  # The time left is unknown.
    return f"{done}  {clock_text(standing.left).removeprefix('0:').removeprefix('0')} left"
