"""Damaged files of every kind, read by the command that reads them; what it does is judged."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from batchbound.cli import main

from .children import ended, spawn
from .corpus import Kind, make_corpus
from .mutators import mutated
from .tally import Book, Tally

LIMIT = 20
"""CPU seconds after which reading a file of some kilobytes counts as a hang."""

MEMORY = 6 << 30
"""Bytes of address space beyond what the process has."""

CHUNK = 50
"""Inputs of one child."""

SOUND = 0
"""The number of the input that is left as it is: it must be taken."""

SAID = {0: "taken", 1: "taken, the work failed", 2: "refused"}


class Hang(BaseException):
    """Ends a command that computes for too long."""


def damage_files(scratch: Path, inputs: int, seed: int, book: Book, kept: Path | None = None) -> None:
    """Damage files of every kind, as many as asked for in all, and have them read."""
    kinds = _made(scratch / "sound")
    whole, given = sum(kind.weight for kind in kinds), 0
    for number, kind in enumerate(kinds):
        expected = "read or refused in one line with status 2; no traceback, hang or file changed"
        tally = book.open(f"damaged: {kind.name}", expected)
        last = number == len(kinds) - 1
        share = inputs - given if last else inputs * kind.weight // whole
        given += share
        for first in tally.numbers(share, CHUNK):
            _chunk(kind, scratch, range(first, min(share, first + CHUNK)), seed, tally)
        if kept is not None:
            _keep(tally, kind, scratch / "sound", seed, kept)


def _made(folder: Path) -> list[Kind]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return make_corpus(folder)


def content_of(kind: Kind, sound: Path, seed: int, number: int) -> bytes:
    """Return the damaged content that a kind's n-th input has: the same for the same seed."""
    if number == SOUND:
        return (sound / kind.file).read_bytes()
    rng = random.Random(f"{seed} {kind.name} {number}")
    return mutated((sound / kind.file).read_bytes(), kind.form, rng)


def _chunk(kind: Kind, scratch: Path, numbers: range, seed: int, tally: Tally) -> None:
    """Have some inputs read in a child; one that dies or stands still costs only the input it was at."""
    todo = list(numbers)
    while todo:
        results, output = scratch / "results", scratch / "said"
        results.write_text("")
        pid = spawn(partial(_read_all, kind, scratch, todo, seed, results), scratch, output)
        done = ended(pid, output, LIMIT * 10 + 4 * len(todo), poll=0.02)
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        for row in rows:
            tally.count(row["ended"])
            for what in row["wrong"]:
                tally.violate(f"input {row['number']}: {what}")
        todo = todo[len(rows) :]
        if done.status != 0 and todo:
            why = "stood still" if done.hung else f"died with {done.status}: {done.said[-300:]}"
            tally.violate(f"input {todo[0]}: {why}")
            tally.count("died")
            todo = todo[1:]


def _read_all(kind: Kind, scratch: Path, numbers: list[int], seed: int, results: Path) -> int:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.signal(signal.SIGPROF, _hang)
    with results.open("a") as stream:
        for number in numbers:
            row = _read(kind, scratch, seed, number)
            stream.write(json.dumps({"number": number, **row}) + "\n")
            stream.flush()
    return 0


def _hang(*_: object) -> None:
    raise Hang


def _read(kind: Kind, scratch: Path, seed: int, number: int) -> dict[str, Any]:
    """Put one damaged file among the sound ones, run the command on it, and judge what it does."""
    folder = scratch / "damaged"
    if not folder.exists():
        shutil.copytree(scratch / "sound", folder)
    (folder / kind.file).write_bytes(content_of(kind, scratch / "sound", seed, number))
    os.chdir(folder)
    before = _stamps(folder)
    status, said, out, wrong = _carried_out(list(kind.words))
    after = _stamps(folder)
    new = {str(path.relative_to(folder)) for path in after.keys() - before.keys()}
    changed = [str(path.relative_to(folder)) for path, stamp in before.items() if after.get(path) != stamp]
    if changed:
        wrong.append(f"changed {changed}")
    if new - set(kind.outputs) or (status == 2 and new):
        wrong.append(f"left {sorted(new)} with status {status}")
    wrong += _misspoken(status, said, out)
    if changed or new:
        shutil.rmtree(folder)
    else:
        shutil.copyfile(scratch / "sound" / kind.file, folder / kind.file)
    if status == 2 and number == SOUND:
        wrong.append(f"the sound file is refused: {said[-300:]}")
    return {"ended": SAID.get(status, "violated"), "wrong": wrong}


def _stamps(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return what changes with each write to a file, of all files below a folder."""
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (stat.st_mtime_ns, stat.st_size, stat.st_ino) for path, stat in found.items()}


def _carried_out(words: list[str]) -> tuple[int, str, str, list[str]]:
    out, err, wrong, status = io.StringIO(), io.StringIO(), [], -1
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    begun = time.process_time()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("always")
            status = main(words)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except Hang:
        wrong.append(f"hang: over {LIMIT} CPU s at {_place(traceback.format_exc())}")
    except BaseException as error:
        wrong.append(
            f"traceback: {type(error).__name__}: {str(error)[:150]} at {_place(traceback.format_exc())}"
        )
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if not wrong and time.process_time() - begun > LIMIT:
        wrong.append(f"took {time.process_time() - begun:.0f} CPU s")
    return status, err.getvalue(), out.getvalue(), wrong


def _misspoken(status: int, said: str, out: str) -> list[str]:
    """Return what is wrong with what a command says."""
    wrong = []
    if "Traceback" in said + out or "Warning" in said:
        wrong.append(f"says {said[-300:]!r}")
    if status not in (-1, *SAID):
        wrong.append(f"status {status}")
    lines = [line for line in said.strip().split("\n") if line.startswith("batchbound")]
    if status == 2 and not lines:
        wrong.append(f"no reason given: {said[-200:]!r}")
    if status == 2 and lines and len(lines[-1]) > 2000:
        wrong.append(f"a reason of {len(lines[-1])} characters")
    if status == 0 and re.search(r"(?<![\w-])(nan|inf|-inf|NaN|Infinity)(?![\w-])", out):
        found = next(
            line for line in out.splitlines() if re.search(r"(?<![\w-])-?(nan|inf|NaN|Infinity)", line)
        )
        wrong.append(f"prints {found.strip()[:120]!r} with status 0")
    return wrong


def _place(text: str) -> str:
    """Return the last place in batchbound that a traceback names."""
    places = re.findall(
        r'File "[^"]*?/((?:batchbound|data|models|heuristics|solvers|executor)/[^"]+)", line (\d+)', text
    )
    return ":".join(places[-1]) if places else text[-200:]


def _keep(tally: Tally, kind: Kind, sound: Path, seed: int, folder: Path) -> None:
    """Keep each input that was not handled, for a test."""
    folder.mkdir(parents=True, exist_ok=True)
    for what in tally.violations:
        number = re.match(r"input (\d+)", what)
        if number:
            name = re.sub(r"\W+", "-", kind.name)
            (folder / f"{name}-{number[1]}").write_bytes(content_of(kind, sound, seed, int(number[1])))
