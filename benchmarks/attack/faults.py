"""Faults of the model and of the disk while a job runs; the same command without them must finish it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .children import command, run
from .jobs import OURS, Work, answers_of, digests, journal_of
from .tally import Book, Tally

STALL = 2
"""Seconds without a stage after which a run is to end itself."""

LIMIT = 60.0
"""Seconds after which a run with a fault counts as hung."""

Fault = Callable[[Any], Any]
"""Takes the model's logits of one call, and gives others or fails."""


def _fails(error: Callable[[], Exception]) -> Fault:
    def fault(_: Any) -> Any:
        raise error()

    return fault


def _spoilt(value: float) -> Fault:
    def spoilt(logits: Any) -> Any:
        other = logits.clone()
        other[-1] = value
        return other

    return spoilt


def _hang(_: Any) -> Any:
    time.sleep(3600)


def _memory() -> Exception:
    import torch

    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")


FAULTS: dict[str, tuple[Fault, tuple[int, ...]]] = {
    "logits are NaN": (_spoilt(float("nan")), (1,)),
    "logits are infinite": (_spoilt(float("inf")), (1,)),
    "memory runs out once": (_fails(_memory), (0,)),
    "the allocator of the CPU fails": (
        _fails(lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes")),
        (0,),
    ),
    "the device fails": (
        _fails(lambda: RuntimeError("CUDA error: an illegal memory access was encountered")),
        (1,),
    ),
    "the model's code fails": (_fails(lambda: ValueError("shapes do not agree")), (1,)),
    "the device hangs": (_hang, (1,)),
}
"""Each with the exit statuses that a run hit by it may have."""


def _faulty(words: tuple[str, ...], fault: Fault, at: int, late: bool) -> Callable[[], int]:
    """Return the call of a command whose model fails at its n-th call, before or after it computed."""

    def call() -> int:
        from batchbound.executor.attention.decoder import Decoder

        forward, count = Decoder.forward, 0

        def failing(self: Any, *args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at and not late:
                return fault(None)
            logits = forward(self, *args, **options)
            return fault(logits) if count == at else logits

        Decoder.forward = failing  # type: ignore[method-assign]
        return command(words)()

    return call


def fail_models(work: Work, scratch: Path, trials: int, seed: int, book: Book) -> None:
    """Let the model fail at a random call, and go on with one that does not."""
    for name, (fault, statuses) in FAULTS.items():
        tally = book.open(
            f"a model: {name}", "one line says why; the same command finishes; every answer as without it"
        )
        for trial in tally.numbers(max(1, trials // len(FAULTS))):
            rng = random.Random(f"{seed} faults {name} {trial}")
            folder = work.copy(scratch / "failing")
            before = digests(folder)
            spoils = fault.__name__ == "spoilt"
            at, late = rng.randint(1, 60), spoils or rng.random() < 0.5
            words = (*work.run, "--stall-seconds", str(STALL)) if fault is _hang else work.run
            one = run(_faulty(words, fault, at, late), folder, scratch / "said", LIMIT)
            where = f"call {at}, late {late}"
            tally.count(f"status {one.status}")
            tally.check(one.status in (0, *statuses), f"{where}: {one}")
            tally.check("Traceback" not in one.said and not one.hung, f"{where}: {one}")
            tally.check(digests(folder) == before, f"{where}: files changed")
            _finish(work, folder, scratch, tally, where, may_fail=spoils)


def _finish(
    work: Work, folder: Path, scratch: Path, tally: Tally, where: str, *, may_fail: bool = False
) -> None:
    """Run the command again without the fault; each request has its answer, or the error it was given."""
    kept = journal_of(folder / OURS[2])
    last = run(command(work.run), folder, scratch / "said", LIMIT)
    if not tally.check(last.status in ((0, 1) if may_fail else (0,)), f"{where}, again: {last}"):
        return
    found = answers_of(folder / OURS[0])
    failed = {name for name, line in found.items() if line["error"] is not None}
    tally.check(list(found) == list(work.answers), f"{where}: not every request has its line")
    tally.check(may_fail or not failed, f"{where}: errors of {failed}")
    tally.check(len(failed) <= 4, f"{where}: {len(failed)} requests failed of one fault")
    tally.check(
        all(found[name] == line for name, line in work.answers.items() if name not in failed),
        f"{where}: answers differ",
    )
    tally.check(
        all(found[name] == line for name, line in kept.items()), f"{where}: finished answers were changed"
    )


def fill_disks(work: Work, scratch: Path, trials: int, seed: int, tally: Tally) -> Tally:
    """Let no file grow beyond a random size, and go on with room."""
    whole = sum(len(str(line)) for line in work.answers.values()) * 2
    for trial in tally.numbers(trials):
        rng = random.Random(f"{seed} disks {trial}")
        folder = work.copy(scratch / "full")
        before, room = digests(folder), rng.randint(1, whole)
        one = run(command(work.run), folder, scratch / "unlimited", LIMIT, file_bytes=room)
        tally.count(f"status {one.status}")
        where = f"{room} bytes"
        tally.check(one.status in (0, 1) and not one.hung and "Traceback" not in one.said, f"{where}: {one}")
        tally.check(digests(folder) == before, f"{where}: files changed")
        tally.check(
            journal_of(folder / OURS[2]).items() <= work.answers.items(), f"{where}: the journal differs"
        )
        _finish(work, folder, scratch, tally, where)
    return tally
