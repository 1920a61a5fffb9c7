"""Kills of ``run``, single and on a fleet, and of ``plan`` at random moments, of resumed runs, too."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .children import CRASHED, Ended, command, ended, run, spawn
from .jobs import OURS, Work, answers_of, digests, journal_of
from .tally import Tally

HANG = 120.0
"""Seconds after which a command that takes less than one counts as hung."""

SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGTERM,) * 2 + (signal.SIGINT,) * 2
"""How often each of them is sent, out of ten."""

START_UP = 0.05
"""CPU seconds that even a run with nothing left takes."""

STALL = 8
"""Seconds after which a fleet of which a replica was stopped gives up; half of it for the replica."""

MISSED = "over before the kill"
"""Not counted as kills."""

Progress = Callable[[int], float]
"""How far a process has come, in the unit of the moments at which it is hit."""


@dataclass(frozen=True)
class Hit:
    """What is done to a command: a signal to it, or to one of its replicas, once it has come so far."""

    after: float
    sent: signal.Signals
    replica: bool = False

    def __str__(self) -> str:
        return f"{self.sent.name} {'to a replica ' if self.replica else ''}after {self.after:.3f}"

    @property
    def name(self) -> str:
        """What is counted."""
        return f"{self.sent.name}{' of a replica' if self.replica else ''}"


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its children: their own time, however busy the machine is."""
    total = 0
    for one in (pid, *children_of(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in Path(f"/proc/{one}/task").iterdir():
                total += int((thread / "schedstat").read_text().split()[0])
    return 1e-9 * total


def interrupted(
    call: Callable[[], int],
    folder: Path,
    output: Path,
    hits: list[Hit],
    *,
    progress: Progress = cpu_seconds,
    replicas: Callable[[int], list[int]] = children_of,
) -> tuple[Ended, list[Hit]]:
    """Start a command and hit it at some moments; return how it ended, and which hits found it alive."""
    pid = spawn(call, folder, output)
    todo, done = sorted(hits, key=lambda hit: hit.after), []
    limit = time.monotonic() + HANG
    while todo and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > limit:
            break
        if progress(pid) >= todo[0].after:
            hit = todo.pop(0)
            if _sent(hit, pid, replicas):
                done.append(hit)
            if not hit.replica:
                break
        time.sleep(0.001)
    return ended(pid, output, HANG), done


def _sent(hit: Hit, pid: int, replicas: Callable[[int], list[int]]) -> bool:
    targets = replicas(pid) if hit.replica else [pid]
    with contextlib.suppress(ProcessLookupError):
        if targets:
            os.kill(targets[int(hit.after * 1e6) % len(targets)], hit.sent)
            return True
    return False


def kill_runs(work: Work, scratch: Path, kills: int, seed: int, tally: Tally) -> Tally:
    """Kill a job's run again and again until it is through, until there were as many kills as asked for."""
    for chain in tally.numbers():
        if tally.trials - tally.seen[MISSED] >= kills:
            break
        rng = random.Random(f"{seed} runs {chain}")
        with _chain(work, scratch, tally, chain) as folder:
            for _ in range(rng.randint(1, 6)):
                left = 1 - len(journal_of(folder / OURS[2])) / len(work.answers)
                hit = Hit(rng.uniform(0, START_UP + left * work.cpu_seconds), rng.choice(SIGNALS))
                one, done = interrupted(work.call(), folder, scratch / "said", [hit])
                _judge(work, folder, one, [hit], done, tally, f"chain {chain}: {hit}")
                if not done:
                    break
    return tally


def kill_fleets(work: Work, scratch: Path, kills: int, seed: int, tally: Tally) -> Tally:
    """Kill a fleet's driver and its replicas, and stop replicas for ever, until it is through."""
    for chain in tally.numbers():
        if tally.trials - tally.seen[MISSED] >= kills:
            break
        rng = random.Random(f"{seed} fleets {chain}")
        with _chain(work, scratch, tally, chain) as folder:
            for _ in range(rng.randint(1, 4)):
                left = 1 - len(journal_of(folder / OURS[2])) / len(work.answers)
                hits = _hits(rng, START_UP + left * work.cpu_seconds)
                stalls = (
                    ("--stall-seconds", str(STALL)) if any(h.sent == signal.SIGSTOP for h in hits) else ()
                )
                one, done = interrupted(work.call(*stalls), folder, scratch / "said", hits)
                where = f"chain {chain}: {', '.join(map(str, hits))}"
                _judge(work, folder, one, hits, done, tally, where)
                if not done:
                    break
    return tally


def _hits(rng: random.Random, most: float) -> list[Hit]:
    """Return up to two hits at replicas, and most often one at the driver, at moments of a run's time."""
    replicas = [
        Hit(rng.uniform(0, most), signal.SIGSTOP if rng.random() < 0.04 else signal.SIGKILL, replica=True)
        for _ in range(rng.choice((0, 1, 1, 2)))
    ]
    driver = [Hit(rng.uniform(0, most), rng.choice(SIGNALS))] if not replicas or rng.random() < 0.7 else []
    return replicas + driver


@contextmanager
def _chain(work: Work, scratch: Path, tally: Tally, chain: int) -> Iterator[Path]:
    """Give a fresh job; afterwards, finish what became of it, and judge all that stands there."""
    folder = work.copy(scratch / "killed")
    before = digests(folder, work.ours)
    yield folder
    last = run(work.call(), folder, scratch / "said", HANG)
    if not tally.check(last.status == 0, f"chain {chain}: {last}"):
        return
    found = answers_of(folder / "answers.jsonl")
    tally.check(found == work.answers, f"chain {chain}: answers differ")
    tally.check(list(found) == list(work.answers), f"chain {chain}: answers out of order")
    after = digests(folder, work.ours)
    tally.check(after == before, f"chain {chain}: changed or left {sorted(after.items() ^ before.items())}")
    tally.check(not (folder / OURS[2]).exists(), f"chain {chain}: the journal is left")


def _judge(
    work: Work, folder: Path, one: Ended, hits: list[Hit], done: list[Hit], tally: Tally, where: str
) -> None:
    for hit in done:
        tally.count(hit.name)
    if not done:
        tally.count(MISSED)
    allowed = {0}
    for hit in done:
        # A fleet of which no replica is left, or none reports, stops, and says how to go on.
        stopped = 1 if hit.replica else {signal.SIGTERM: 1, signal.SIGINT: 130}.get(hit.sent, 0)
        allowed |= {stopped} if hit.replica else {stopped, -hit.sent}
    tally.check(one.status in allowed and "Traceback" not in one.said, f"{where}: {one}")
    tally.check(not one.hung, f"{where}: hung")
    kept = journal_of(folder / OURS[2])
    tally.check(kept.items() <= work.answers.items(), f"{where}: the journal holds a changed answer")
    if one.status == 1 and kept:
        tally.check("the same command goes on" in one.said, f"{where}: {one}")


def kill_plans(work: Work, scratch: Path, kills: int, seed: int, tally: Tally) -> Tally:
    """Kill ``plan`` at random moments; what it wrote is whole, and the next one is not in anybody's way."""
    words = ("plan", "prompts.jsonl", "--tokenizer", "bytes", "--slots", "4", "-o", "new.json")
    searched = (*words, "--work", "150")
    whole = run(command(searched), work.copy(scratch / "planned"), scratch / "said", HANG)
    for trial in tally.numbers(kills):
        rng = random.Random(f"{seed} plans {trial}")
        folder = work.copy(scratch / "planned")
        before = digests(folder)
        (temporary := folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(temporary)
        hit = Hit(rng.uniform(0, 1.05 * whole.cpu_seconds), rng.choice(SIGNALS))
        one, done = interrupted(command(searched), folder, scratch / "said", [hit])
        where = f"trial {trial}, {hit}"
        tally.count(hit.name if done else MISSED)
        tally.check(one.status != CRASHED and "Traceback" not in one.said, f"{where}: {one}")
        tally.check(not one.hung, f"{where}: hung")
        if hit.sent != signal.SIGKILL:
            tally.check(not any(temporary.iterdir()), f"{where}: left {list(temporary.iterdir())}")
        if (folder / "new.json").exists():
            checked = run(command(["verify", "new.json"]), folder, scratch / "said", HANG)
            tally.check(checked.status == 0, f"{where}: {checked}")
        again = run(command([*words, "--overwrite", "--work", "1"]), folder, scratch / "said", HANG)
        tally.check(again.status == 0, f"{where}: {again}")
        tally.check(digests(folder, ("new.json",)) == before, f"{where}: files were left or changed")
        os.environ.pop("TMPDIR")
    return tally
