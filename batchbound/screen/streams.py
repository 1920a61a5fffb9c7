"""Safe standard output and error: closed, full or limited streams, control characters."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import sys
import textwrap
from typing import TextIO

_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069]")
"""Control characters, which may move the cursor or reorder letters, except line feed and tab."""


def escaped(text: str) -> str:
    """Escape control characters in a text from a server or a file."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a text; wrap long lines on a terminal."""
    stream = sys.stdout if stream is None else stream
    text = escaped(text)
    if stream is sys.stderr and stream.isatty():
        width = shutil.get_terminal_size().columns
        lines = (
            textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            for line in text.split("\n")
        )
        text = "\n".join("\n".join(parts) for parts in lines)
    print(text, file=stream)


def prepare_streams() -> None:
    """Prepare closed streams, and letters that a stream cannot print."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Otherwise a file opened later gets the stream's number, and the output of libraries.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def output_lost(error: OSError) -> bool:
    """Return whether an error comes from a standard stream.

    If so, later output is discarded.
    """
    from ..data.files.disk import WriteError

    if error.filename is not None or error.errno not in (*WriteError.FULL, errno.EPIPE):
        return False
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
