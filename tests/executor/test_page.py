"""The page of a report: what it holds, and that a browser draws it."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet
from batchbound.data.problem import Problem
from batchbound.data.report import Report
from batchbound.data.workload import Workload, numbered_ids
from batchbound.executor.reports.gantt import Panel
from batchbound.executor.reports.page import save_page
from batchbound.executor.reports.report import report
from batchbound.heuristics.loop import execute
from batchbound.heuristics.policy import UNTIL_CHANGE, State, Step
from batchbound.heuristics.simulator import Simulator
from batchbound.models.bounds.fleet import fleet_bound

COST = CostModel(prefill_base=1.0, prefill_per_token=0.5, decode_base=1.0, decode_per_slot=0.5)
NASTY = "</script><b>&\N{SNOWMAN}\n"


def first_come(state: State) -> Step:
    chosen = np.flatnonzero(state.waiting)[: len(state.free_slots)]
    return Step(chosen.tolist(), state.free_slots[: len(chosen)].tolist(), UNTIL_CHANGE)


def names(count: int) -> tuple[str, ...]:
    return tuple(numbered_ids(count).tolist())


def panel(ids: tuple[str, ...]) -> Panel:
    lengths = 3 + np.arange(len(ids)) % 5
    problem = Problem(Workload(np.array(ids), lengths, 2 * lengths, np.zeros(len(ids))), COST, slots=3)
    trace = execute(problem, first_come, Simulator(problem))
    found = report(problem, trace, fleet_bound(Fleet.of(problem, 1)), trace.makespan)
    return Panel("Plan", trace, found)


def content(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    found: dict[str, Any] = json.loads(data)
    return found


def column(packed: dict[str, str]) -> list[Any]:
    raw = gzip.decompress(b64decode(packed["gzip"]))
    if packed["kind"] == "text":
        found: list[Any] = json.loads(raw)
        return found
    listed: list[Any] = np.frombuffer(raw, dtype=f"<{packed['kind']}").tolist()
    return listed


def test_the_page_holds_every_request_at_its_slot_and_seconds(tmp_path: Path) -> None:
    drawn = panel(("a", NASTY, "c", "d", "e"))
    save_page(tmp_path / "page.html", drawn.report, [drawn])
    (shown,) = content(tmp_path / "page.html")["panels"]
    trace = drawn.trace
    packed = {name: column(value) for name, value in shown["packed"].items()}
    assert packed["ids"] == list(trace.ids)
    assert packed["slot"] == trace.slot_of.tolist()
    assert packed["finished"] == trace.finished.tolist()
    assert packed["start"] == trace.prefilled.tolist()
    stages = [trace.stages[k] for k in trace.stage_of]
    assert packed["ready"] == [stage.end for stage in stages]
    prefills = [edge for each in trace.stages if each.kind == "prefill" for edge in (each.start, each.end)]
    assert packed["stalls"] == prefills


def test_the_shares_of_the_slots_time_add_up_to_all_of_it(tmp_path: Path) -> None:
    drawn = panel(names(7))
    save_page(tmp_path / "page.html", drawn.report, [drawn])
    (shown,) = content(tmp_path / "page.html")["panels"]
    assert sum(share for _, _, share in shown["shares"]) == pytest.approx(1)


def test_the_headline_gives_the_gap_to_the_bound_or_says_that_there_is_none(tmp_path: Path) -> None:
    drawn = panel(names(7))
    save_page(tmp_path / "page.html", drawn.report, [drawn])
    gap = drawn.report.run_gap
    assert gap is not None
    assert f"{100 * gap:.2f} % above the proven bound" in content(tmp_path / "page.html")["headline"]
    unproven: Report = replace(drawn.report, run_bound=None, bound=None)
    save_page(tmp_path / "page.html", unproven, [Panel("Plan", drawn.trace, unproven)])
    assert "nothing is proven" in content(tmp_path / "page.html")["headline"]


def test_the_page_asks_nobody_for_anything(tmp_path: Path) -> None:
    drawn = panel(names(3))
    save_page(tmp_path / "page.html", drawn.report, [drawn])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(", text)


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    drawn = panel(names(9))
    for name in ("one.html", "two.html"):
        save_page(tmp_path / name, drawn.report, [drawn])
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_draws_it_to_the_end(tmp_path: Path) -> None:
    drawn = panel((NASTY, *names(20)))
    save_page(tmp_path / "page.html", drawn.report, [drawn])
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom"]
    flags += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}"]
    command = ["chromium", *flags, (tmp_path / "page.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.search(r"<body data-ready=\"\d+\"", shown)
    assert 'style="width' in shown
