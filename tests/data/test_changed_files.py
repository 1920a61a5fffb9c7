"""Files of ours that somebody changed: whatever it is, the field is named, or the file can still be read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound.data.costs.cost import CalibratedCost, CostModel, FitError
from batchbound.data.files.disk import InputError
from batchbound.data.files.record import plain
from batchbound.data.fleet import Fleet
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.readers.server_run import ServerCount, ServerRun
from batchbound.data.report import Report
from batchbound.data.trace import Trace
from batchbound.executor.reports.report import report
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.planning.fleet import make_fleet_plan
from batchbound.planning.plan import make_plan
from batchbound.solvers.result import Limits

VALUES: tuple[object, ...] = (None, "x", -1, 0, 1.5, True, [], {}, 10**30, float("nan"), [None], ["x"], [-1])


def problem() -> Problem:
    return Problem(generate("table3", 0, 3), CostModel.paper(), 2)


def places(value: object, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where something stands in a JSON value, the first two entries of every list."""
    if place:
        yield place
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*place, name))
    elif isinstance(value, list):
        for index in range(min(2, len(value))):
            yield from places(value[index], (*place, index))


def changed(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the value with one place in it set to something else, or gone."""
    for place in places(value):
        for other in (*VALUES, ...):
            whole = copy.deepcopy(value)
            inner: Any = whole
            for step in place[:-1]:
                inner = inner[step]
            if other is ...:
                del inner[place[-1]]
            else:
                inner[place[-1]] = other
            yield whole


def plan_file() -> Mapping[str, object]:
    return make_plan(problem(), limits=Limits(work=1)).to_json()


def fleet_file() -> Mapping[str, object]:
    return make_fleet_plan(Fleet.of(problem(), 2), limits=Limits(work=1)).to_json()


def cost_file() -> Mapping[str, object]:
    error = FitError(0.1, 0.1, 0.0, 4, 4)
    whole: dict[str, object] = plain(
        CalibratedCost(CostModel.paper(), error, {"name": "e"}, "2026-01-01", (1, 2), (8, 16))
    )
    return whole


def report_file() -> Mapping[str, object]:
    trace = simulate(problem(), policy_named("fcfs", problem()))
    return report(problem(), trace, None, None).to_json()


def rewrite(path: Path, text: str) -> None:
    # Some file systems write a file that was cut to nothing to the disk at once; a new one may wait.
    path.unlink(missing_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("made", "load"),
    [
        (plan_file, Plan.load),
        pytest.param(fleet_file, Plan.load, marks=pytest.mark.slow),
        (cost_file, CalibratedCost.load),
        (report_file, Report.load),
    ],
)
def test_a_changed_file_is_named_or_read(
    made: Callable[[], dict[str, Any]], load: Callable[[Path], object], tmp_path: Path
) -> None:
    path, refused = tmp_path / "file.json", 0
    for value in changed(json.loads(json.dumps(made()))):
        rewrite(path, json.dumps(value))
        try:
            load(path)
        except InputError as error:
            assert "file.json" in str(error)  # noqa: PT017
            refused += 1
    assert refused > 100


def test_a_changed_trace_is_named_or_can_be_reported(tmp_path: Path) -> None:
    path, refused = tmp_path / "trace.jsonl", 0
    simulate(problem(), policy_named("fcfs", problem())).save(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number in (0, 1, 2, len(rows) - 1):
        for value in changed(rows[number]):
            rewrite(
                path, "".join(json.dumps(row) + "\n" for row in [*rows[:number], value, *rows[number + 1 :]])
            )
            try:
                trace = Trace.load(path)
            except InputError as error:
                assert "trace.jsonl" in str(error)  # noqa: PT017
                refused += 1
            else:
                if set(trace.ids) <= set(problem().workload.ids.tolist()):
                    assert np.isfinite(report(problem(), trace, None, None).makespan)
    assert refused > 100


def test_a_changed_run_of_a_server_is_named_or_can_be_audited(tmp_path: Path) -> None:
    path, refused = tmp_path / "trace.jsonl", 0
    ones = np.ones(2, dtype=np.int64)
    ServerRun(
        ids=("a", "b"),
        choices=ones,
        prompt_tokens=3 * ones,
        completion_tokens=2 * ones,
        position=np.arange(2),
        server_of=0 * ones,
        failed=0 * ones,
        slots=2,
        in_flight=4,
        order="plan",
        retries=0,
        servers=(ServerCount("http://x", "vllm", iterations=9, kv_tokens=64, block_tokens=16),),
        sent=np.zeros(2),
        finished=np.array([1.0, 2.0]),
    ).save(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number in range(len(rows)):
        for value in changed(rows[number]):
            rewrite(
                path, "".join(json.dumps(row) + "\n" for row in [*rows[:number], value, *rows[number + 1 :]])
            )
            try:
                run = ServerRun.load(path)
            except InputError as error:
                assert "trace.jsonl" in str(error)  # noqa: PT017
                refused += 1
            else:
                assert np.isfinite(run.makespan)
    assert refused > 100


def test_a_string_of_a_kind_of_its_own_is_written_as_a_string() -> None:
    class Version(str):
        """As torch's."""

    found = plain({"torch": Version("2.13.0")})
    assert found == {"torch": "2.13.0"}
    assert type(found["torch"]) is str
