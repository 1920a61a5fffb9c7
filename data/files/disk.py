"""Read files with precise errors, and write files atomically."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import msgspec

from .errors import InputError as InputError
from .errors import WriteError as WriteError
from .errors import shown as shown
from .sources import first_bytes, reading
from .sources import refuse_streams as refuse_streams

_BLOCK = 2**20
"""Characters read from a file at a time."""

_REWRITE = "Write it as Parquet, to a name that ends in .parquet."
_NO_TEXT = {
    b"PK\x03\x04": ("is compressed (zip)", "Decompress it first; save a spreadsheet as CSV."),
    b"ARROW1": ("is an Arrow file", _REWRITE),
    b"FEA1": ("is a Feather file", _REWRITE),
    b"\xff\xff\xff\xff": ("is an Arrow stream", _REWRITE),
}
"""Messages and hints for binary files, by their first bytes."""


def unwritable(path: str | os.PathLike[str], error: OSError, hint: str) -> InputError:
    """Return the error for a file that cannot be written."""
    kind = WriteError if error.errno in WriteError.FULL else InputError
    return kind(f"cannot be written ({error.strerror})", file=path, hint=hint)


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a decompressed UTF-8 text; raise InputError if it is none."""
    head = first_bytes(path, 8)
    for magic, (what, hint) in _NO_TEXT.items():
        if head.startswith(magic):
            raise InputError(what, file=path, hint=hint)
    try:
        with reading(path) as stream, TextIOWrapper(stream, encoding="utf-8-sig") as lines:
            text = lines.read()
    except UnicodeDecodeError as error:
        raise InputError(
            f"not UTF-8 text (byte {error.start})", file=path, hint="Save the file as UTF-8."
        ) from None
    if "\0" in text:
        where = f"line {text.count(chr(10), 0, text.index(chr(0))) + 1}"
        raise InputError("not text (a zero byte)", file=path, where=where, hint="Write it again as text.")
    return text


def text_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lines of a text file without line breaks."""
    head = first_bytes(path, 8)
    for magic, (what, hint) in _NO_TEXT.items():
        if head.startswith(magic):
            raise InputError(what, file=path, hint=hint)
    passed, rest = 1, ""
    try:
        with reading(path) as stream, TextIOWrapper(stream, encoding="utf-8-sig") as blocks:
            while block := blocks.read(_BLOCK):
                if "\0" in block:
                    where = f"line {passed + block.count(chr(10), 0, block.index(chr(0)))}"
                    hint = "Write it again as text."
                    raise InputError("not text (a zero byte)", file=path, where=where, hint=hint)
                *whole, rest = (rest + block).split("\n")
                passed += len(whole)
                yield from whole
        yield rest
    except UnicodeDecodeError:
        read_text(path)  # its error names the byte
        raise


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tables of a TOML file; raise InputError if it is none."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"is not a TOML file: {error}", file=path, hint="Correct it.") from None


def read_json_object(path: str | os.PathLike[str]) -> dict[str, object]:
    """Return the single JSON object in a file."""
    value = parsed_json(read_text(path), path)
    if not isinstance(value, dict):
        raise InputError("not a JSON object", file=path, hint="Write it again.")
    return value


def parsed_json(
    text: str, path: str | os.PathLike[str], *, line: int = 0, hint: str = "Write it again."
) -> object:
    """Parse JSON with finite numbers and integers of 64 bits."""
    where = f"line {line}" if line else ""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        what, why = _why_not_json(text)
        raise InputError(what, file=path, where=where or why, hint=hint) from None
    if _LONG.search(text) and (number := _beyond_64_bits(value)) is not None:
        what = f"the number {str(number)[:20]}... has more than 64 bits"
        raise InputError(what, file=path, where=where, hint="Correct the number.")
    return value


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], *, binary: bool = False) -> Iterator[IO[str]]:
    """Yield a stream that replaces ``path`` once it is complete.

    It follows a link, and removes unfinished files of killed processes.
    """
    # Otherwise the file would replace a link to a larger disk.
    target, temporary = Path(os.path.realpath(path)), ""
    try:
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        with contextlib.suppress(OSError):  # a folder may be writable but not readable
            _discard_dead(target)
        handle, temporary = _locked_beside(target)
        with os.fdopen(handle, "wb" if binary else "w", encoding=None if binary else "utf-8") as stream:
            os.chmod(handle, 0o666 & ~_umask())
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            # Renamed before closing, which unlocks the file.
            os.replace(temporary, target)
    except OSError as error:
        _discard(temporary)
        raise unwritable(path, error, "Check the folder, the permissions and the free space.") from error
    except BaseException:
        _discard(temporary)
        raise


def _locked_beside(target: Path) -> tuple[int, str]:
    while True:
        handle, name = tempfile.mkstemp(_PARTIAL, f".{target.name}.", target.parent)
        with contextlib.suppress(OSError):  # without locks no other process removes the file
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, name
        # Another process removed it as unfinished before it was locked.
        os.close(handle)


def _discard_dead(target: Path) -> None:
    pattern = re.compile(re.escape(f".{target.name}.") + r"[a-z0-9_]{8}" + re.escape(_PARTIAL))
    for name in filter(pattern.fullmatch, os.listdir(target.parent)):
        with contextlib.suppress(OSError):
            handle = os.open(target.parent / name, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(target.parent / name)
            finally:
                os.close(handle)


def write_json(path: str | os.PathLike[str], value: object, *, indent: int | None = None) -> None:
    """Write ``value`` as JSON to ``path`` atomically."""
    # Writing a large plan in pieces takes ten times as long as in one text.
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    with atomic_write(path) as stream:
        stream.write(text)
        stream.write("\n")


def _why_not_json(text: str) -> tuple[str, str]:
    """Return the mistake in a JSON text, and its line."""
    if not text.strip():
        return "the file is empty", ""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"not valid JSON ({error.msg})", f"line {error.lineno}"
    except (ValueError, RecursionError):
        return "not JSON that can be parsed", ""
    return "not valid JSON (a number that is not finite, or half of a Unicode surrogate pair)", ""


_PARTIAL = ".partial"

_LONG = re.compile(r"\d{19}")


def _beyond_64_bits(value: object) -> int | None:
    """Return an integer that no array can hold, or None."""
    if isinstance(value, int):
        return value if abs(value) >= 2**63 else None
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((beyond for entry in entries if (beyond := _beyond_64_bits(entry)) is not None), None)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _discard(path: str) -> None:
    if path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
