"""End screen of a run on servers: gain, bound and next command, in iterations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.figures import gap_text
from ..run_job.beginnings import LEAST_OUTAGE
from .gain import command_lines

_EQUAL = 0.005
"""Largest relative difference of iterations that counts as equal."""

_NOTE_WIDTH = 40
"""Columns right of a line's number."""

_TIME, _PREFILL = "time", "prefill"
"""Units of a second share, after that of iterations."""


def server_lines(
    figures: Mapping[str, Any], servers: str, command: str | None, *, planned: bool
) -> list[str]:
    """Return the end screen's lines.

    figures: Figures of :meth:`.ServerResult.figures`.
    servers: Name of the servers.
    command: Sends the requests again with known lengths; None if lengths do not repeat.
    planned: True if this run had known lengths.
    """
    slots, requests = figures["slots"], figures["requests"]
    several = "one at a time" if slots == 1 else f"{slots:,} at a time"
    lines = [f"{requests:,} {'request' if requests == 1 else 'requests'}, {several}, {servers}, iterations"]
    # Orders are simulated for an engine that keeps the assumptions.
    simulated = figures.get("simulated_iterations", {}) if figures.get("comparable", True) else {}
    counted = figures.get("iterations")
    taken = simulated.get("as sent") if counted is None else counted
    first, known = simulated.get("file order"), simulated.get("longest first")
    rows: list[tuple[str, int | None, str]] = []
    if first is not None:
        rows.append(("first come, first served", first, _first_come(figures)))
    rows.append(("this run", counted, _this_run(figures, simulated, taken)))
    worth = 0.0
    if known is not None and taken:
        fewer = _change(taken, simulated)
        other, unit = _other_worth(figures)
        worth = max(fewer, other) if unit == _PREFILL else fewer if unit is None else other
        if max(fewer, worth) >= _EQUAL:
            shares = _shares(1 - known / taken, other, unit)
            note = _known_note(shares, repeats=command is not None or planned)
            rows.append(("lengths known beforehand", known, note))
        else:
            # The simulation of an order that saves nothing may differ by one from the run.
            at_bound = taken <= (1 + _EQUAL) * (figures.get("bound_iterations") or 0)
            note = "no more to gain" if at_bound else "no better order found"
            rows.append(("lengths known beforehand", taken, note))
    least = figures.get("bound_iterations")
    # A bound of one iteration says nothing of a run of several.
    if least and (least > 1 or taken == least):
        rows.append(("least possible", figures["bound_iterations"], _above(figures)))
    lines += [
        f"  {name:<25}{'unknown' if count is None else format(count, ','):>9}    {note}"
        for name, count, note in rows
    ]
    lines += _changed_lines(figures) + _prompt_lines(figures)
    if (lost := figures.get("unreachable_s", 0.0)) > LEAST_OUTAGE * figures["makespan_s"]:
        lines.append(f"  {lost:,.3g} s of this run the server was unreachable: no seconds are compared")
    if figures.get("assuming"):
        lines.append(f"  {figures['assuming']}")
    if worth >= _EQUAL and command is not None and not planned:
        lines += command_lines("  next time:", command)
    return lines


def detail_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines of ``--verbose``: prediction, simulations and losses."""
    bound = figures.get("bound_iterations")
    rows = {"predicted": figures.get("predicted_iterations")}
    rows |= {f"simulated, {name}": count for name, count in figures.get("simulated_iterations", {}).items()}
    lines = [f"  bound by {figures['bound_source']}"] if bound else []
    if figures.get("output_tokens_per_s"):
        lines.append(
            f"  {figures['output_tokens_per_s']:,.0f} output tokens/s, {figures['retries']:,} retries"
        )
    for name, count in rows.items():
        if count is not None:
            above = f"  {count / bound - 1:+.2%}" if bound else ""
            lines.append(f"  {name:28s} {count:9,d}{above}")
    losses: Mapping[str, int] = figures.get("losses", {})
    return lines + [f"  {'lost: ' + name:52s} {lost:+9,d}" for name, lost in losses.items()]


def _first_come(figures: Mapping[str, Any]) -> str:
    seconds = figures.get("simulated_seconds", {}).get("file order")
    computed = figures.get("simulated_prompt_tokens", {}).get("file order")
    if seconds is not None:
        return f"simulated, same lengths; {seconds:,.3g} s"
    return "simulated, same lengths" if computed is None else f"simulated; {computed:,} prompt tokens"


def _changed_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the line of completions that were longer than planned, of a run that took longer."""
    changed = figures.get("changed_lengths")
    if changed is None:
        return []
    named = [f"{row} {before:,} -> {after:,}" for row, (before, after) in changed["grown_most"].items()]
    more = ", ..." if changed["rows"] > len(named) else ""
    rows = f"{changed['rows']:,} of {figures['requests']:,} rows"
    return [f"  lengths changed in {rows}: {', '.join(named)} tokens{more}"]


