"""Input files, local or at a URL, plain or compressed."""

from __future__ import annotations

import atexit
import bz2
import difflib
import functools
import gzip
import io
import lzma
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, cast

from .errors import InputError

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


def _open_zstd(stream: IO[bytes]) -> Any:
    import pyarrow as pa

    # pyarrow's stream has no line iteration; a buffered one does.
    return io.BufferedReader(pa.CompressedInputStream(stream, "zstd"))


_DECOMPRESSORS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}
"""Decompressors by the first bytes of a file."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, such as ``s3://bucket/prompts.jsonl``."""
    return _URL.match(os.fspath(path)) is not None


def local_file(path: str | os.PathLike[str]) -> Path:
    """Return a path's local file; download a URL once."""
    return _fetched(os.fspath(path)) if is_url(path) else Path(path)


@functools.cache
def _fetched(url: str) -> Path:
    hint = "Check the URL, the permissions and the network."
    try:
        import fsspec
    except ImportError:
        raise InputError("fsspec is needed to read URLs", file=url, hint="Install it with pip.") from None
    target = _folder() / f"{len(os.listdir(_folder()))}{''.join(Path(url).suffixes[-2:])}"
    try:
        with fsspec.open(url, "rb") as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except ImportError as error:
        raise InputError(str(error), file=url, hint="Install the package for this kind of URL.") from None
    except FileNotFoundError:
        raise InputError("no such file", file=url, hint=hint) from None
    except Exception as error:  # each kind of URL has its own errors
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(f"cannot be fetched ({why})", file=url, hint=hint) from None
    return target


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="batchbound-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def refuse_streams(path: str | os.PathLike[str]) -> None:
    """Raise InputError for a path that can be read only once.

    Files are opened several times, and the second reader of a pipe would wait for ever.
    """
    name, hint = os.fspath(path), "Write it to a file and name that file: it is read more than once."
    if not name:
        raise InputError("the name is empty", file=path, hint="Check the path.")
    try:
        mode = os.stat(path).st_mode
    except OSError:
        if name == "-":
            raise InputError("standard input is not read", file=path, hint=hint) from None
        return  # the reader's error explains it
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError("is a pipe or a device, no file", file=path, hint=hint)


MOST_HELD = 2**28
"""Most bytes of a file that is held; a larger one is opened by each reader."""

_HELD: ContextVar[dict[tuple[int, ...], bytes] | None] = ContextVar("held", default=None)


@contextmanager
def opened_once() -> Iterator[Callable[[], None]]:
    """Open each input file once: hold its bytes for all readers within.

    Yields a function that lets go of them. A file that changes is opened again.
    """
    held: dict[tuple[int, ...], bytes] = {}
    before = _HELD.set(held)
    try:
        yield held.clear
    finally:
        _HELD.reset(before)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader | io.BytesIO]:
    """Open a file to read its bytes as they are."""
    local, held = local_file(path), _HELD.get()
    state = os.stat(local)
    if held is None or state.st_size > MOST_HELD:
        with open(local, "rb") as stream:
            yield stream
        return
    key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
    if key not in held:
        with open(local, "rb") as stream:
            held[key] = stream.read()
    yield io.BytesIO(held[key])


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file to read its decompressed bytes."""
    refuse_streams(path)
    try:
        with opened(path) as raw:
            head = raw.read(8)
            raw.seek(0)
            unpack = next(
                (opener for magic, opener in _DECOMPRESSORS.items() if head.startswith(magic)), None
            )
            if unpack is None:
                yield raw
                return
            with unpack(raw) as stream:
                yield cast("IO[bytes]", stream)
    except FileNotFoundError:
        raise missing_file(path) from None
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        hint = "Compress it again."
        raise InputError(f"damaged compressed file ({error})", file=path, hint=hint) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(f"cannot be read ({why})", file=path, hint="Check the path.") from None


def missing_file(path: str | os.PathLike[str]) -> InputError:
    """Return the error of a missing file, with a file of nearly this name beside it."""
    wanted = Path(path)
    try:
        names = [entry.name for entry in wanted.parent.iterdir() if entry.is_file()]
    except OSError:
        names = []
    near = difflib.get_close_matches(wanted.name, names, n=1, cutoff=0.8)
    hint = f"Did you mean {wanted.parent / near[0]}?" if near else "Check the path."
    if wanted.name.endswith("trace.jsonl"):
        output = wanted.name.removesuffix("trace.jsonl") or "answers."
        running = (name for name in names if name.startswith(output) and name.endswith(".journal"))
        if (journal := next(running, None)) is not None:
            hint = f"A run writes its trace when it ends; that of {journal} continues with the same command."
        elif not near:
            hint = "A run writes its trace when it ends. Check the path."
    return InputError("no such file", file=path, hint=hint)


def first_bytes(path: str | os.PathLike[str], count: int) -> bytes:
    """Return the first decompressed bytes; none if it cannot be read."""
    try:
        with reading(path) as stream:
            return stream.read(count)
    except InputError:
        return b""
