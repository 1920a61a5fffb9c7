"""Progress on stderr, for work that takes more than a second."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..data.figures import clock_text
from ..listening import Advance
from .streams import escaped, say
from .terminal import is_quiet

if TYPE_CHECKING:
    from ..executor.jobs.plan_clock import Standing

DELAY, BETWEEN, BETWEEN_LINES = 1.0, 0.2, 30.0
"""Seconds before progress is shown, between updates, and between lines of a file."""

SIGN_OF_LIFE = 2.0
"""Seconds of work without known progress before a terminal shows what runs and since when."""


@contextlib.contextmanager
def progress(total: int, unit: str) -> Iterator[Advance]:
    """Yield a function that takes the number of units done, and the seconds left or None."""

    def advance(done: int, left: float | None = None) -> None:
        show(done, f"{done:,}/{total:,} {unit}" + ("" if left is None else f", about {_left(left)}"))

    with _shown(total, f"0/{total:,} {unit}") as show:
        yield advance


def _left(seconds: float) -> str:
    return f"{clock_text(seconds).removeprefix('0:').removeprefix('0')} left"


@contextlib.contextmanager
def plan_progress(begin: Standing) -> Iterator[Callable[[Standing], None]]:
    """Yield a callback that shows a run's progress through its plan."""
    with _shown(begin.planned, standing_text(begin)) as show:
        yield lambda standing: show(_share(standing) * begin.planned, standing_text(standing))


def _share(standing: Standing) -> float:
    """Return the share of a run that is done; of the requests where no time is known."""
    if math.isinf(standing.left):
        return standing.finished / standing.requests
    return standing.done / standing.planned if standing.planned else 1.0


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
def _shown(total: float, text: str = "") -> Iterator[Callable[[float, str], None]]:
    """Yield a function that shows progress as a bar or as lines."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TaskProgressColumn(), BarColumn(20), TextColumn("{task.description}", markup=False))
    # A thread of its own shows seconds pass, also while a long stage runs.
    elapsed = TimeElapsedColumn()
    bar = Progress(*columns, elapsed, console=console, refresh_per_second=1, transient=True)
    delay = DELAY if console.is_terminal else BETWEEN_LINES
    task, due = bar.add_task(text, total=total), time.monotonic() + delay
    begin = threading.Timer(DELAY, bar.start)
    begin.daemon = True
    if console.is_terminal and not is_quiet():
        begin.start()

    def show(done: float, text: str) -> None:
        nonlocal due
        if is_quiet() or time.monotonic() < due:
            return
        if console.is_terminal:
            bar.update(task, completed=done, description=text, refresh=True)
            due = time.monotonic() + BETWEEN
        else:
            say(f"batchbound: {text}", sys.stderr)
            due = time.monotonic() + BETWEEN_LINES

    try:
        yield show
    finally:
        begin.cancel()
        if begin.is_alive():
            begin.join()
        if console.is_terminal:
            bar.stop()  # it would print an empty line into a file


def standing_text(standing: Standing) -> str:
    """Return a run's progress in a line: prompts, speed, time left."""
    done = f"{standing.finished:,}/{standing.requests:,} prompts"
    if standing.speed < 0.5:
        return done
    done += f"  {standing.speed:,.0f} tokens/s"
    if math.isinf(standing.left):
        return done
    return f"{done}  {_left(standing.left)}"