def _prompt_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the line of prompt tokens against the tree of shared beginnings."""
    computed, needed = figures.get("prompt_tokens_computed"), figures.get("prompt_tokens_needed")
    if computed is None or needed is None:
        return []
    again, seconds = figures["prompt_tokens_again"], figures.get("seconds_again")
    line = f"  {computed:,} prompt tokens computed, {needed:,} needed"
    line += " from an empty cache" if computed < needed else ""
    if again:
        line += f": {again:,} computed again"
        line += f", about {seconds:,.2g} s" if seconds else ""
    return [line]


def _this_run(figures: Mapping[str, Any], simulated: Mapping[str, int], taken: int | None) -> str:
    """Return seconds, speed, and what was gained against first come, first served."""
    speed = figures.get("output_tokens_per_s")
    took, compared = f"{figures['makespan_s']:,.3g} s", bool(taken and simulated.get("file order"))
    parts = []
    if taken and compared:
        seconds: Mapping[str, float] = figures.get("simulated_seconds", {})
        computed, tokens = figures.get("prompt_tokens_computed"), figures.get("simulated_prompt_tokens", {})
        if computed is not None:
            # A warm cache computes less than the order's own simulation, which begins cold.
            computed = max(computed, tokens.get("as sent", 0))
        saved, unit = None, None
        if seconds.get("file order"):
            saved, unit = _saving(figures["makespan_s"], seconds), _TIME
        elif computed and tokens:
            saved, unit = _saving(computed, tokens), _PREFILL
        lost = 1 - taken / simulated["file order"]
        # The simulation of the same order may differ by one iteration.
        lost = lost if taken > simulated["file order"] + 1 else 0.0
        parts.append(_shares(_saving(taken, simulated) or lost, saved, unit))
    if figures.get("iterations") is None:
        parts.append("simulated" if compared else "no counter")
    fast = f"{took}, {speed:,.0f} tokens/s" if speed else took
    return _fitting("; ".join([fast, *parts]), "; ".join([took, *parts]))


def _saving(measured: float, simulated: Mapping[str, float]) -> float | None:
    """Return the share saved against file order; None where the simulation of this order disagrees."""
    first = simulated["file order"]
    share, of_order = (1 - count / first for count in (measured, simulated.get("as sent", measured)))
    if max(abs(share), abs(of_order)) < _EQUAL:
        return 0.0
    return share if share * of_order > 0 and abs(of_order) >= _EQUAL else None


def _change(measured: float, simulated: Mapping[str, float]) -> float:
    """Return the share that known lengths save against this run, measured and simulated."""
    known, runs = simulated["longest first"], (measured, simulated.get("as sent", measured))
    return 1 - known / min(max(runs), max(known, min(runs)))


def _other_worth(figures: Mapping[str, Any]) -> tuple[float, str | None]:
    """Return what known lengths save of seconds, else of prompt tokens, and its unit."""
    seconds: Mapping[str, float] = figures.get("simulated_seconds", {})
    computed, tokens = figures.get("prompt_tokens_computed"), figures.get("simulated_prompt_tokens", {})
    if seconds.get("longest first"):
        return _change(figures["makespan_s"], seconds), _TIME
    return (_change(computed, tokens), _PREFILL) if computed and tokens else (0.0, None)


def _shares(iterations: float, other: float | None, unit: str | None) -> str:
    """Return the share of iterations, and that of seconds or prompt tokens where known."""
    known = other is not None and unit is not None and (unit == _TIME or abs(other) >= _EQUAL)
    equal = "as many" if known else "no gain"
    fewer = f"{abs(iterations):.0%} {'fewer' if iterations > 0 else 'more'}"
    fewer = fewer if abs(iterations) >= _EQUAL else equal
    if other is None or not known:
        return fewer
    if abs(other) < _EQUAL:
        return "no gain" if fewer == equal else f"{fewer}; same {unit}"
    return f"{fewer}; {abs(other):.0%} {'less' if other > 0 else 'more'} {unit}"


def _known_note(shares: str, *, repeats: bool) -> str:
    if repeats:
        return _fitting(f"{shares} than this run", shares)
    return _fitting(f"{shares}, if lengths repeat", f"{shares}, if they repeat", shares)


def _fitting(*texts: str) -> str:
    """Return the first text that fits into a line of 80 columns, else the last."""
    return next((text for text in texts if len(text) <= _NOTE_WIDTH), texts[-1])


def _above(figures: Mapping[str, Any]) -> str:
    counted, bound = figures.get("iterations"), figures["bound_iterations"]
    if counted is not None and counted < bound:
        return "not valid: this run took fewer"
    basis = "proven" if figures["bound_label"] == "proven least" else "assumed"
    # What a deadline broke off counts as iterations, and in no bound.
    if counted is None or figures.get("abandoned"):
        return basis
    return f"{basis}; this run is {gap_text(counted / bound - 1)} above it"
