"""Report as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...data.bound import PROVEN_WITHIN
from ...data.configuration import Reached
from ...data.expectation import Expectation
from ...data.figures import duration, number, percent, signed_percent
from ...data.report import (
    BETWEEN,
    BUBBLES,
    BUSY,
    DECODE,
    NO_ARRIVAL,
    PREFILL,
    STALL,
    TAIL,
    TOOLS,
    WAITING,
    Percentiles,
    Report,
)

if TYPE_CHECKING:
    from rich.table import Table


MODEL_CLOCK = "Model seconds"
"""Heading of the quantities in model seconds."""

PLAN_PACE = "At the plan's pace"
"""The same of a measured run, whose end screen has bounds in measured seconds."""


WORK, RATE = "Work", "tokens/s"
"""Heading of exact counts, and its only figure that needs seconds."""


@dataclass(frozen=True, slots=True)
class Row:
    """Line of the table.

    group: Heading of its section.
    name, value: Name of a figure and its value with unit.
    note: Reference of the figure.
    """

    group: str
    name: str
    value: str
    note: str = ""


def report_rows(report: Report) -> list[Row]:
    """Return the lines of a report, group by group."""
    return [
        *_makespan_rows(report),
        *_measured_rows(report),
        *_reached_rows(report.reached),
        *_slot_rows(report),
        *_throughput_rows(report),
        *_latency_rows(report),
        *_replica_rows(report),
    ]


def rows_without_costs(report: Report) -> list[Row]:
    """Return the lines of a report that hold whatever the costs; of a run also those it measured."""
    priced = ("machine's pace", "missed by the model", "plan's prediction", "padding")
    rows = [
        row
        for row in report_rows(report)
        if row.group not in (MODEL_CLOCK, PLAN_PACE) and row.name not in priced
    ]
    if report.clock == "model":
        rows = [row for row in rows if row.group == WORK and row.name != RATE]
    return rows


def rows_table(rows: Sequence[Row]) -> Table:
    """Return lines as a table of rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    group = ""
    for row in rows:
        heading = "" if row.group == group else row.group
        group = row.group
        table.add_row(*(Text(part) for part in (heading, row.name, row.value, row.note)))
    return table


def _makespan_rows(report: Report) -> list[Row]:
    group = MODEL_CLOCK if report.clock == "model" else PLAN_PACE
    rows = []
    if report.planned_makespan is not None:
        rows.append(Row(group, "planned", duration(report.planned_makespan)))
    if report.expected is not None:
        rows.append(_expected_row(report.expected, group))
    note = "simulated" if report.clock == "model" else "what the cost model gives the stages that ran"
    rows.append(Row(group, "run", duration(report.model_makespan), note))
    rows += _bound_rows(report, group)
    rows.append(_run_gap_row(report, group))
    if report.fit is not None:
        fit = report.fit
        note = f"mean, of {fit.prefill_stages} prefill stages and {fit.decode_steps} decode steps"
        errors = f"{percent(fit.prefill_mape)} / {percent(fit.decode_mape)}"
        rows.append(Row(group, "error of the fit", errors, note))
    return rows


def _measured_rows(report: Report) -> list[Row]:
    if report.clock == "model":
        return []
    group = "Measured seconds"
    rows = [Row(group, "makespan", duration(report.makespan))]
    if report.pace is not None and report.missed is not None:
        note = "measured for each model second, in the median stage"
        rows.append(Row(group, "machine's pace", f"{report.pace:.2f} x", note))
        note = "measured over model seconds at that pace, all stages"
        rows.append(Row(group, "missed by the model", signed_percent(report.missed), note))
    if report.between is not None and report.makespan:
        note = f"{percent(report.between / report.makespan)} of the time: the program's own"
        rows.append(Row(group, "outside stages", duration(report.between), note))
    if report.plan_error is not None:
        rows.append(
            Row(group, "plan's prediction", signed_percent(report.plan_error), "against the makespan")
        )
    return rows


def _reached_rows(reached: Reached | None) -> list[Row]:
    if reached is None:
        return []
    group, slowdown = "Steady state", reached.slowdown
    planned = f"planned {number(reached.planned_throughput)}: {signed_percent(reached.error)}"
    rows = [Row(group, "requests/s", number(reached.throughput), planned)]
    if slowdown is not None:
        rows.append(Row(group, "machine slower by", f"{slowdown:.2f} x", "than while it was profiled"))
    note = f"planned {duration(reached.planned_latency)}"
    if reached.latency_bound is not None:
        met = "met" if reached.bound_met else "missed"
        note += f"; the bound of {duration(reached.latency_bound)} is {met}"
    rows.append(Row(group, "latency p99", duration(reached.latency), note))
    return rows


def _bound_rows(report: Report, group: str) -> list[Row]:
    if report.bound is None:
        rows = [Row(group, "bound", "-", "nothing is proven")]
    else:
        usual = "every schedule that evicts no request" if report.evictions else "every schedule"
        which = report.bound_of or usual
        rows = [Row(group, "bound", duration(report.bound), f"proven of {which}: {report.bound_source}")]
    if report.run_bound is not None and report.run_bound != report.bound:
        note = "proven, for the requests served and the lengths that came out"
        note += ", even if some are evicted" if report.evictions else ""
        rows.append(Row(group, "bound of the run", duration(report.run_bound), note))
    if report.plan_gap is not None:
        gap = percent(report.plan_gap, 2)
        rows.append(Row(group, "gap of the plan", gap, "planned against bound, exact"))
    return rows


