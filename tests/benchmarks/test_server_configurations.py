"""Recorded runs of vLLM in several configurations: no count below a claimed bound, none unexplained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server_configurations import RUNS, recorded_runs, rows

from batchbound.data.claims.assumptions import ONE_ENGINE, ONE_TOKEN
from batchbound.data.readers.server_metrics import parse_metrics
from batchbound.models.certificates.iterations import verify_iterations

RECORDED = [(f"{entry['name']}, {entry['sent']}", entry, audit) for entry, audit in recorded_runs()]
NAMES = [name for name, _, _ in RECORDED]


@pytest.mark.parametrize("name", NAMES)
def test_no_iterations_are_counted_below_a_claimed_bound_and_none_go_unexplained(name: str) -> None:
    (audit,) = (found for label, _, found in RECORDED if label == name)
    assert verify_iterations(audit.sequences, audit.limits, audit.bound, audit.drafts) is None
    assert audit.broken is None
    if audit.counted is None:
        assert any(one.name == ONE_ENGINE and one.basis == "broken" for one in audit.assumptions)
        return
    assert audit.counted >= audit.bound.iterations
    assert sum(audit.losses.values()) == audit.counted - audit.bound.iterations
    assert min(audit.losses.values()) >= 0


def test_the_pages_of_a_run_tell_what_its_trace_recorded() -> None:
    planned = [entry for _, entry, _ in RECORDED if entry["sent"] == "in the plan's order"]
    assert len(planned) == len({entry["name"] for entry in planned})
    for entry in planned:
        before, after = (
            parse_metrics((RUNS / f"{entry['name']}.{when}.txt").read_text()) for when in ("before", "after")
        )
        server = entry["server"]
        assert (after.engine, after.engines, after.speculates) == (
            "vllm",
            server["engines"],
            server["speculates"],
        )
        assert after.prefix_caching == server["prefix_caching"]
        assert after.preemptions is not None
        assert after.iterations is not None
        assert server["preemptions"] == after.preemptions - (before.preemptions or 0)
        if server["iterations"] is not None:
            assert server["iterations"] == after.iterations - (before.iterations or 0)


def test_drafts_are_allowed_for_and_windows_take_the_bound_by_kv_away() -> None:
    found = {entry["name"]: audit for _, entry, audit in RECORDED}
    assert found["drafts"].drafts == 4
    assert any(one.name == ONE_TOKEN and one.basis == "broken" for one in found["drafts"].assumptions)
    assert found["window"].bound.source not in ("KV", "packing")
    assert found["plain"].label == "proven least"


def test_the_published_table_is_that_of_the_recorded_runs() -> None:
    results = Path(__file__).parents[2] / "docs" / "results.json"
    assert json.loads(results.read_text(encoding="utf-8"))["configurations"]["rows"] == rows()
