"""Progress on stderr, for work that takes more than a second."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..executor.reports.tables import clock_text
from ..screen.terminal import is_quiet
from .streams import escaped, say

if TYPE_CHECKING:
    from ..executor.jobs.plan_clock import Standing

DELAY, BETWEEN, BETWEEN_LINES = 1.0, 0.2, 30.0
"""Seconds before progress is shown, between updates, and between lines of a file."""

SIGN_OF_LIFE = 2.0
"""Seconds of work without known progress before a terminal shows what runs and since when."""


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
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show the present work and its seconds, if it takes long.

    Yields a function that replaces the text.
    """
    now, begun, over = [text], time.monotonic(), threading.Event()

    def show() -> None:
        if sys.stderr.isatty():
            if not over.wait(SIGN_OF_LIFE):
                _show_elapsed(now, begun, over)
            return
        while not over.wait(BETWEEN_LINES):
            say(f"batchbound: {now[0]}, {clock_text(time.monotonic() - begun)}", sys.stderr)

    thread = threading.Thread(target=show, daemon=True)
    if not is_quiet():
        thread.start()
    try:
        yield lambda changed: now.__setitem__(0, changed)
    finally:
        over.set()
        if thread.is_alive():
            thread.join()


def _show_elapsed(now: Sequence[str], begun: float, over: threading.Event) -> None:
    """Show a text and its seconds on a terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(
        console=Console(stderr=True), auto_refresh=False, redirect_stdout=False, transient=True
    ) as live:
        while not over.wait(BETWEEN):
            text = f"{escaped(now[0])}, {clock_text(time.monotonic() - begun)}"
            live.update(Text(text), refresh=True)


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
