"""Remarks and progress of the library's functions, for whoever listens; by default nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar


class Listener:
    """Listener that hears nothing; the command line's prints on stderr."""

    silent = True
    """Whether progress of other libraries is disabled, too."""

    def note(self, text: str) -> None:
        """Take a remark."""

    def warn(self, text: str) -> None:
        """Take a warning."""

    def working(self, text: str) -> AbstractContextManager[Callable[[str], None]]:
        """Take the present work; yield a function that replaces its text."""
        return nullcontext(lambda changed: None)

    def progress(self, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """Yield a function that takes the number of units done."""
        return nullcontext(lambda done: None)


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


def progress(total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
    """Tell how many units of work are done."""
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
