"""End screen of a run on servers: gain, bound and next command, in iterations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.figures import gap_text
from ..run_job.beginnings import LEAST_OUTAGE
from .gain import command_lines

_EQUAL = 0.005
"""Largest relative difference of iterations that counts as equal."""

_FEWER = "fewer"
"""Unit of a gain in iterations, whose numbers are printed."""


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
        worth, unit = _worth(figures, simulated, taken)
        # An order that saves nothing is shown as the run itself, from which its simulation may differ by one.
        shown = min(known, taken) if worth >= _EQUAL else taken
        share = 1 - shown / taken if worth >= _EQUAL and unit == _FEWER else worth
        note = _worth_note((share, unit), figures, taken, repeats=command is not None, planned=planned)
        rows.append(("lengths known beforehand", shown, note))
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
    speed, first = figures.get("output_tokens_per_s"), simulated.get("file order")
    took = f"{figures['makespan_s']:,.3g} s"
    parts = [took + (f", {speed:,.0f} tokens/s" if speed else "")]
    seconds: Mapping[str, float] = figures.get("simulated_seconds", {})
    if taken and first and seconds.get("file order"):
        # Seconds are what people pay.
        parts.append(_saved(_saving(figures["makespan_s"], seconds, "file order"), "less time"))
    elif taken and first:
        saved = _saving(taken, simulated, "file order")
        computed, tokens = figures.get("prompt_tokens_computed"), figures.get("simulated_prompt_tokens", {})
        fewer = _saving(computed, tokens, "file order") if computed and tokens else 0.0
        if abs(fewer) >= _EQUAL:
            parts = [took, _saved(fewer, "fewer", "prompt tokens")]
        if abs(saved) >= _EQUAL or abs(fewer) < _EQUAL:
            parts.append(_saved(saved, "fewer"))
    if figures.get("iterations") is None:
        parts.append("simulated" if taken and first else "no counter")
    return "; ".join(parts)


def _saving(measured: float, simulated: Mapping[str, float], other: str) -> float:
    """Return the share saved against another order; zero where the simulation of this one disagrees."""
    share, alike = (1 - count / simulated[other] for count in (measured, simulated.get("as sent", measured)))
    return share if share * alike > 0 and abs(alike) >= _EQUAL else 0.0


def _worth(figures: Mapping[str, Any], simulated: Mapping[str, int], taken: int) -> tuple[float, str]:
    """Return the share that the best order with known lengths saves against this run, and its unit."""
    seconds: Mapping[str, float] = figures.get("simulated_seconds", {})
    computed, tokens = figures.get("prompt_tokens_computed"), figures.get("simulated_prompt_tokens", {})
    counts: list[tuple[float, Mapping[str, float], str]] = [(taken, simulated, _FEWER)]
    if seconds.get("longest first"):
        counts = [(figures["makespan_s"], seconds, "less time")]
    elif computed and tokens:
        counts.append((computed, tokens, "fewer prompt tokens"))
    shares = [
        (1 - known["longest first"] / min(measured, known.get("as sent", measured)), unit)
        for measured, known, unit in counts
    ]
    worth, unit = max(shares)
    return max(0.0, worth), unit


def _saved(saved: float, less: str, what: str = "") -> str:
    if abs(saved) < _EQUAL:
        return "no gain"
    return f"{abs(saved):.0%} {less if saved > 0 else 'more'} {what}".rstrip()


def _worth_note(
    gain: tuple[float, str], figures: Mapping[str, Any], taken: int, *, repeats: bool, planned: bool
) -> str:
    worth, unit = gain
    if worth < _EQUAL:
        least = figures.get("bound_iterations") or 0
        return "no more to gain" if taken <= (1 + _EQUAL) * least else "no better order found"
    if planned:
        return f"{worth:.0%} {unit} than this run"
    return f"{worth:.0%} {unit} than this run" + ("" if repeats else ", if lengths repeat")


def _above(figures: Mapping[str, Any]) -> str:
    counted, bound = figures.get("iterations"), figures["bound_iterations"]
    if counted is not None and counted < bound:
        return "not valid: this run took fewer"
    basis = "proven" if figures["bound_label"] == "proven least" else "assumed"
    return basis if counted is None else f"{basis}; this run is {gap_text(counted / bound - 1)} above it"
