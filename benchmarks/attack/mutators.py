"""Damage with a sense of the file's form: what stands is still almost what was expected."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 0.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**31 - 1, 2**53 + 1),
    *(2**63 - 1, 2**63, -(2**63), 10**12, 10**6, 10**40, 10**400, float("nan"), float("inf"), -float("inf")),
    *("", " ", "x", "0", "1e999", "-nan", "\0", "\ud800", "x" * 5000, "../../etc/passwd", "é\u2028", "null"),
    *([], {}, [[]], [None], {"": None}, [0] * 3000, ["a", 1], [1, 2, 3], {"a": {"b": []}}, "~", "tiny:gpt2"),
)
"""
Values that somebody may have put where another kind was meant.

"-nan" becomes "nan" where it is read as a number, and stays apart from it where it is kept as a name.
"""

DEEP = 100_000


def mutated(content: bytes, form: str, rng: random.Random) -> bytes:
    """Return a file's content, damaged in one place or a few."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change = bytes_changed if form == "binary" or rng.random() < 0.2 else FORMS[form]
        try:
            content = change(content, rng)
        except (ValueError, IndexError, RecursionError):
            # No longer of its form, or empty: by an earlier change.
            content = bytes_changed(content, rng)
    return content


def bytes_changed(content: bytes, rng: random.Random) -> bytes:
    """Return bytes with some flipped, cut, zeroed, inserted, doubled or moved."""
    data = bytearray(content)
    at = rng.randrange(len(data) + 1)
    size = min(len(data) - at, rng.choice((1, 2, 8, 64, 512)))
    kind = rng.randrange(8)
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at : at + size] = bytes(size)
    elif kind == 3:
        data[at:at] = rng.randbytes(rng.choice((1, 4, 32)))
    elif kind == 4:
        data[at:at] = data[at : at + size]
    elif kind == 5:
        del data[at : at + size]
    elif kind == 6:
        data[at:at] = rng.choice(
            (b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"\0", b"\n\n", b"\x1f\x8b", b"[" * 50)
        )
    else:
        data[at : at + size] = rng.randbytes(size)
    return bytes(data)


def json_changed(content: bytes, rng: random.Random) -> bytes:
    """Return a JSON text with one value, name or entry changed."""
    value = json.loads(content)
    if rng.random() < 0.02:
        return _nested(value, rng)
    return _dumped(value_changed(value, rng), rng)


def lines_changed(content: bytes, rng: random.Random) -> bytes:
    """Return JSON lines with one of them changed, left out, doubled or moved."""
    lines = content.decode().splitlines()
    at = rng.randrange(len(lines)) if rng.random() < 0.7 else 0
    kind = rng.randrange(12)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(rng.randrange(len(lines) + 1), lines[at])
    elif kind == 2:
        lines.insert(0, lines.pop(at))
    elif kind == 3:
        lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
    elif kind == 4:
        lines.insert(at, rng.choice(("", " ", "null", "[]", "1", "{}", '"x"', "[" * DEEP)))
    else:
        lines[at] = json_changed(lines[at].encode(), rng).decode(errors="surrogateescape")
    return "".join(line + "\n" for line in lines).encode(errors="surrogateescape")


def cells_changed(content: bytes, rng: random.Random) -> bytes:
    """Return comma-separated values with a cell, a row or a column changed."""
    rows = [line.split(",") for line in content.decode().splitlines()]
    row, kind = rng.randrange(len(rows)), rng.randrange(8)
    column = rng.randrange(max(1, len(rows[row])))
    if kind == 0:
        del rows[row]
    elif kind == 1:
        rows.insert(row, list(rows[row]))
    elif kind == 2:
        rows[row].insert(column, _word(rng))
    elif kind == 3:
        for each in rows:
            del each[column : column + 1]
    elif kind == 4 and len(rows[0]) > 1:
        rows[0][column % len(rows[0])] = rng.choice(rows[0])
    else:
        rows[row][column : column + 1] = [_word(rng)]
    return "".join(",".join(each) + "\n" for each in rows).encode(errors="surrogatepass")


def words_changed(content: bytes, rng: random.Random) -> bytes:
    """Return a text with a word or a line changed."""
    text = content.decode()
    if rng.random() < 0.3:
        lines = text.splitlines(keepends=True)
        at = rng.randrange(len(lines))
        if rng.random() < 0.5:
            lines.insert(rng.randrange(len(lines)), lines[at])
        else:
            del lines[at]
        return "".join(lines).encode()
    words = list(re.finditer(r"\S+", text))
    hit = rng.choice(words)
    return (text[: hit.start()] + _word(rng) + text[hit.end() :]).encode(errors="surrogatepass")


FORMS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "json": json_changed,
    "jsonl": lines_changed,
    "csv": cells_changed,
    "text": words_changed,
}


def value_changed(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one node of it changed."""
    whole = {"": copy.deepcopy(value)}
    places = list(_places(whole))
    parent, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice((key + "x", "", "unknown", key.upper()))] = parent.pop(key)
    elif kind == 2:
        other, theirs = rng.choice(places)
        parent[key] = copy.deepcopy(other[theirs])
    elif kind == 3 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] = rng.choice((-1, 10, 1000, 10**9, 0.5, 1e300)) * parent[key]
    elif kind == 4 and isinstance(parent[key], list):
        entries = parent[key]
        parent[key] = rng.choice((entries[:-1], entries + entries[:1], entries[::-1], entries * 2))
    elif kind == 5 and isinstance(parent, dict):
        parent["unknown"] = rng.choice(ODD)
    else:
        parent[key] = rng.choice(ODD)
    return whole.get("")


def _places(value: Any) -> Any:
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, entry in entries:
        yield value, key
        yield from _places(entry)


def _nested(value: Any, rng: random.Random) -> bytes:
    """Return a JSON text with a value nested far deeper than any parser's stack."""
    text = json.dumps(value_changed(value, rng))
    mark = '"unknown": '
    at = text.find("{")
    deep = "[" * DEEP + "]" * DEEP
    return (text[: at + 1] + mark + deep + ", " + text[at + 1 :] if at >= 0 else deep).encode()


def _dumped(value: Any, rng: random.Random) -> bytes:
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    return text.encode(errors="surrogatepass")


def _word(rng: random.Random) -> str:
    odd = rng.choice(ODD)
    return odd if isinstance(odd, str) else repr(odd)[:5000]
