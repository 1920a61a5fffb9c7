"""End screen of a run: gain, bound and next command."""

from __future__ import annotations

import shlex
from textwrap import wrap

from ..data.figures import short_duration
from ..gain import Course, Gain

COLUMNS = 80
"""Width of the narrowest terminal."""

_EQUAL = 0.005
"""Largest relative difference of seconds that counts as equal."""

_LEAST_MISSED = 0.05
"""Share of the seconds from which a misfit of the cost model is named."""


def gain_lines(
    gain: Gain, model: str, command: str | None, *, planned: bool = False, repeats: str = ""
) -> list[str]:
    """Return the end screen's lines, at most 80 columns each.

    command: Runs the prompts again with known lengths; None if lengths do not repeat.
    planned: True if this run was planned with known lengths.
    repeats: Sentence on prompts whose beginnings are computed several times; empty for none.
    """
    several = "one at a time" if gain.slots == 1 else f"{gain.slots:,} at a time"
    several += f" on {gain.replicas} replicas" if gain.replicas > 1 else ""
    rows = [
        ("first come, first served", gain.first_come, gain.first_come.seconds, "simulated"),
        ("this run", gain.this_run, gain.this_run.seconds, _against(gain.saved)),
    ]
    worth = _worth(gain)
    if gain.known is not None and not gain.at_once:
        note = _known_note(gain, worth, repeats=command is not None or planned)
        rows.append(("lengths known beforehand", gain.known, gain.known.seconds, note))
    least = ("least possible", None, gain.least, _above(gain))
    lines = [f"{gain.requests:,} {'prompt' if gain.requests == 1 else 'prompts'}, {several}, {model}"]
    lines += _table([*rows, least])
    for remark in _remarks(gain, repeats):
        lines += wrap(remark, COLUMNS, initial_indent="  ", subsequent_indent="  ")
    if worth >= _EQUAL and command is not None and not planned and not gain.at_once:
        lines += command_lines("  next time:", command)
    return lines


def _table(rows: list[tuple[str, Course | None, float, str]]) -> list[str]:
    """Return aligned rows: exact counts first, then seconds."""
    counts = [
        None if course is None else (course.decode_steps, course.prefill_stages) for _, course, *_ in rows
    ]
    columns = [
        _column([None if pair is None else pair[k] for pair in counts], unit)
        for k, unit in enumerate(("steps", "stages"))
    ]
    return [
        f"  {name:<24}  {steps}  {stages}  {short_duration(seconds) if seconds else '':>7}  {note}".rstrip()
        for (name, _, seconds, note), steps, stages in zip(rows, *columns, strict=True)
    ]


def _column(counts: list[int | None], unit: str) -> list[str]:
    """Return counts of one width, the first with its unit."""
    texts = ["" if count is None else f"{count:,}" for count in counts]
    width = max(map(len, texts))
    return [f"{text:>{width}} {unit if k == 0 else '':{len(unit)}}" for k, text in enumerate(texts)]


def _remarks(gain: Gain, repeats: str) -> list[str]:
    """Return sentences that qualify the lines above."""
    remarks = []
    if gain.at_once:
        remarks.append(f"{gain.requests:,} prompts fit into {gain.slots:,} slots at once: no order can help")
    if gain.capacity is not None:
        which = "with evictions or without" if gain.evicts else "without evictions"
        remarks.append(f"least possible {which}, in {gain.capacity:,} tokens of KV cache")
    if gain.replicas > 1:
        remarks.append("steps and stages of the replica that ends last")
    first, ran = gain.first_come.prompt_tokens, gain.this_run.prompt_tokens
    if gain.needed is not None:
        remarks.append(
            f"prompt tokens computed: {first:,} first come, first served; {ran:,} this run; {gain.needed:,}"
            f" are needed, of {gain.prompt_tokens:,}"
        )
    elif repeats:
        remarks.append(repeats)
    if gain.missed is not None and abs(gain.missed) >= _LEAST_MISSED:
        remarks.append(
            f"seconds are good to {abs(gain.missed):.0%} on this machine; steps and stages are exact"
        )
    return remarks


def _against(saved: float) -> str:
    if abs(saved) < _EQUAL:
        return "no gain"
    return f"{abs(saved):.0%} {'less' if saved > 0 else 'more'} time"


def _worth(gain: Gain) -> float:
    """Return the fraction of this run's seconds that known lengths would save."""
    if gain.known is None or not gain.this_run.seconds:
        return 0.0
    return 1 - gain.known.seconds / gain.this_run.seconds


def _known_note(gain: Gain, saved: float, *, repeats: bool) -> str:
    if saved < _EQUAL:
        above = gain.above_least
        return "no more to gain" if above is not None and above < _EQUAL else "no better order found"
    return f"{saved:.0%} less" + (" than this run" if repeats else ", if they repeat")


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
    return f"proven; run {max(0.0, above):.0%} above"