def _expected_row(expected: Expectation, group: str) -> Row:
    low, high = duration(expected.low), duration(expected.high)
    note = (
        f"{low} to {high} with {percent(expected.coverage, 0)}, over lengths that may come out;"
        f" follows {expected.what()}"
    )
    return Row(group, "expected", duration(expected.mean), note)


def _run_gap_row(report: Report, group: str) -> Row:
    name = "gap of the run"
    if report.run_gap is not None and report.schedule_gap is not None:
        note = "run against bound, by the plan's cost model"
        parts = {"padding read": report.padding_seconds, "changes of the batch": report.change_seconds}
        if any(parts.values()) and report.run_bound:
            note += f": {percent(report.schedule_gap, 2)} by its schedule"
            added = report.run_gap - report.schedule_gap
            shares = {cause: seconds / report.run_bound for cause, seconds in parts.items() if seconds}
            if abs(sum(shares.values()) - added) > PROVEN_WITHIN:
                # Early replicas and waiting times take up some of it.
                shares = {" and ".join(shares): added}
            note += "".join(f", {percent(share, 2)} by {cause}" for cause, share in shares.items())
        return Row(group, name, percent(report.run_gap, 2), note)
    if report.bound is None:
        return Row(group, name, "-", "no bound")
    if report.resumed:
        return Row(group, name, "-", f"{report.resumed} requests were answered by an earlier run")
    return Row(group, name, "-", f"{report.lengths.wrong} completions had another length than planned")


def _slot_rows(report: Report) -> list[Row]:
    group = f"Time of {report.slots} slots"
    rows = [
        Row(
            group,
            "utilization",
            percent(report.utilization),
            "full decode steps' seconds / makespan",
        )
    ]
    notes = {
        DECODE: "",
        PREFILL: "of its own request",
        STALL: "paused while others are prefilled",
        WAITING: "free while a request waits",
        TAIL: "free, none left to start",
        NO_ARRIVAL: "free, the next is to come",
        TOOLS: "free, the next turn waits for its tool",
        BETWEEN: "occupied while no stage runs",
    }
    for cause in (*BUSY, *BUBBLES, TOOLS):
        if cause in BUSY or report.slot_seconds.get(cause):
            note = f"{number(report.slot_seconds[cause])} slot-s " + notes[cause]
            rows.append(Row(group, cause, percent(report.share(cause)), note))
    return rows


def _throughput_rows(report: Report) -> list[Row]:
    group = WORK
    rows = [
        Row(
            group,
            "requests",
            f"{report.requests:,}",
            f"{report.resumed:,} more answered before, or failed" * bool(report.resumed),
        ),
        Row(
            group,
            "prefill stages",
            f"{report.prefill_stages:,}",
            report.repeats or f"{report.prompt_tokens:,} prompt tokens",
        ),
        Row(group, "decode steps", f"{report.decode_steps:,}", f"{report.output_tokens:,} output tokens"),
        Row(
            group,
            RATE,
            number(report.output_tokens_per_second),
            f"of completions; {number(report.total_tokens_per_second)} with prompts",
        ),
    ]
    if report.padding:
        note = f"of the KV cache read: {duration(report.padding_seconds)}, model seconds"
        rows.append(Row(group, "padding", percent(report.padding), note))
    if report.evictions:
        rows.append(Row(group, "evictions", f"{report.evictions:,}", "requests evicted and prefilled again"))
    if report.moved:
        rows.append(Row(group, "moved", f"{report.moved:,}", "to another replica than planned"))
    if report.lengths.wrong:
        note = (
            f"on average, {report.lengths.bias:+.1f} planned minus actual; {report.lengths.wrong:,} requests"
        )
        rows.append(Row(group, "lengths off by", f"{report.lengths.mean_absolute:.1f} tokens", note))
    return rows


def _latency_rows(report: Report) -> list[Row]:
    group = "Latency p50/p90/p99"
    rows = (
        ("finish", report.finish, "arrival to last token"),
        ("TTFT", report.first_token, "arrival to first token"),
        ("TPOT", report.per_token, "per token after the first"),
    )
    return [Row(group, name, _three(value), note) for name, value, note in rows if value is not None]


def _replica_rows(report: Report) -> list[Row]:
    rows, group = [], f"{len(report.replicas)} replicas"
    for k, replica in enumerate(report.replicas):
        planned = f"; planned {duration(report.planned_ends[k])}" if report.planned_ends else ""
        note = f"no completion{planned}"
        if replica is not None:
            gap = "" if replica.run_gap is None else f", gap {percent(replica.run_gap, 2)}"
            note = (
                f"{replica.requests:,} completions{gap}, utilization {percent(replica.utilization)},"
                f" {replica.prefill_stages:,} stages, {replica.decode_steps:,} decode steps{planned}"
            )
        if k in report.lost:
            note += f"; died ({report.lost[k]}), its unfinished requests ran elsewhere"
        rows.append(
            Row(group, f"replica {k}", duration(0.0 if replica is None else replica.model_makespan), note)
        )
    return rows


def _three(value: Percentiles) -> str:
    largest = max(value.p50, value.p90, value.p99)
    scale, unit = (1.0, "s") if largest >= 1 else (1e3, "ms")
    parts = (number(part * scale) for part in (value.p50, value.p90, value.p99))
    return " / ".join(parts) + f" {unit}"
