"""Every bit of a journal flipped, every length it can be cut to."""

from __future__ import annotations

import random
from pathlib import Path

from batchbound.data.files.disk import InputError
from batchbound.executor.jobs.journal import Journal

from .tally import Tally

RUN = {"plan": "0" * 64, "model": "tiny", "weights": "f" * 32}


def write_journal(path: Path, records: int, rng: random.Random) -> dict[str, dict[str, object]]:
    """Write a journal and return its answers."""
    journal = Journal(path, RUN)
    for number in range(records):
        name = f"request-{number}"
        text = "".join(rng.choice('abcdefgh \n"\\{}é') for _ in range(rng.randint(0, 60)))
        usage = {"prompt_tokens": rng.randint(1, 99), "completion_tokens": len(text)}
        journal.append(name, {"custom_id": name, "response": {"text": text, "usage": usage}, "error": None})
    answers = dict(journal.finished)
    journal.close()
    return answers


def flip_bits(scratch: Path, records: int, rng: random.Random, tally: Tally) -> Tally:
    """
    Flip every bit of a journal, and open it.

    A flip is judged by what the journal as a whole recovers. One opening judges a bit of every second record
    at once: each flip may cost its own record, and the next if a line break was hit, and no other.
    """
    path = scratch / "journal"
    answers = write_journal(path, records, rng)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    starts = [sum(map(len, lines[:k])) for k in range(len(lines))]
    names = list(answers)
    most = 8 * max(map(len, lines))
    for number in tally.numbers(3 * most):
        # The first line, then every other record from the first on, then from the second on.
        part, bit = divmod(number, most)
        if part == 0:
            if bit < 8 * len(lines[0]):
                _flip_header(path, whole, bit, tally)
            continue
        hit = [k for k in range(part, len(lines), 2) if bit < 8 * len(lines[k])]
        if not hit:
            continue
        damaged = bytearray(whole)
        for k in hit:
            damaged[starts[k] + bit // 8] ^= 1 << bit % 8
        _rewrite(path, damaged)
        lost = {k for k in hit} | {k + 1 for k in hit if bit // 8 == len(lines[k]) - 1}
        expected = {name: answers[name] for k, name in enumerate(names, 1) if k not in lost}
        journal = _opened(path)
        tally.check(journal.finished == expected, f"bit {bit} of records {part}, {part + 2}, ...")
        tally.check(bool(journal.dropped) or hit == [len(lines) - 1], f"bit {bit}: not named")
        tally.count("dropped", len(hit))
    return tally


def _flip_header(path: Path, whole: bytes, bit: int, tally: Tally) -> None:
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    _rewrite(path, damaged)
    try:
        Journal(path, RUN).close()
        tally.violate(f"bit {bit} of the header is taken")
    except InputError:
        tally.count("refused (first line)")
    tally.check(path.read_bytes() == damaged, f"bit {bit} of the header: the file was changed")


def cut(scratch: Path, records: int, rng: random.Random, tally: Tally) -> Tally:
    """Cut a journal to each of its lengths."""
    path = scratch / "journal"
    answers = write_journal(path, records, rng)
    whole = path.read_bytes()
    names = list(answers)
    for length in tally.numbers(len(whole) + 1):
        _rewrite(path, whole[:length])
        kept = max(0, whole.count(b"\n", 0, length) - 1)
        journal = _opened(path)
        tally.check(journal.finished == {name: answers[name] for name in names[:kept]}, f"cut at {length}")
        tally.count("whole records kept")
    return tally


def _rewrite(path: Path, content: bytes | bytearray) -> None:
    # Some file systems write a file that was cut to nothing to the disk at once; a new one may wait.
    path.unlink()
    path.write_bytes(content)


def _opened(path: Path) -> Journal:
    """Return a journal, opened and closed again."""
    journal = Journal(path, RUN)
    journal.close()
    return journal
