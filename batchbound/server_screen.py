"""End screen of a run on servers: gain, bound and next command, in iterations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .gain_screen import command_lines

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
    counted, simulated = figures.get("iterations"), figures.get("simulated_iterations", {})
    first, known = simulated.get("file order"), simulated.get("longest first")
    rows: list[tuple[str, int | None, str]] = []
    if first is not None:
        rows.append(("first come, first served", first, "simulated, same lengths"))
    rows.append(("this run", counted, _this_run(figures, first)))
    worth = 0.0
    if known is not None:
        known = known if counted is None else min(known, counted)
        worth = 1 - known / counted if counted else 0.0
        rows.append(
            ("lengths known beforehand", known, _worth(worth, repeats=command is not None, planned=planned))
        )
    if figures.get("bound_iterations"):
        rows.append(("least possible", figures["bound_iterations"], _above(figures)))
    lines += [
        f"  {name:<25}{'unknown' if count is None else format(count, ','):>9}    {note}"
        for name, count, note in rows
    ]
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


def _this_run(figures: Mapping[str, Any], first: int | None) -> str:
    counted, predicted = figures.get("iterations"), figures.get("predicted_iterations")
    parts = [f"{figures['makespan_s']:,.3g} s"]
    if counted is None:
        parts.append("no such counter, or a restart")
    elif first:
        saved = 1 - counted / first
        parts.append(
            "no fewer" if abs(saved) < _EQUAL else f"{abs(saved):.0%} {'fewer' if saved > 0 else 'more'}"
        )
    if predicted is not None:
        parts.append(f"{predicted:,} predicted")
    return "; ".join(parts)


def _worth(worth: float, *, repeats: bool, planned: bool) -> str:
    if worth < _EQUAL:
        return "no more to gain"
    if planned:
        return "this run had known lengths"
    return f"{worth:.0%} fewer than this run" + ("" if repeats else ", if lengths repeat")


def _above(figures: Mapping[str, Any]) -> str:
    counted, bound = figures.get("iterations"), figures["bound_iterations"]
    if counted is not None and counted < bound:
        return "not valid: this run took fewer"
    basis = "proven" if figures["bound_label"] == "proven least" else "assumed"
    return basis if counted is None else f"{basis}; this run is {counted / bound - 1:.0%} above it"
