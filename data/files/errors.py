"""The error of everything that a user gives or a disk refuses."""

from __future__ import annotations

import errno
import os

_LONGEST_MESSAGE = 1000
"""Characters beyond which a message is shown by its two ends."""


class InputError(ValueError):
    """
    A mistake in the input: the file, the place in it, the value, and the hint.

    message: The mistake, with the offending value.
    file: The file it stands in, if any.
    where: The line or field, as a person would look for it ("line 3, field 'custom_id'").
    hint: The next step.
    """

    def __init__(
        self, message: str, *, file: str | os.PathLike[str] | None = None, where: str = "", hint: str = ""
    ) -> None:
        name = "" if file is None else os.fspath(file) or "''"
        place = ", ".join(part for part in (name, where) if part)
        if len(message) > _LONGEST_MESSAGE:
            # It shows a value that has the length of a book.
            message = f"{message[: _LONGEST_MESSAGE // 2]} ... {message[-_LONGEST_MESSAGE // 4 :]}"
        text = f"{place}: {message}" if place else message
        super().__init__(f"{text}. {hint}" if hint else text)
        self.file = file
        self.where = where
        self.hint = hint


class WriteError(InputError):
    """A disk is full or fails; the input is right, and earlier output is kept."""

    FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
    """Errors of the system that say so."""


def shown(value: object) -> str:
    """Return a value as a message shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
