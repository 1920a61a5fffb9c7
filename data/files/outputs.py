"""Checks of output files before the work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .arrow import require_arrow
from .disk import InputError
from .kinds import is_of_kind
from .sources import first_bytes


def refuse_outputs(
    paths: Sequence[str | os.PathLike[str]], overwrite: bool, read: Sequence[str | os.PathLike[str]] = ()
) -> None:
    """Raise InputError if an output cannot be written without a loss."""
    for number, path in enumerate(paths):
        target = Path(path)
        if target.is_dir():
            raise InputError("is a folder", file=path, hint="Name a file.")
        if os.fspath(path) == "-" or (target.exists() and not target.is_file()):
            raise InputError("is not a regular file", file=path, hint="Name a file.")
        if target.is_symlink() and not target.exists():
            # Writing through the link would create a file elsewhere.
            raise InputError("is a link to a file that does not exist", file=path, hint="Name another file.")
        if any(_same_file(target, source) for source in read):
            raise InputError("is read by this command", file=path, hint="Name another output.")
        if any(_same_file(target, source) for source in paths[:number]):
            raise InputError("is to hold two outputs", file=path, hint="Name another file for one.")
        if target.exists() and not overwrite:
            raise InputError("exists already", file=path, hint="Say --overwrite, or name another file.")
        if target.suffix.lower() == ".parquet":
            require_arrow()
        folder = Path(os.path.realpath(path)).parent
        if not folder.is_dir():
            raise InputError("its folder does not exist", file=path, hint="Make the folder first.")
        if not os.access(folder, os.W_OK):
            raise InputError("its folder cannot be written to", file=path, hint="Name a file elsewhere.")


def can_be_made_again(path: str | os.PathLike[str]) -> bool:
    """Return whether no interrupted run needs a plan or report."""
    target = Path(path)
    if not target.is_file() or any(target.resolve().parent.glob("*.journal")):
        return False
    if target.suffix == ".html":
        return b"<title>batchbound report</title>" in first_bytes(target, 400)
    return any(is_of_kind(target, kind) for kind in _MADE_AGAIN)


_MADE_AGAIN = ("batchbound_plan", "batchbound_iteration_plan", "batchbound_report")


def _same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
