"""Report as one page for a browser."""

from __future__ import annotations

import gzip
import json
import os
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from ...data.figures import duration, percent
from ...data.files.disk import atomic_write
from ...data.report import BUBBLES, BUSY, Report
from .bubbles import idle_causes, stage_edges
from .gantt import WORDS, Panel
from .tables import report_rows

Cells = tuple[str, str, str, str, str]
"""Cells of a line of the gain: name, decode steps, prefill stages, seconds, note."""

HEADING: Cells = ("", "decode steps", "prefill stages", "seconds", "")


def save_page(
    path: str | os.PathLike[str], report: Report, panels: Sequence[Panel], gain: Sequence[Cells] = ()
) -> None:
    """Write a report as one HTML file."""
    with atomic_write(path) as stream:
        stream.write(page(report, panels, gain))


def page(report: Report, panels: Sequence[Panel], gain: Sequence[Cells] = ()) -> str:
    """Return a report as one HTML page.

    gain: Lines of the run's end screen, which stand on top.
    """
    content = {
        "gain": [HEADING, *gain] if gain else [],
        "headline": _headline(report),
        "subline": _subline(report),
        "cards": _cards(report),
        "rows": [(row.group, row.name, row.value, row.note) for row in report_rows(report)],
        "panels": [_packed(panel) for panel in panels],
    }
    # A request's name may hold "</script>", so the data is escaped.
    text = json.dumps(content, allow_nan=False).replace("<", "\\u003c")
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("__DATA__", text)


def _headline(report: Report) -> str:
    verb = "the plan takes" if report.clock == "model" else "the run took"
    if report.run_gap is None or report.run_bound is None:
        return f"{report.requests:,} requests: {verb} {duration(report.makespan)}; nothing is proven of it"
    gap, bound = percent(report.run_gap, 2), duration(report.run_bound)
    return (
        f"{report.requests:,} requests: {verb} {duration(report.makespan)}, {gap} above the proven bound"
        if report.clock == "model"
        else f"{report.requests:,} requests: {verb} {duration(report.makespan)};"
        f" at the plan's pace {duration(report.model_makespan)}, {gap} above the proven bound of {bound}"
    )


def _subline(report: Report) -> str:
    replicas = f" on {len(report.replicas)} replicas" if report.replicas else ""
    engine = report.engine.get("name", report.engine.get("engine"))
    by = f", by {engine}" if isinstance(engine, str) else ""
    repeats = f" {report.repeats[:1].upper()}{report.repeats[1:]}." if report.repeats else ""
    return (
        f"{report.slots:,} slots{replicas}{by}. The gap and the picture are in the cost model's seconds;"
        f" measured seconds are named so.{repeats}"
    )


def _cards(report: Report) -> list[tuple[str, str, str]]:
    simulated = report.clock == "model"
    cards = [
        (
            "makespan",
            duration(report.makespan),
            "simulated, model seconds" if simulated else "measured seconds",
        )
    ]
    if report.run_bound is not None and report.run_gap is not None:
        cards.append(("above the proven bound", percent(report.run_gap, 2), "in model seconds"))
        cards.append(("proven bound", duration(report.run_bound), "no order takes less, in model seconds"))
    cards.append(("slots used", percent(report.utilization), "of what full decode steps would need"))
    if not simulated and report.planned_makespan is not None:
        cards.append(("planned", duration(report.planned_makespan), "model seconds"))
    if report.pace is not None:
        cards.append(
            ("machine's pace", f"{report.pace:.2f} x", "the cost model's seconds, in the median stage")
        )
    return cards


def _packed(panel: Panel) -> dict[str, object]:
    trace, report = panel.trace, panel.report
    served = np.flatnonzero(trace.stage_of >= 0)
    start, end = stage_edges(trace)
    prefill = np.array([stage.kind == "prefill" for stage in trace.stages], dtype=np.bool_)
    stage = trace.stage_of[served]
    finished = np.where(np.isfinite(trace.finished[served]), trace.finished[served], trace.makespan)
    before = np.append(0.0, end[:-1])[: len(start)]
    apart = start > before
    idle = idle_causes(trace) if trace.stages else None
    bound = report.run_bound
    shares = [(cause, WORDS[cause], report.share(cause)) for cause in (*BUSY, *BUBBLES)]
    return {
        "title": panel.title,
        "slots": trace.slots,
        "end": max(trace.makespan, bound or 0.0),
        "bound": bound,
        "note": _note(panel),
        "shares": [share for share in shares if share[0] in BUSY or share[2] >= 0.0005],
        "causes": [] if idle is None else idle.causes,
        "packed": {
            "start": _array(start[stage], "f8"),
            "ready": _array(end[stage], "f8"),
            "finished": _array(finished, "f8"),
            "slot": _array(trace.slot_of[served], "u4"),
            "tokens": _array(trace.tokens[served], "u4"),
            "stalls": _array(np.stack((start[prefill], end[prefill]), axis=1).ravel(), "f8"),
            "betweens": _array(np.stack((before[apart], start[apart]), axis=1).ravel(), "f8"),
            "idle": _array(np.zeros(0) if idle is None else idle.times, "f8"),
            "ids": {"kind": "text", "gzip": _gzip(json.dumps([trace.ids[k] for k in served]).encode())},
        },
    }


def _note(panel: Panel) -> str:
    report = panel.report
    clock = "" if panel.measured is None else f", measured {duration(panel.measured)}"
    if report.run_bound is None or report.run_gap is None:
        return f"{panel.title}{clock}: {duration(panel.trace.makespan)}; nothing is proven of it."
    gap, bound = percent(report.run_gap, 2), duration(report.run_bound)
    return (
        f"{panel.title}{clock}: {duration(report.makespan)} of model seconds, {gap} above the proven bound of"
        f" {bound} (the dashed line). A request's shade tells the length of its completion."
    )


def _array(values: npt.NDArray[Any], kind: str) -> dict[str, str]:
    return {"kind": kind, "gzip": _gzip(np.ascontiguousarray(values, dtype=f"<{kind}").tobytes())}


def _gzip(content: bytes) -> str:
    # Without a date, the same run gives the same page.
    return b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode("ascii")
