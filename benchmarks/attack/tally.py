"""What an attack did and found: counts and violations, kept on disk as they come, and the table of them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEPT_EVERY = 5.0
"""Seconds after which counts are written again."""


def _nowhere() -> None:
    """Keep no counts."""


@dataclass
class Tally:
    """
    The counts of one attack.

    Parameters
    ----------
    attack
        What was done.
    expected
        What must hold after each of its trials.
    keep
        Writes the counts down.
    """

    attack: str
    expected: str
    keep: Callable[[], None] = _nowhere
    trials: int = 0
    done: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, what: str, trials: int = 1) -> None:
        """Count a trial by how it ended."""
        self.trials += trials
        self.seen[what] += trials

    def violate(self, what: str) -> None:
        """Note that something did not hold, with what it takes to see it again."""
        self.violations.append(what)

    def check(self, holds: bool, what: str) -> bool:
        """Note ``what`` if it does not hold; return whether it does."""
        if not holds:
            self.violate(what)
        return holds

    def numbers(self, last: int | None = None, step: int = 1) -> Iterator[int]:
        """Yield the number of each trial not done yet, below the last; write the counts now and then."""
        written = time.monotonic()
        while last is None or self.done < last:
            begun = time.monotonic()
            yield self.done
            self.done += step
            self.seconds += time.monotonic() - begun
            if time.monotonic() - written > KEPT_EVERY:
                self.keep()
                written = time.monotonic()

    def as_json(self) -> dict[str, Any]:
        """Return what is counted."""
        names = ("attack", "expected", "trials", "done", "seen", "violations")
        return {name: getattr(self, name) for name in names} | {"seconds": round(self.seconds, 1)}


class Book:
    """
    The tallies of all attacks, in a file from which the same command goes on.

    Parameters
    ----------
    path
        The file, or None to keep nothing.
    setting
        What the trials depend on: the counts of another are not gone on with.
    """

    def __init__(self, path: Path | None, setting: dict[str, object]) -> None:
        self._path, self._setting = path, setting
        self.tallies: dict[str, Tally] = {}
        self._old: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            if (other := found.get("setting")) != setting:
                raise SystemExit(f"{path} has other counts ({other}): delete it, or name another file")
            self._old = {one["attack"]: one for one in found["attacks"]}

    def open(self, attack: str, expected: str) -> Tally:
        """Return the tally of an attack, with what was counted before."""
        tally = Tally(attack, expected, self.keep)
        for name, value in self._old.pop(attack, {}).items():
            setattr(tally, name, Counter(value) if name == "seen" else value)
        self.tallies[attack] = tally
        return tally

    def keep(self) -> None:
        """Write all counts, whole or not at all."""
        if self._path is None:
            return
        rows = [one.as_json() for one in self.tallies.values()] + list(self._old.values())
        new = self._path.with_name(f".{self._path.name}.new")
        new.write_text(json.dumps({"setting": self._setting, "attacks": rows}, indent=1))
        new.replace(self._path)


def table(tallies: list[Tally]) -> str:
    """Return the counts as a table in Markdown."""
    rows = ["| attack | trials | how they ended | must hold | violations |", "|---|---:|---|---|---:|"]
    for one in tallies:
        seen = ", ".join(f"{count:,} {what}" for what, count in one.seen.most_common())
        rows.append(f"| {one.attack} | {one.trials:,} | {seen} | {one.expected} | {len(one.violations)} |")
    return "\n".join(rows)
