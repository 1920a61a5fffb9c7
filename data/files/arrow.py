"""Errors of pyarrow as InputError."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from .errors import InputError
from .sources import opened, refuse_streams


def require_arrow() -> None:
    """Raise ImportError with a hint if pyarrow is missing."""
    if find_spec("pyarrow") is None:
        raise ImportError(
            "Parquet and Arrow files need pyarrow: in the clone, run `pip install '.[parquet]'`"
        )


def holds_parquet(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is readable and begins as Parquet."""
    refuse_streams(path)
    try:
        with opened(path) as stream:
            return stream.read(4) == b"PAR1"
    except OSError:
        return False


@contextmanager
def reading_arrow(path: str | os.PathLike[str], hint: str = "Write it again.") -> Iterator[None]:
    """Turn errors of Parquet or Arrow into InputError with the file."""
    try:
        yield
    except Exception as error:  # pyarrow's errors have no common base
        why = next(iter(str(error).splitlines()), type(error).__name__)
        kind = "Arrow" if Path(path).suffix == ".arrow" else "Parquet"
        raise InputError(f"not a readable {kind} file ({why})", file=path, hint=hint) from None
