"""Listener of the command line: remarks and progress on stderr."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ..listening import Listener
from ..screen.progress import progress, working
from ..screen.terminal import note, warn


class Voice(Listener):
    """Listener that prints remarks, unless --quiet is given, and progress."""

    def __init__(self, *, silent: bool) -> None:
        self.silent = silent

    def note(self, text: str) -> None:
        """Print a remark."""
        note(text)

    def warn(self, text: str) -> None:
        """Print a warning, even with --quiet."""
        warn(text)

    def working(self, text: str) -> AbstractContextManager[Callable[[str], None]]:
        """Show the present work and its seconds, if it takes long."""
        return working(text)

    def progress(self, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """Show the number of units done."""
        return progress(total, unit)
