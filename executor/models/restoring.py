"""Changes to a model while it runs, undone however that ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def restoring(restore: Callable[[], None]) -> Iterator[None]:
    """Restore something after a block, once more where an interrupt comes while it is being restored."""
    try:
        try:
            yield
        finally:
            restore()
    except BaseException:
        restore()
        raise
