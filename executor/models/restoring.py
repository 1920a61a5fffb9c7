"""What is changed of a model while it runs, put back however that ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def restoring(restore: Callable[[], None]) -> Iterator[None]:
    """
    Restore something after a block, once more where an interrupt comes while it is being restored.

    Parameters
    ----------
    restore
        Does it; a second call changes nothing.

    Yields
    ------
    None
        While it may be changed.
    """
    try:
        try:
            yield
        finally:
            restore()
    except BaseException:
        restore()
        raise
