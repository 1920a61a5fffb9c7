"""End screen of a run: gain, bound and next command."""

from __future__ import annotations

import shlex
from textwrap import wrap

from .executor.reports.tables import clock_text
from .gain import Gain

COLUMNS = 80
"""Width of the narrowest terminal."""

_EQUAL = 0.005
"""Largest relative difference of seconds that counts as equal."""


def gain_lines(
    gain: Gain, model: str, command: str | None, *, planned: bool = False, repeats: str = ""
) -> list[str]:
    """Return the end screen's lines, at most 80 columns each.

    command: Runs the prompts again with known lengths; None if lengths do not repeat.
    planned: True if this run was planned with known lengths.
    repeats: Sentence on prompts whose beginnings are computed several times; empty for none.
    """
    worth = gain.known is not None and gain.known.seconds <= (1 - _EQUAL) * gain.this_run.seconds
    several = "one at a time" if gain.slots == 1 else f"{gain.slots} at a time"
    rows = [
        ("first come, first served", gain.first_come.seconds, "simulated, same lengths"),
        ("this run", gain.this_run.seconds, _against(gain.saved)),
    ]
    if gain.known is not None:
        rows.append(("lengths known beforehand", _known_seconds(gain), _worth(gain, command, planned)))
    rows.append(("least possible", gain.least, _above(gain)))
    lines = [f"{gain.requests:,} {'prompt' if gain.requests == 1 else 'prompts'}, {several}, {model}"]
    lines += [f"  {name:<25}{_time(seconds):>9}    {note}".rstrip() for name, seconds, note in rows]
    lines += wrap(repeats, COLUMNS, initial_indent="  ", subsequent_indent="  ")
    if worth and command is not None and not planned:
        lines += command_lines("  next time:", command)
    return lines


def _time(seconds: float) -> str:
    """Format seconds with three digits, from 100 s on as h:mm:ss."""
    if seconds >= 99.95:
        return clock_text(seconds)
    unit, value = ("s", seconds) if seconds >= 0.9995 else ("ms", 1e3 * seconds)
    return f"{value:#.3g}".rstrip(".") + f" {unit}"


def _known_seconds(gain: Gain) -> float:
    """Return the lesser of this run's and the known plan's seconds."""
    assert gain.known is not None
    return min(gain.known.seconds, gain.this_run.seconds)


def _against(saved: float) -> str:
    if abs(saved) < _EQUAL:
        return "no less time"
    return f"{abs(saved):.0%} {'less' if saved > 0 else 'more'}"


def _worth(gain: Gain, command: str | None, planned: bool) -> str:
    assert gain.known is not None
    saved = 1 - gain.known.seconds / gain.this_run.seconds if gain.this_run.seconds else 0.0
    if saved < _EQUAL:
        return "no more to gain"
    if planned:
        return "this run had planned lengths"
    text = f"{saved:.0%} less than this run"
    if command is None:
        return f"{text}, if lengths repeat"
    return f"{text}, {gain.steps_to_save:.0%} fewer decode steps"


def command_lines(before: str, command: str) -> list[str]:
    """Return ``before`` and a shell command in lines of 80 columns."""
    lines = [before]
    for word in map(shlex.quote, shlex.split(command)):
        if len(lines[-1]) + len(word) + 3 > COLUMNS and lines[-1].strip():
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


def _above(gain: Gain) -> str:
    above = gain.above_least
    if above is None:
        return "nothing is proven"
    return f"proven; this run is {max(0.0, above):.0%} above it"
