"""What an attack did and what it found: counts and violations, and the table of them."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field


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
    """

    attack: str
    expected: str
    trials: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

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


def table(tallies: list[Tally]) -> str:
    """Return the counts as a table in Markdown."""
    rows = ["| attack | trials | how they ended | must hold | violations |", "|---|---:|---|---|---:|"]
    for one in tallies:
        seen = ", ".join(f"{count:,} {what}" for what, count in one.seen.most_common())
        rows.append(f"| {one.attack} | {one.trials:,} | {seen} | {one.expected} | {len(one.violations)} |")
    return "\n".join(rows)


def as_json(tallies: list[Tally], seed: int) -> str:
    """Return the counts as JSON."""
    rows = [
        {
            "attack": one.attack,
            "trials": one.trials,
            "seen": dict(one.seen),
            "violations": one.violations,
            "seconds": round(time.monotonic() - one.begun, 1),
        }
        for one in tallies
    ]
    return json.dumps({"seed": seed, "attacks": rows}, indent=1)
