"""A fleet's report as a table for people."""

from __future__ import annotations

from ...data.report import Report
from .fleet_report import FleetReport
from .tables import Row, bound_rows, duration, percent


def fleet_rows(report: FleetReport) -> list[Row]:
    """Return the lines of a fleet's report: the makespan, the work, and a line for each replica."""
    clocks = {each.clock for each in report.replicas if each is not None}
    measured = "measured" in clocks
    group = "Makespan"
    rows = [
        Row(group, "planned", duration(report.planned_makespan), "model seconds"),
        Row(group, "run", duration(report.makespan), "measured" if measured else "simulated"),
    ]
    if measured:
        note = "what the cost models give the replicas' stages"
        rows.append(Row(group, "run, in model seconds", duration(report.model_makespan), note))
    rows += bound_rows(report, group)
    if report.run_gap is not None:
        note = "model seconds, padding included" if measured else "run against bound"
        rows.append(Row(group, "gap of the run", percent(report.run_gap, 2), note))
    before = f"{report.resumed:,} more were answered before, or are not yet" * bool(report.resumed)
    rows.append(Row("Work", "requests", f"{report.requests:,}", before))
    if report.moved:
        rows.append(Row("Work", "moved", f"{report.moved:,}", "served by another replica than planned"))
    rows.append(Row("Work", "tokens/s", f"{report.output_tokens_per_second:,.0f}", "of answers"))
    for k, (each, end) in enumerate(zip(report.replicas, report.planned_ends, strict=True)):
        value = duration(each.model_makespan if each is not None else 0.0)
        note = _replica_note(each, end)
        if k in report.lost:
            note += f"; died ({report.lost[k]}), its unfinished requests ran elsewhere"
        rows.append(Row(f"{len(report.replicas)} replicas", f"replica {k}", value, note))
    return rows


def _replica_note(report: Report | None, planned_end: float) -> str:
    planned = f"planned {duration(planned_end)}"
    if report is None:
        return f"no answer; {planned}"
    gap = "" if report.run_gap is None else f", gap {percent(report.run_gap, 2)}"
    return (
        f"{report.requests:,} answers{gap}, utilization {percent(report.utilization)},"
        f" {report.prefill_stages:,} stages, {report.decode_rounds:,} rounds; {planned}"
    )
