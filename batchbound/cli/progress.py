"""A progress bar on stderr, for work that takes more than a second."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """
    Yield a function that is told how much is done.

    Parameters
    ----------
    total
        How much there is to do.
    unit
        Of what.
    """
    from tqdm import tqdm

    with tqdm(total=total, unit=f" {unit}", delay=1.0, file=sys.stderr, mininterval=0.2) as bar:

        def advance(done: int) -> None:
            bar.update(done - bar.n)

        yield advance
