"""The arena's table, plots and submissions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import arena
import numpy as np
import pytest
from arena_jobs import PUBLISHED as LICENSED
from arena_jobs import REGIMES, arena_job

import batchbound
from batchbound.comparing.instance_library import arena as instances
from batchbound.data.iteration_plan import IterationPlan
from batchbound.heuristics.serving.published import PUBLISHED, Queue
from batchbound.planning.iterations import Engines, make_iteration_plan
from batchbound.run_job.replaying import in_order
from batchbound.solvers.result import Limits


def measured(objective: str, regime: str, count: int = 90) -> dict[str, object]:
    job, limits = arena_job("paper", regime, 3, count)
    key = {"source": "paper", "regime": regime, "seed": 3, "objective": objective}
    return arena.measured(key, job, limits, PUBLISHED, Limits(work=20))


@pytest.mark.parametrize("objective", arena.OBJECTIVES)
def test_no_order_beats_the_search_and_page_and_plots_are_made(objective: str, tmp_path: Path) -> None:
    rows = [measured(objective, regime) for regime in REGIMES]
    for row in rows:
        values = row["values"]
        assert isinstance(values, dict)
        assert objective == "makespan" or values["search"] == min(values.values())
        assert values["search"] >= row["least"]
    results = {"command": "`x`", "seconds": 1.0, "rows": rows}
    arena.draw(results, tmp_path / "arena.svg")
    assert "<svg" in (tmp_path / "arena.svg").read_text(encoding="utf-8")
    lines = arena.page(results).splitlines()
    assert lines[0].endswith("| slots | KV | tokens |")
    # The smallest mean gap first.
    assert objective == "makespan" or lines[2].startswith("| `search` |")
    # The two orders by prefix equal the file's.
    assert len(lines) == 2 + 1 + len(PUBLISHED) - 2 + 2


def test_the_page_is_made_of_the_results() -> None:
    results = json.loads(arena.RESULTS.read_text(encoding="utf-8"))
    assert {row["source"] for row in results["rows"]} == set(arena.PUBLIC)
    assert arena.page(results) in arena.PAGE.read_text(encoding="utf-8")


def test_every_instance_of_the_library_holds_and_is_published() -> None:
    assert len(instances()) == 24
    for name, plan in instances().items():
        assert plan.check() is None, name
        assert name.startswith(tuple(LICENSED))
    assert batchbound.verify(instances()["gsm8k-kv-total"]) is None


def test_a_better_plan_of_an_instance_is_taken_and_a_worse_or_forged_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "LIBRARY", tmp_path)
    job, limits = arena_job("paper", "KV", 1, 90)
    objective = arena.objective_of("total", 90)
    better = make_iteration_plan(job, Engines((limits,)), limits=Limits(work=50), objective=objective)
    first = in_order(better, "longest-first")
    assert arena.keep(first, tmp_path / "paper-kv-total.json")
    submission = tmp_path / "mine" / "plan.json"
    submission.parent.mkdir()
    better.save(submission)
    assert better.value is not None
    assert first.value is not None
    assert better.value < first.value
    assert "is now" in arena.submit(submission)
    assert IterationPlan.load(tmp_path / "paper-kv-total.json").value == better.value
    first.save(submission)
    assert "stays" in arena.submit(submission)
    share = first.shares[0]
    assert share.predicted is not None
    forged = replace(share, predicted=replace(share.predicted, value=better.value - 1))
    replace(first, shares=(forged,)).save(submission)
    assert "refused" in arena.submit(submission)
    other, _ = arena_job("paper", "KV", 2, 90)
    make_iteration_plan(other, Engines((limits,)), limits=Limits(work=1), objective=objective).save(
        submission
    )
    assert "of no instance" in arena.submit(submission)


def test_a_rule_of_your_own_takes_ten_lines(tmp_path: Path) -> None:
    page = arena.PAGE.read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) <= 10
    file = tmp_path / "mine.py"
    file.write_text(code, encoding="utf-8")
    name, rule = arena.rule_of(f"{file}:rule")
    queue = Queue(np.array([4, 1]), np.array([5, 2]), 2)
    assert (name, rule(queue).tolist()) == ("rule", [1, 0])
