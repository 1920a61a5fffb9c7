"""Fields of a JSON object, each of the kind it must have, or an error that names it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from .disk import InputError


@dataclass(frozen=True, slots=True)
class JsonFields:
    """
    Takes the fields of one JSON object.

    Parameters
    ----------
    value
        The object; one that is none, or not an object, has no fields.
    file
        Where it stands, if anywhere.
    within
        The field it stands in itself, for the errors; empty for a whole file.
    hint
        What to do about a field that is wrong.
    line
        The line it stands in, counted from one; 0 where the file is one object.
    """

    value: object
    file: str | os.PathLike[str] | None = None
    within: str = ""
    hint: str = "Write it again."
    line: int = 0

    def get(self, name: str) -> object:
        """Return a field as it is, None if it is missing."""
        return self.value.get(name) if isinstance(self.value, Mapping) else None

    def number(self, name: str) -> float:
        """Return a finite number; raise InputError if it is none."""
        entry = self.get(name)
        if not is_number(entry):
            raise self.error(name, f"{entry!r} is not a number")
        return float(entry)

    def optional_number(self, name: str) -> float | None:
        """Return a finite number, or None if it is missing; raise InputError if it is something else."""
        return None if self.get(name) is None else self.number(name)

    def integer(self, name: str) -> int:
        """Return a whole number; raise InputError if it is none."""
        entry = self.get(name)
        if not _is_integer(entry):
            raise self.error(name, f"{entry!r} is not a whole number")
        return entry

    def at_least(self, least: int, name: str) -> int:
        """Return a whole number of at least ``least``; raise InputError if it is none."""
        entry = self.integer(name)
        if entry < least:
            raise self.error(name, f"{entry} is not at least {least}")
        return entry

    def flag(self, name: str) -> bool:
        """Return true or false; raise InputError if it is neither."""
        entry = self.get(name)
        if not isinstance(entry, bool):
            raise self.error(name, f"{entry!r} is neither true nor false")
        return entry

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers; raise InputError if it is none."""
        entries = self.get(name)
        if not isinstance(entries, list) or not all(map(_is_integer, entries)):
            raise self.error(name, "is not a list of whole numbers")
        return tuple(entries)

    def text(self, name: str) -> str:
        """Return a text; raise InputError if it is none."""
        entry = self.get(name)
        if not isinstance(entry, str):
            raise self.error(name, f"{entry!r} is not a text")
        return entry

    def mapping(self, name: str) -> dict[str, object]:
        """Return an object; raise InputError if it is none."""
        entry = self.get(name)
        if not isinstance(entry, dict):
            raise self.error(name, "is not an object")
        return entry

    def inside(self, name: str) -> JsonFields:
        """Return the fields of an object in a field; raise InputError if it is none."""
        within = f"{self.within}.{name}" if self.within else name
        return JsonFields(self.mapping(name), self.file, within, self.hint, self.line)

    def error(self, name: str, what: str) -> InputError:
        """Return the error that something is wrong with a field."""
        field = f"field '{self.within}.{name}'" if self.within else f"field '{name}'"
        where = f"line {self.line}, {field}" if self.line else field
        return InputError(what, file=self.file, where=where, hint=self.hint)


def is_number(entry: object) -> TypeGuard[float]:
    """Return whether something is a finite number, which true and false are not."""
    return isinstance(entry, int | float) and not isinstance(entry, bool) and abs(entry) <= sys.float_info.max


def _is_integer(entry: object) -> TypeGuard[int]:
    return type(entry) is int and abs(entry) < 2**63
