"""Kills of ``run`` and ``plan`` at random moments, of resumed runs, too."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from .children import CRASHED, Ended, command, ended, run, spawn
from .jobs import OURS, Work, answers_of, digests, journal_of
from .tally import Tally

HANG = 60.0
"""Seconds after which a command that takes about one counts as hung."""

SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGTERM,) * 2 + (signal.SIGINT,) * 2
"""How often each of them is sent, out of ten."""

START_UP = 0.05
"""CPU seconds that even a run with nothing left takes."""

MISSED = "over before the kill"
"""Not counted as kills."""


def interrupted(
    words: tuple[str, ...], folder: Path, output: Path, sent: int, after: float
) -> tuple[Ended, bool]:
    """Start a command and send it a signal after some CPU seconds; return how it ended, and if it was hit."""
    pid = spawn(command(words), folder, output)
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        # Its own time, not the clock's: where a kill falls does not depend on how busy the machine is.
        if int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) >= 1e9 * after:
            os.kill(pid, sent)
            return ended(pid, output, HANG), True
        time.sleep(0.001)
    return ended(pid, output, HANG), False


def kill_runs(work: Work, scratch: Path, kills: int, rng: random.Random) -> Tally:
    """Kill a job's run again and again until it is through, until there were as many kills as asked for."""
    expected = "every answer once, unchanged; user's files as before"
    tally = Tally("kills of `run`, of resumed ones too", expected)
    chain = 0
    while tally.trials - tally.seen[MISSED] < kills:
        chain += 1
        folder = work.copy(scratch / "killed")
        before = digests(folder)
        for _ in range(rng.randint(1, 6)):
            if not _kill_run(work, folder, scratch / "said", tally, rng):
                break
        last = run(command(work.run), folder, scratch / "said", HANG)
        if not tally.check(last.status == 0, f"chain {chain}: {last}"):
            continue
        found = answers_of(folder / "answers.jsonl")
        tally.check(found == work.answers, f"chain {chain}: answers differ")
        tally.check(list(found) == list(work.answers), f"chain {chain}: answers out of order")
        tally.check(digests(folder) == before, f"chain {chain}: {digests(folder).keys() ^ before.keys()}")
        tally.check(not (folder / OURS[2]).exists(), f"chain {chain}: the journal is left")
    return tally


def _kill_run(work: Work, folder: Path, output: Path, tally: Tally, rng: random.Random) -> bool:
    left = 1 - len(journal_of(folder / OURS[2])) / len(work.answers)
    sent, after = rng.choice(SIGNALS), rng.uniform(0, START_UP + left * work.cpu_seconds)
    one, hit = interrupted(work.run, folder, output, sent, after)
    name = signal.Signals(sent).name
    where = f"{name} after {after:.3f} s"
    tally.count(name if hit else MISSED)
    allowed = {0, -sent, {signal.SIGTERM: 1, signal.SIGINT: 130}.get(sent, 0)}
    tally.check(one.status in allowed and "Traceback" not in one.said, f"{where}: {one}")
    tally.check(not one.hung, f"{where}: hung")
    kept = journal_of(folder / OURS[2])
    tally.check(kept.items() <= work.answers.items(), f"{where}: the journal holds a changed answer")
    return hit


def kill_plans(work: Work, scratch: Path, kills: int, rng: random.Random) -> Tally:
    """Kill ``plan`` at random moments; what it wrote is whole, and the next one is not in anybody's way."""
    tally = Tally("kills of `plan`", "the plan is whole or absent; no temporary file is left")
    words = ("plan", "prompts.jsonl", "--tokenizer", "bytes", "--slots", "4", "-o", "new.json")
    searched = (*words, "--work", "150")
    whole = run(command(searched), work.copy(scratch / "planned"), scratch / "said", HANG)
    for trial in range(kills):
        folder = work.copy(scratch / "planned")
        before = digests(folder)
        (temporary := folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(temporary)
        sent, after = rng.choice(SIGNALS), rng.uniform(0, 1.05 * whole.cpu_seconds)
        one, hit = interrupted(searched, folder, scratch / "said", sent, after)
        where = f"trial {trial}, {signal.Signals(sent).name} after {after:.3f} s"
        tally.count(signal.Signals(sent).name if hit else MISSED)
        tally.check(one.status != CRASHED and "Traceback" not in one.said, f"{where}: {one}")
        tally.check(not one.hung, f"{where}: hung")
        if sent != signal.SIGKILL:
            tally.check(not any(temporary.iterdir()), f"{where}: left {list(temporary.iterdir())}")
        if (folder / "new.json").exists():
            checked = run(command(["verify", "new.json"]), folder, scratch / "said", HANG)
            tally.check(checked.status == 0, f"{where}: {checked}")
        again = run(command([*words, "--overwrite", "--work", "1"]), folder, scratch / "said", HANG)
        tally.check(again.status == 0, f"{where}: {again}")
        tally.check(digests(folder, ("new.json",)) == before, f"{where}: files were left or changed")
        os.environ.pop("TMPDIR")
    return tally
