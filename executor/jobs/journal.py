"""Journal of finished completions."""

from __future__ import annotations

import array
import fcntl
import itertools
import json
import logging
import math
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from ...data.files.disk import InputError, unwritable
from ...data.prompts.names import Names

JOURNAL_VERSION = 2

_RESTORED = 1024
"""Completions to write at once when a journal is restored."""

_LOG = logging.getLogger(__name__)


def finished_in(path: str | os.PathLike[str]) -> int:
    """Return how many completions an earlier run left in a journal."""
    try:
        with open(path, "rb") as lines:
            next(lines, None)  # what identifies the run
            return sum("id" in (_checked(line.rstrip(b"\n")) or {}) for line in lines)
    except FileNotFoundError:
        return 0


class Journal:
    """File of finished completions, which survives a kill at any moment.

    Its first line identifies the run. Each further line is JSON with a checksum; a damaged line is dropped,
    and its completion is generated again. As a context manager, the journal deletes a file without
    completions.

    path: File to create, or to continue.
    run: Everything that the completions depend on, as JSON values; another run's journal is refused.
    sync_seconds: Seconds between syncs; larger is faster and loses more at a power failure.
    finished: Completions by request.
    dropped: Numbers of damaged lines, from one; their completions are not in ``finished``.
    ending: True if the run may replace its outputs: it had begun to write them, or continues them.
    """

    def __init__(
        self, path: str | os.PathLike[str], run: Mapping[str, object], sync_seconds: float = 1.0
    ) -> None:
        self.path, self._sync_seconds = Path(path), sync_seconds
        self._run = {"batchbound_journal": JOURNAL_VERSION, **run}
        self.finished = Finished(self.path)
        self.dropped: tuple[int, ...] = ()
        self.ending = False
        self._synced = time.monotonic()
        try:
            # Unbuffered, so that `append` hands each line to the system before it returns.
            self._stream = open(self.path, "ab+", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._claim()
            self._recover()
        except BaseException:
            self.close()
            raise

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        run: Mapping[str, object],
        entries: Iterable[tuple[str, Mapping[str, object]]],
    ) -> None:
        """Write the journal of a finished run again, to continue the run.

        It appears whole or not at all. ``entries`` are the names and completions to keep.
        """
        begun = Path(f"{os.fspath(path)}.begun")
        begun.unlink(missing_ok=True)
        journal = cls(begun, run, math.inf)
        try:
            journal.end()
            waiting = iter(entries)
            while batch := list(itertools.islice(waiting, _RESTORED)):
                journal.append_all(batch)
            journal._sync()
            begun.replace(path)
        finally:
            journal._stream.close()
            begun.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.finished:
            self.close()
        else:
            self.remove()

    def append(self, name: str, answer: Mapping[str, object]) -> None:
        """Write one finished completion."""
        self.append_all([(name, answer)])

    def append_all(self, entries: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        """Write finished completions with their names, at once."""
        lines = [_line(msgspec.json.encode({"id": name, "answer": answer})) for name, answer in entries]
        ends = list(itertools.accumulate(map(len, lines), initial=self._stream.seek(0, os.SEEK_END)))
        try:
            self._write(b"".join(lines))
        finally:
            # After an interrupt, exactly the completions on disk count as finished.
            whole = self._stream.seek(0, os.SEEK_END)
            for (name, _), begin, end in zip(entries, ends, ends[1:], strict=False):
                if end <= whole:
                    self.finished.note(name, begin)
        if time.monotonic() - self._synced >= self._sync_seconds:
            self._sync()

    def end(self) -> None:
        """Record that all requests are completed.

        A resumed run may then rewrite its outputs.
        """
        if not self.ending:
            self._write(_line(b'{"ending": true}'))
            self.ending = True
        self._sync()

    def close(self) -> None:
        """Sync and close the file."""
        if not self._stream.closed:
            self._sync()
        self._stream.close()

    def remove(self) -> None:
        """Close and delete the file."""
        self._stream.close()
        self.path.unlink(missing_ok=True)

    def _claim(self) -> None:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "Wait for it, or choose another output."
            raise InputError("is written by another run", file=self.path, hint=hint) from None
        except OSError as error:
            # Some network file systems have no locks; two runs into one file are rare.
            _LOG.warning("%s cannot be locked (%s)", self.path, error.strerror)

    def _recover(self) -> None:
        with open(self.path, "rb") as lines:
            first = lines.readline()
            begun = first[: len(_BEGINNING)]
            is_whole = first.endswith(b"\n")
            if not _BEGINNING.startswith(begun.rstrip(b"\n")) or (is_whole and begun != _BEGINNING):
                hint = "Move it away, or choose another output."
                raise InputError("is not a journal, so it is left unchanged", file=self.path, hint=hint)
            if not is_whole:
                self._start()
                return
            header, whole = self._header(first[:-1]), len(first)
            has_more = os.fstat(lines.fileno()).st_size > whole
            if header != self._run:
                self._begin_again(header, lines.readline() if has_more else b"")
                return
            for number, line in enumerate(lines, 2):
                if not line.endswith(b"\n"):
                    break
                self._take(number, line[:-1], whole)
                whole += len(line)
        self._stream.truncate(whole)

    def _begin_again(self, header: Mapping[str, object], second: bytes) -> None:
        """Start over if the journal is empty; else refuse another run's journal."""
        if not second.endswith(b"\n"):
            self._start()
            return
        changed = sorted(
            key for key in self._run.keys() | header.keys() if self._run.get(key) != header.get(key)
        )
        hint = "Use that run's options, delete the file, or choose another output."
        raise InputError(
            f"belongs to another run (differs in: {', '.join(changed)})", file=self.path, hint=hint
        )

    def _take(self, number: int, line: bytes, offset: int) -> None:
        entry = _checked(line) or {}
        name, answer = entry.get("id"), entry.get("answer")
        if isinstance(name, str) and isinstance(answer, dict):
            self.finished.note(name, offset)
        elif "ending" in entry:
            self.ending = True
        else:
            self.dropped += (number,)

    def _start(self) -> None:
        self._stream.truncate(0)
        self._write(_line(json.dumps(self._run, ensure_ascii=False).encode()))
        self._sync()
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        except OSError as error:
            _LOG.warning("%s cannot be synced (%s)", self.path.parent, error.strerror)
        finally:
            os.close(folder)

    def _header(self, line: bytes) -> dict[str, object]:
        header = _checked(line)
        if header is not None:
            return header
        if line.startswith(_BEGINNING + b"1,"):
            what, hint = "was written by an earlier version", "Finish it with that version, or delete it."
        else:
            what = "is damaged in the line that identifies its run"
            hint = "Delete it to start over, or choose another output."
        raise InputError(what, file=self.path, where="line 1", hint=hint)

    def _sync(self) -> None:
        try:
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        self._synced = time.monotonic()

    def _write(self, lines: bytes) -> None:
        whole, rest = self._stream.seek(0, os.SEEK_END), memoryview(lines)
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError as error:
            self._stream.truncate(whole)
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> InputError:
        hint = "Check the folder, the permissions and the free space; finished completions are kept."
        return unwritable(self.path, error, hint)


class Finished(Mapping[str, dict[str, object]]):
    """Completions of a journal by request, read from disk."""

    def __init__(self, path: Path) -> None:
        self._path, self._names, self._offsets = path, Names(), array.array("q")

    def note(self, name: str, offset: int) -> None:
        """Note the offset of a completion's line."""
        place = self._names.add(name)
        # The later line of a name replaces the earlier one.
        self._offsets[place : place + 1] = array.array("q", [offset])

    def __getitem__(self, name: str) -> dict[str, object]:
        return next(self.lines([name]))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def lines(self, names: Iterable[str]) -> Iterator[dict[str, object]]:
        """Yield the completions of some requests."""
        with open(self._path, "rb") as lines:
            for name in names:
                place = self._names.find(name)
                if place is None:
                    raise KeyError(name)
                yield self._read(lines, self._offsets[place])

    def latest(self, count: int) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield pairs of request and completion, the newest first."""
        for name in itertools.islice(reversed(self._names), count):
            yield name, self[name]

    def _read(self, lines: BinaryIO, offset: int) -> dict[str, object]:
        lines.seek(offset)
        answer = (_checked(lines.readline().rstrip(b"\n")) or {}).get("answer")
        if not isinstance(answer, dict):
            raise InputError(
                "was changed during the run", file=self._path, hint="Run the same command again."
            )
        return answer


_BEGINNING = b'{"batchbound_journal": '
_CHECKSUM = b', "crc32": '


def _line(body: bytes) -> bytes:
    """Return the line of a JSON object, with its checksum."""
    return body[:-1] + _CHECKSUM + b"%d}\n" % zlib.crc32(body)


def _checked(line: bytes) -> dict[str, object] | None:
    """Return a line's object; None for a wrong checksum."""
    body, separator, checksum = line.rpartition(_CHECKSUM)
    if not separator or checksum != b"%d}" % zlib.crc32(body + b"}"):
        return None
    try:
        value = msgspec.json.decode(body + b"}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def journal_path(output: str | os.PathLike[str]) -> Path:
    """Return the path of an output's journal."""
    return Path(f"{os.fspath(output)}.journal")
