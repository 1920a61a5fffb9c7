"""End screen of a run on servers: gain, bound and next command, in iterations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .gain import command_lines

_EQUAL = 0.005
"""Largest relative difference of iterations that counts as equal."""


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
    rows.append(("this run", counted, _this_run(figures, taken, first)))
    worth = 0.0
    if known is not None and taken:
        known = min(known, taken)
        worth, unit = 1 - known / taken, "fewer"
        seconds = figures.get("simulated_seconds", {}).get("longest first")
        if seconds:
            worth, unit = max(0.0, 1 - seconds / figures["makespan_s"]), "less time"
        repeats = command is not None
        note = _worth((worth, unit), figures, taken, repeats=repeats, planned=planned)
        rows.append(("lengths known beforehand", known, note))
    least = figures.get("bound_iterations")
    # A bound of one iteration says nothing of a run of several.
    if least and (least > 1 or taken == least):
        rows.append(("least possible", figures["bound_iterations"], _above(figures)))
    lines += [
        f"  {name:<25}{'unknown' if count is None else format(count, ','):>9}    {note}"
        for name, count, note in rows
    ]
    lines += _prompt_lines(figures)
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
    return "simulated, same lengths" + ("" if seconds is None else f"; {seconds:,.3g} s")


def _prompt_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the line of prompt tokens against the tree of shared beginnings."""
    computed, needed = figures.get("prompt_tokens_computed"), figures.get("prompt_tokens_needed")
    if computed is None or needed is None:
        return []
    again, seconds = figures["prompt_tokens_again"], figures.get("seconds_again")
    line = f"  {computed:,} prompt tokens computed, {needed:,} needed"
    if again:
        line += f": {again:,} computed again"
        line += f", about {seconds:,.2g} s" if seconds else ""
    return [line]


def _this_run(figures: Mapping[str, Any], taken: int | None, first: int | None) -> str:
    """Return seconds, speed, and iterations against first come, first served."""
    speed = figures.get("output_tokens_per_s")
    parts = [f"{figures['makespan_s']:,.3g} s" + (f", {speed:,.0f} tokens/s" if speed else "")]
    first_seconds = figures.get("simulated_seconds", {}).get("file order")
    if taken and first and first_seconds:
        # Seconds are what people pay.
        parts.append(_saved(1 - figures["makespan_s"] / first_seconds, "less time"))
    elif taken and first:
        parts.append(_saved(1 - taken / first, "fewer"))
    if figures.get("iterations") is None:
        parts.append("simulated" if taken and first else "no counter")
    return "; ".join(parts)


def _saved(saved: float, less: str) -> str:
    return "no gain" if abs(saved) < _EQUAL else f"{abs(saved):.0%} {less if saved > 0 else 'more'}"


def _worth(
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
    return basis if counted is None else f"{basis}; this run is {counted / bound - 1:.0%} above it"
