"""Standard output and standard error that are closed, full, or know few letters."""

from __future__ import annotations

import errno
import io
import os
import sys


def prepare_streams() -> None:
    """Have what is printed to a closed stream dropped, and letters that a stream has not escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Else a file that is opened later would get the stream's number, and what libraries print.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def output_lost(error: OSError) -> bool:
    """
    Return whether an error is of a stream that takes no more; what standard output still holds is dropped.

    Files of ours name themselves in their errors.
    """
    from ..data.files.disk import WriteError

    if error.filename is not None or error.errno not in (*WriteError.FULL, errno.EPIPE):
        return False
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
