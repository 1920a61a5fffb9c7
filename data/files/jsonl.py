"""JSON lines files, and digests of files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator

import msgspec

from .disk import InputError, text_lines
from .sources import opened, refuse_streams

_TO_LINES = {"[": "`jq -c '.[]'` makes them of an array.", "{": "`jq -c .` makes them."}
"""Commands that make lines of JSON, by its first character."""


def json_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield each line's number, from one, and its object.

    Blank lines are skipped.
    """
    empty = True
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        empty = False
        where = f"line {number}"
        try:
            value = _parsed(line)
            if "\\ud" in line or "\\uD" in line:
                json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            message, hint = "half of a Unicode surrogate pair", "Write both halves, or the character itself."
            raise InputError(message, file=path, where=where, hint=hint) from None
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be parsed"
            column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            shown = line if len(line) <= 40 else f"{line[:20]} ... {line[-20:]}"
            hint = "Write one complete JSON object per line; is the file cut off?"
            if line.strip() in ("[", "{"):
                hint = "Write one complete JSON object per line: " + _TO_LINES[line.strip()]
            raise InputError(
                f"not valid JSON ({why}): {shown!r}", file=path, where=where + column, hint=hint
            ) from None
        if not isinstance(value, dict):
            message = f"a JSON {_kind(value)}, not an object"
            hint = "Write one JSON object per line" + (f": {_TO_LINES['[']}" if line[0] == "[" else ".")
            raise InputError(message, file=path, where=where, hint=hint)
        yield number, value
    if empty:
        raise InputError("the file is empty", file=path, hint="Give a file with a request per line.")


def _parsed(line: str) -> object:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return json.loads(line)


def json_array(text: str, path: str | os.PathLike[str]) -> list[dict[str, object]] | None:
    """Return the objects of a JSON array; None for other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return None
    wrong = next((k for k, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
    if wrong is not None:
        message = f"a JSON {_kind(rows[wrong - 1])}, not an object"
        raise InputError(message, file=path, where=f"row {wrong}", hint="Give an array of objects.")
    return list(rows)


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    refuse_streams(path)
    try:
        with opened(path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path, hint="Check the path.") from None


def _kind(value: object) -> str:
    kinds = {list: "array", str: "string", type(None): "null", bool: "boolean"}
    return kinds.get(type(value), "number")
