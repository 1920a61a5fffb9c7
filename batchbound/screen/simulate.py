"""Screen of ``batchbound simulate``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..data.figures import duration, percent, signed_percent
from ..data.lengths.interval import COVERAGE
from ..executor.reports.tables import Row, rows_without_costs
from ..options.simulate import SimulateOptions
from ..simulating import Simulation
from .report import show_report, show_rows
from .streams import say
from .terminal import note


def show(simulation: Simulation, options: SimulateOptions) -> int:
    """Print the report, or the figures of hidden lengths."""
    report = simulation.report
    if simulation.assumes_costs:
        what = (
            "no seconds, and shares at the costs of a LLaMA-65B" if isinstance(report, dict) else "no seconds"
        )
        what = "seconds are those of a LLaMA-65B" if options.json else what
        tell = note if options.json else say
        tell(f"no --cost: {what}; --model M takes the costs that a run of M kept")
    if not isinstance(report, dict):
        if simulation.assumes_costs and not options.json:
            show_rows(rows_without_costs(report))
        else:
            show_report(report, as_json=options.json)
    elif options.json:
        say(json.dumps(report))
    else:
        show_rows(_rows(report, priced=not simulation.assumes_costs))
    return 0


def _rows(found: Mapping[str, Any], *, priced: bool) -> list[Row]:
    """Return the lines of hidden lengths; without prices none in seconds."""
    shares = {
        "gap": "above the bound",
        "recovered": "of FCFS's loss recovered",
        "intraclass_correlation": "correlation within a group (ICC)",
        "saved": "less time than FCFS with a barrier",
        "stale_share": "completions begun in an earlier step",
        "kept_length_bias": "kept completions longer by",
        "early_length_bias": "completions before the last step longer by",
    }
    seconds = {
        "makespan_s": "makespan",
        "fcfs_s": "first come, first served",
        "fcfs_barrier_s": "FCFS with a barrier",
        "measured_s": "measured generation",
        "training_s": "between two steps",
        "bound_s": "bound with lengths known",
    }
    rows = []
    for key, value in found.items():
        if key in seconds:
            note = str(found.get("bound_source", "")) if key == "bound_s" else ""
            rows.append(Row("seconds", seconds[key], duration(value), note))
        elif key == "intraclass_correlation" and value is None:
            rows.append(Row("shares", shares[key], "unknown", "no group has two requests"))
        elif key in shares:
            rows.append(Row("shares", shares[key], "none lost" if value is None else percent(value), ""))
        elif key == "expected_mean_s":
            between = f"{duration(found['expected_low_s'])} to {duration(found['expected_high_s'])}"
            rows.append(
                Row("seconds", "expected", duration(value), f"{percent(COVERAGE, 0)} within {between}")
            )
        elif key == "staleness_steps":
            rows.append(Row("counts", "age of a completion in steps", f"{value:.3f}", ""))
        elif key == "measured_over_simulated":
            rows.append(
                Row(
                    "counts",
                    "measured over simulated seconds",
                    f"{value:.2f}",
                    "median step, if it ran with these options",
                )
            )
        elif key == "most_steps_per_hour":
            rows.append(Row("counts", _PER_HOUR, f"{value:,.1f}", "any order, any staleness"))
        elif key == "changes":
            rows += [_change(changed) for changed in sorted(value, key=lambda each: -each["saved"])]
        elif isinstance(value, int | str) and key != "bound_source":
            rows.append(Row("counts", key.replace("_", " "), str(value), ""))
    if not priced:
        rows = [row for row in rows if row.group != "seconds" and row.name != _PER_HOUR]
        rows = [replace(row, value="") if row.group == "instead" else row for row in rows]
    return sorted(rows, key=lambda row: ("seconds", "shares", "counts", "instead").index(row.group))


_PER_HOUR = "steps an hour at most"


def _change(changed: Mapping[str, Any]) -> Row:
    """Return what a change of the steps would save, and what it would train on."""
    notes = [f"{percent(changed['saved'], 0)} less"]
    if changed["saved_of_steps"] != changed["saved"]:
        notes.append(f"{percent(changed['saved_of_steps'], 0)} of whole steps")
    if changed["stale_share"]:
        notes.append(f"{percent(changed['stale_share'], 0)} stale")
    if abs(changed["kept_length_bias"]) >= 0.0005:
        notes.append(f"kept {signed_percent(changed['kept_length_bias'])} long")
    return Row("instead", changed["change"], duration(changed["makespan_s"]), ", ".join(notes))
