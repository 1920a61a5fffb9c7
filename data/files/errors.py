"""Errors of input and of a failing disk."""

from __future__ import annotations

import errno
import os

_LONGEST_MESSAGE = 1000
"""Longest message, in characters; longer ones lose their middle."""


class InputError(ValueError):
    """Error in the input, with file, place, value and hint.

    message: Mistake, with the offending value.
    file: File with the mistake, if any.
    where: Line or field ("line 3, field 'custom_id'").
    hint: Next step for the user.
    """

    def __init__(
        self, message: str, *, file: str | os.PathLike[str] | None = None, where: str = "", hint: str = ""
    ) -> None:
        name = "" if file is None else os.fspath(file) or "''"
        place = ", ".join(part for part in (name, where) if part)
        if len(message) > _LONGEST_MESSAGE:
            # The message shows a very long value.
            message = f"{message[: _LONGEST_MESSAGE // 2]} ... {message[-_LONGEST_MESSAGE // 4 :]}"
        text = f"{place}: {message}" if place else message
        super().__init__(f"{text}. {hint}" if hint else text)
        self.file = file
        self.where = where
        self.hint = hint


class InputTypeError(InputError, TypeError):
    """Error of an argument that has another type."""


class WriteError(InputError):
    """Error of a full or failing disk; earlier output is kept."""

    FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
    """Error numbers of a full or failing disk."""


def check_type(name: str, value: object, *kinds: type, hint: str = "") -> None:
    """Raise InputTypeError for an argument of another type; ``hint`` names what to give."""
    if not isinstance(value, kinds):
        wanted = hint or " or ".join(f"a {kind.__name__}" for kind in kinds if kind is not type(None))
        which = f" {shown(value)}" if isinstance(value, str | int | float | None) else ""
        raise InputTypeError(f"{name} is of type {type(value).__name__}{which}", hint=f"Give {wanted}.")


def shown(value: object) -> str:
    """Return a value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
