"""Parameters as data: tables of a TOML file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from .disk import InputError, read_toml
from .record import record, refuse_unknown

TABLES = ("search", "bounds", "run")
"""Tables of a file of parameters."""

_HINT = "Correct it, or leave it out for the default."

_Kind = TypeVar("_Kind")


def read_params(
    kind: type[_Kind], path: str | os.PathLike[str], table: str, *, apart: Sequence[str] = ()
) -> _Kind:
    """Return the parameters in a table of a TOML file.

    Parameters that are left out keep their defaults. Raises InputError if the file cannot be read, or holds
    an unknown or impossible parameter.

    apart: Fields that have a table of their own.
    """
    document = read_toml(path)
    if unknown := sorted(set(document) - set(TABLES)):
        other_tables = ", ".join(name for name in TABLES if name != table)
        raise InputError(f"has {unknown[0]!r}", file=path, hint=f"Its tables are {table}, {other_tables}.")
    values = document.get(table, {})
    _refuse_unknown(kind, values, path, table, apart)
    return record(kind, values, file=path, within=table, hint=_HINT)


def _refuse_unknown(
    kind: Any, values: object, path: str | os.PathLike[str], within: str, apart: Sequence[str] = ()
) -> None:
    if not isinstance(values, dict):
        return
    known = [parameter.name for parameter in fields(kind) if parameter.name not in apart]
    hint = f"Choose from {', '.join(known)}."
    for name in apart:
        if name in values:
            where = f"field '{within}.{name}'"
            raise InputError("the field is unknown", file=path, where=where, hint=_HINT)
    refuse_unknown(kind, values, file=path, within=within, hint=hint)
    for name, nested in get_type_hints(kind).items():
        if is_dataclass(nested) and name in values:
            _refuse_unknown(nested, values[name], path, f"{within}.{name}")
