"""Codec between dataclasses and JSON, with precise errors."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import types
from collections.abc import Mapping
from typing import Annotated, Any, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from .disk import InputError

Count = Annotated[int, msgspec.Meta(ge=0)]
"""An integer of at least zero, in a record."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
"""An integer of at least one, in a record."""

_Kind = TypeVar("_Kind")

_KINDS = {
    "int": "is not a whole number",
    "float": "is not a number",
    "str": "is not a text",
    "bool": "is neither true nor false",
    "array": "is not a list",
    "object": "is not an object",
}
"""Messages for a value of an unexpected type."""

_SHOWN = 60
"""Most characters of a wrong value in an error."""


def plain(value: object) -> Any:
    """Return a record as plain JSON values."""
    values = msgspec.to_builtins(value, enc_hook=_to_plain, str_keys=True)
    header: tuple[str, int] | None = getattr(type(value), "JSON_HEADER", None)
    names: Mapping[str, str] = getattr(type(value), "JSON_NAMES", {})
    if names:
        values = {names.get(name, name): entry for name, entry in values.items()}
    return values if header is None else {header[0]: header[1], **values}


def record(
    kind: type[_Kind],
    value: object,
    *,
    file: str | os.PathLike[str] | None = None,
    within: str = "",
    line: int = 0,
    hint: str = "",
) -> _Kind:
    """Return the record of some JSON values; ignore unknown fields."""
    hint = hint or getattr(kind, "JSON_HINT", "Write it again.")
    _check_header(kind, value, file, hint)
    names: Mapping[str, str] = getattr(kind, "JSON_NAMES", {})
    fields_given = value
    if names and isinstance(value, dict):
        ours = {theirs: name for name, theirs in names.items()}
        fields_given = {ours.get(name, name): entry for name, entry in value.items()}
    try:
        return msgspec.convert(fields_given, kind, dec_hook=_from_plain, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        steps, what = _explained(kind, fields_given, message, re.findall(r"\w+|\[\.\.\.\]", path.rstrip("`")))
    except RecursionError:
        steps, what = [], "is nested too deep"
    if steps:
        steps[0] = names.get(steps[0], steps[0])
    places = [f"line {line}"] if line else []
    if field := ".".join(([within] if within else []) + steps):
        places.append(f"field '{field}'")
    raise InputError(what, file=file, where=", ".join(places), hint=hint)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def whole(value: object) -> int | None:
    """Return a whole number, also from 12.0, or None."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def refuse_unknown(
    kind: type, value: object, *, file: str | os.PathLike[str] | None, within: str = "", hint: str
) -> None:
    """Raise InputError if an object has an unknown field."""
    known = {entry.name for entry in dataclasses.fields(kind)}
    for name in sorted(value.keys() - known) if isinstance(value, dict) else ():
        field = f"{within}.{name}" if within else name
        raise InputError("the field is unknown", file=file, where=f"field '{field}'", hint=hint)


def schema(kind: type) -> dict[str, Any]:
    """Return the JSON schema of a kind of file."""
    (found,), parts = msgspec.json.schema_components([kind], schema_hook=_array_schema)
    body = parts.pop(found["$ref"].rpartition("/")[2])
    names: Mapping[str, str] = getattr(kind, "JSON_NAMES", {})
    properties = {names.get(name, name): entry for name, entry in body["properties"].items()}
    required = [names.get(name, name) for name in body.get("required", ())]
    text = (kind.__doc__ or "").strip().partition("\n")[0]
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": kind.__name__,
        "description": text,
        "type": "object",
        "properties": properties,
        "required": required,
        "$defs": parts,
    }
    header: tuple[str, int] | None = getattr(kind, "JSON_HEADER", None)
    if header is not None:
        whole["properties"] = {header[0]: {"const": header[1]}, **properties}
        whole["required"] = [header[0], *required]
    described: dict[str, Any] = _one_line(whole)
    return described


def _check_header(kind: type, value: object, file: str | os.PathLike[str] | None, hint: str) -> None:
    header: tuple[str, int] | None = getattr(kind, "JSON_HEADER", None)
    if header is None or not isinstance(value, dict):
        return
    name, version = header
    what, where = name.replace("_", " "), f"field '{name}'"
    if name not in value:
        raise InputError(f"not a {what}", file=file, where=where, hint=hint)
    older: tuple[int, ...] = getattr(kind, "JSON_OLDER", ())
    if type(value[name]) is not int or value[name] not in (version, *older):
        message = f"a {what} of version {value[name]!r}, not {version}"
        raise InputError(message, file=file, where=where, hint=hint)


def _to_plain(value: Any) -> object:
    numbers = isinstance(value, np.ndarray) and value.dtype.kind in "fi" and value.ndim == 1
    if numbers and len(value) > 1 and (value == value[0]).all():
        # One object for a column of defaults.
        return plain(value[:1]) * len(value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim == 1:
        return [None if entry == np.inf else entry for entry in value.tolist()]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        # Such as torch's version, which is a subclass of str.
        return "".join(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _from_plain(kind: Any, value: Any) -> object:
    if get_origin(kind) is not np.ndarray:
        return value
    entry = get_args(get_args(kind)[1])[0]
    if not isinstance(value, list):
        raise ValueError("is not a list")
    allowed, expected = _ENTRIES[entry]
    if not (_types(value) if entry is np.float64 else set(map(type, value))) <= allowed:
        raise ValueError(f"is not a list of {expected}")
    try:
        return np.array([np.inf if number is None else number for number in value], dtype=entry)
    except (OverflowError, ValueError):
        raise ValueError(f"is not a list of {expected}") from None


def _types(value: list[Any]) -> set[type]:
    kinds = set(map(type, value))
    if list in kinds:
        kinds = (kinds - {list}).union(*(_types(entry) for entry in value if isinstance(entry, list)))
    return kinds


_ENTRIES: dict[Any, tuple[set[type], str]] = {
    np.int64: ({int}, "whole numbers"),
    np.float64: ({int, float, type(None)}, "numbers"),
    np.object_: ({str}, "texts"),
}


def _array_schema(kind: Any) -> dict[str, Any]:
    return {"type": "array"} if kind is np.ndarray else {"description": "any JSON value"}


def _one_line(value: Any) -> Any:
    """Keep the first lines of docstrings as descriptions."""
    if isinstance(value, dict):
        return {
            name: entry.strip().partition("\n")[0]
            if name == "description" and isinstance(entry, str)
            else _one_line(entry)
            for name, entry in value.items()
        }
    return [_one_line(entry) for entry in value] if isinstance(value, list) else value


def _explained(kind: Any, value: Any, said: str, path: list[str]) -> tuple[list[str], str]:
    """Return place and message of msgspec's error."""
    steps: list[str] = []
    missing = re.fullmatch(r"Object missing required field `(.*)`", said)
    got = re.fullmatch(r"Expected `(.*)`, got `(.*)`", said)
    for step in path:
        if step == "[...]" and isinstance(value, dict) and got is not None:
            # msgspec does not name the entry of an object.
            step = next((name for name, entry in value.items() if _name_of(entry) == got[2]), step)
        steps.append(step)
        kind = _inside(kind, step)
        if isinstance(value, list) and step.isdecimal():
            value = value[int(step)]
        else:
            value = value.get(step) if isinstance(value, dict) else None
    shown = repr(value) if len(repr(value)) <= _SHOWN else repr(value)[:_SHOWN] + "..."
    if missing is not None:
        return [*steps, missing[1]], "the field is missing"
    if got is not None:
        expected = next((_KINDS[name] for name in got[1].split(" | ") if name in _KINDS), f"is not {got[1]}")
        plain_value = got[2] not in ("array", "object")
        return steps, f"{shown} {expected}" if plain_value else expected
    minimum = re.fullmatch(r"Expected `\w+` >= (.*)", said)
    if minimum is not None:
        return steps, f"{shown} is not at least {minimum[1]}"
    if said.startswith("Invalid enum value"):
        return steps, f"{shown} is none of {', '.join(map(str, get_args(_bare(kind))))}"
    if said == "Number out of range":
        return steps, f"{shown} is not a number that can be held"
    return steps, said


def _inside(kind: Any, step: str) -> Any:
    kind = _bare(kind)
    if dataclasses.is_dataclass(kind):
        return get_type_hints(kind, include_extras=True).get(step)
    inner = [part for part in get_args(kind) if part is not Ellipsis]
    return inner[-1] if inner else None


def _bare(kind: Any) -> Any:
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        kind = get_args(kind)[0]
    return kind


def _name_of(value: object) -> str:
    names = {int: "int", float: "float", str: "str", bool: "bool", list: "array", dict: "object"}
    return names.get(type(value), "null")
