"""End screen of a run: gain, bound and next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from textwrap import wrap

from ..gain import EQUAL, Gain, GainLine

COLUMNS = 80
"""Width of the narrowest terminal."""

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
    lines = [f"{gain.requests:,} {'prompt' if gain.requests == 1 else 'prompts'}, {several}, {model}"]
    lines += _table(gain.lines(repeats=command is not None or planned))
    remarks = _remarks(gain, repeats)
    if planned and gain.worth >= EQUAL:
        own = "the third line knows this run's own"
        remarks.append(f"this run was planned with earlier lengths and costs; {own}")
    for remark in remarks:
        lines += wrap(remark, COLUMNS, initial_indent="  ", subsequent_indent="  ")
    if gain.worth >= EQUAL and command is not None and not planned and not gain.at_once:
        lines += command_lines("  next time:", command)
    return lines


def _table(lines: Sequence[GainLine]) -> list[str]:
    """Return aligned lines: exact counts first, then seconds."""
    courses = [line.course for line in lines]
    steps = _column([None if course is None else course.decode_steps for course in courses], "steps")
    stages = _column([None if course is None else course.prefill_stages for course in courses], "stages")
    return [
        f"  {line.name:<24}  {step}  {stage}  {line.duration:>7}  {line.note}".rstrip()
        for line, step, stage in zip(lines, steps, stages, strict=True)
    ]


def _column(counts: list[int | None], unit: str) -> list[str]:
    """Return counts of one width, the first with its unit."""
    texts = ["" if count is None else f"{count:,}" for count in counts]
    unit = unit.removesuffix("s") if counts[0] == 1 else unit
    width = max(map(len, texts))
    return [f"{text:>{width}} {unit if k == 0 else '':{len(unit)}}" for k, text in enumerate(texts)]


def _remarks(gain: Gain, repeats: str) -> list[str]:
    """Return sentences that qualify the lines above."""
    remarks = []
    if gain.at_once:
        fit = "1 prompt fits" if gain.requests == 1 else f"{gain.requests:,} prompts fit"
        remarks.append(f"{fit} into {gain.slots:,} slots at once: no order can help")
    if gain.capacity is not None:
        which = "with evictions or without" if gain.evicts else "without evictions"
        remarks.append(f"least possible {which}, in {gain.capacity:,} tokens of KV cache")
    if gain.replicas > 1:
        remarks.append("steps and stages of the replica that ends last")
        if not gain.least:
            remarks.append("nothing is proven, as no trace tells which beginnings the replicas shared")
    first, ran = gain.first_come.prompt_tokens, gain.this_run.prompt_tokens
    if gain.needed is not None:
        once = "each shared beginning once"
        counts = f"{first:,} first come, first served; {ran:,} this run; {gain.needed:,} with {once}"
        if first == ran == gain.needed:
            counts = f"{ran:,}, {once}"
        remarks.append(f"prompt tokens computed: {counts}, of {gain.prompt_tokens:,}")
    elif repeats:
        remarks.append(repeats)
    if gain.within is not None and not gain.at_once:
        fitted = "by costs fitted to this run or an earlier one"
        remarks.append(f"steps and stages are exact; other lines' seconds are simulated, {fitted}")
    elif gain.missed is not None and abs(gain.missed) >= _LEAST_MISSED:
        remarks.append(
            f"only this run's seconds are measured: the others may be off by {abs(gain.missed):.0%};"
            " steps and stages are exact"
        )
    return remarks


def command_lines(before: str, command: str) -> list[str]:
    """Return ``before`` and a shell command in lines of 80 columns."""
    lines = [before]
    for word in map(shlex.quote, shlex.split(command)):
        if len(lines[-1]) + len(word) + 3 > COLUMNS and lines[-1].strip():
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines
