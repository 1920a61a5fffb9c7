"""Screen of plans for several numbers of replicas, and what the screens of plans share."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..data.bound import gap_above
from ..data.plan import ASSUMED
from ..options.plan import PlanOptions
from ..plan_requests import FleetComparison
from ..planning.sweep import device_hours
from ..solvers.result import StoppedBy
from .streams import say
from .terminal import INTERRUPTED, note


def show_comparison(comparison: FleetComparison, options: PlanOptions) -> int:
    """Print a row for each number of replicas and slots."""
    rows = [
        {
            "replicas": point.replicas,
            "slots": point.slots,
            "makespan_s": point.makespan,
            "bound_s": point.bound,
            "gap": gap_above(point.makespan, point.bound),
            **paid(point.replicas, point.makespan, options.price),
        }
        for point in comparison.points
    ]
    if options.json:
        say(json.dumps({"sweep": rows}))
        return 0
    say(f"{comparison.requests:,} requests, {seconds_basis(comparison.cost_source)}")
    priced = rows[0]["money"] is not None
    say("  replicas   slots      makespan s       bound s      gap   device-hours" + "        money" * priced)
    for row in rows:
        bound, gap = row["bound_s"], row["gap"]
        proven = f"{bound:13,.2f} {gap:8.2%}" if bound is not None else f"{'-':>13} {'-':>8}"
        money = f" {row['money']:12,.2f}" if priced else ""
        say(
            f"  {row['replicas']:8,d} {row['slots']:7,d} {row['makespan_s']:15,.2f} {proven}"
            f" {row['device_hours']:14,.4f}{money}"
        )
    return 0


def interrupted(stopped_by: str, output: object) -> int:
    """Note an interrupted search; return the exit status."""
    if stopped_by != StoppedBy.INTERRUPT:
        return 0
    note(f"interrupted: {output} holds the best plan found until then")
    return INTERRUPTED


def paid(replicas: int, makespan: float, price: float | None) -> dict[str, object]:
    """Return device-hours and their cost, by JSON key."""
    hours = device_hours(replicas, makespan)
    return {"device_hours": hours, "money": None if price is None else price * hours}


def seconds_basis(cost_source: Mapping[str, object]) -> str:
    """Return the model and device that a plan's seconds are for."""
    engine = cost_source.get("engine")
    if isinstance(engine, Mapping) and engine:
        return f"in the seconds of {engine.get('model')} on {engine.get('device')}"
    if cost_source.get("name") in ("paper", ASSUMED):
        return "in the seconds of a LLaMA-65B: see --cost"
    return f"in the seconds of {cost_source.get('name')}"
