"""Listener of the command line: remarks and progress on stderr."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ..listening import Listener
from ..screen.terminal import be_quiet as be_quiet
from ..screen.terminal import fail as fail
from ..screen.terminal import is_quiet as is_quiet
from ..screen.terminal import keep_typed as keep_typed
from ..screen.terminal import note as note
from ..screen.terminal import typed_again as typed_again
from ..screen.terminal import warn as warn


class Voice(Listener):
    """Listener that prints remarks and progress on stderr."""

    def __init__(self, *, silent: bool) -> None:
        self.silent = silent

    def note(self, text: str) -> None:
        """Print a remark, unless --quiet is given."""
        note(text)

    def working(self, text: str) -> AbstractContextManager[Callable[[str], None]]:
        """Show the present work and its seconds, if it takes long."""
        from .progress import working

        return working(text)

    def progress(self, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """Show the number of units done."""
        from .progress import progress

        return progress(total, unit)
