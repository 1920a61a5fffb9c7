"""Remarks and progress of the library's functions, for whoever listens; by default nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


class Advance(Protocol):
    """Function that takes the units done and the seconds left."""

    def __call__(self, done: int, left: float | None = None) -> None:
        """Show progress."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Functions that take remarks and progress; by default none is heard, the command line's print on stderr.

    note, warn: Take a remark, and a warning.
    working: Takes the present work; its context yields a function that replaces the text.
    progress: Takes a number of units; its context yields a function that takes the number done, and the
        seconds left or None.
    silent: Whether progress of other libraries is disabled, too.
    """

    note: Callable[[str], None] = lambda text: None
    warn: Callable[[str], None] = lambda text: None
    working: Callable[[str], AbstractContextManager[Callable[[str], None]]] = lambda text: nullcontext(
        lambda changed: None
    )
    progress: Callable[[int, str], AbstractContextManager[Advance]] = lambda total, unit: nullcontext(
        lambda done, left=None: None
    )
    silent: bool = True


LISTENER: ContextVar[Listener] = ContextVar("listener", default=Listener())  # noqa: B039 - it has no state


def note(text: str) -> None:
    """Tell a remark."""
    LISTENER.get().note(text)


def remark(text: str) -> None:
    """Tell a remark of a run; an alert is a warning."""
    from .executor.models.faults import Alert

    (LISTENER.get().warn if isinstance(text, Alert) else note)(text)


def working(text: str) -> AbstractContextManager[Callable[[str], None]]:
    """Tell the present work, while it lasts."""
    return LISTENER.get().working(text)


def progress(total: int, unit: str) -> AbstractContextManager[Advance]:
    """Tell how many units of work are done, and the seconds left."""
    return LISTENER.get().progress(total, unit)


@contextmanager
def hushed() -> Iterator[None]:
    """Disable the progress of transformers if nobody listens."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if LISTENER.get().silent:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
