"""How fast the machine was while a profile was measured, and in a run, on a clock made up by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound.data.configuration import PlannedConfiguration, Reached
from batchbound.data.costs.cost import CostModel
from batchbound.data.costs.layer_profile import LayerProfile
from batchbound.data.costs.reference_time import ReferenceTime
from batchbound.data.files.disk import InputError
from batchbound.data.files.record import plain, record
from batchbound.data.trace import Stage, Trace
from batchbound.executor.jobs.machine_speed import MachineSpeed
from batchbound.executor.models.families import cache_argument
from batchbound.executor.reports.steady_state import reached
from batchbound.models.exegpt.whole_model_profile import whole_model_profile
from batchbound.screen.run import say_reached

PROFILED = ReferenceTime(1.0)
PLANNED = PlannedConfiguration("RRA", 1, 1, 1.0, 0, 4.0, 0.0, 1.0, 0.0, 0.45, 0.4, 1.2, PROFILED)


def trace_of(readings: list[float]) -> Trace:
    """Return a run in which a request joins every second, and is done half a second later."""
    stages = []
    for k in range(8):
        stages += [
            Stage("prefill", k, k + 0.25, 0, 1, 4, 4, 4),
            Stage("decode", k + 0.25, k + 0.5, 1, 1, 1, 5, 5),
        ]
    at = np.arange(8.0)
    return Trace(
        ids=tuple(map(str, range(8))),
        slots=1,
        stages=tuple(stages),
        stage_of=2 * np.arange(8),
        slot_of=np.zeros(8, dtype=np.int64),
        queued=np.zeros(8),
        prefilled=at,
        first_token=at + 0.25,
        finished=at + 0.5,
        tokens=np.full(8, 2),
        readings=np.array(readings),
    )


def test_a_reading_is_of_the_same_work_each_time(llama: Any) -> None:
    seen: list[tuple[tuple[int, ...], int]] = []

    def watch(module: Any, _: Any, arguments: dict[str, Any]) -> None:
        cache = arguments[cache_argument(type(module))]
        held = 0 if cache is None else cache.get_seq_length()
        seen.append((tuple(arguments["input_ids"].shape), held))

    watching = llama.register_forward_pre_hook(watch, with_kwargs=True)
    ticks = (k * k / 2 for k in count())
    speed = MachineSpeed(llama, lambda: next(ticks))
    # The clock is read before and after the work.
    assert speed() == 0.5
    work = [((16, 32), 0), *(((16, 1), 32 + k) for k in range(4))]
    assert seen == work
    speed()
    watching.remove()
    assert seen == 2 * work


def test_a_profile_keeps_its_reference_and_needs_none(tmp_path: Path) -> None:
    profile, path = whole_model_profile(CostModel.paper(), "made up"), tmp_path / "profile.json"
    replace(profile, reference=PROFILED).save(path)
    assert LayerProfile.load(path).reference == PROFILED
    value = json.loads(path.read_text())
    del value["reference"]
    path.write_text(json.dumps(value))
    assert LayerProfile.load(path).reference is None
    path.write_text(json.dumps(value | {"reference": {"seconds": "1"}}))
    with pytest.raises(InputError, match=r"reference\.seconds"):
        LayerProfile.load(path)
    other = plain(PROFILED) | {"work": "a short prompt"}
    path.write_text(json.dumps(value | {"reference": other}))
    with pytest.raises(InputError, match=r"reference'.*'a short prompt' is not .*rofile again"):
        LayerProfile.load(path)


def test_a_plan_keeps_the_reference_of_its_profile() -> None:
    value = plain(PLANNED)
    assert record(PlannedConfiguration, json.loads(json.dumps(value))) == PLANNED
    del value["reference"]
    assert record(PlannedConfiguration, value) == replace(PLANNED, reference=None)


def test_a_trace_keeps_its_readings_and_needs_none(tmp_path: Path) -> None:
    trace, path = trace_of([1.0, 2.0]), tmp_path / "trace.jsonl"
    trace.save(path)
    assert Trace.load(path).readings.tolist() == trace.readings.tolist()
    header, rest = path.read_text().split("\n", 1)
    value = json.loads(header)
    path.write_text(json.dumps(value | {"readings": [1.0, -1.0]}) + "\n" + rest)
    with pytest.raises(InputError, match="speed"):
        Trace.load(path)
    del value["readings"]
    path.write_text(json.dumps(value) + "\n" + rest)
    assert Trace.load(path).readings.shape == (0,)


def test_a_reference_is_the_median_of_its_readings_and_a_machine_is_slower_by_theirs() -> None:
    # One busy moment moves neither.
    reference = ReferenceTime.of([2.0, 1.0, 50.0])
    assert reference.seconds == 2.0
    assert reference.slowdown([4.0, 3.0, 90.0]) == 2.0
    assert reference.slowdown([]) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_reference_that_none_can_be_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds for the work"):
        ReferenceTime(seconds)


def test_a_run_says_how_much_slower_the_machine_was_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    trace = trace_of([1.5, 1.5, 9.0])
    found = reached(PLANNED, trace)
    assert found is not None
    assert (found.throughput, found.latency, found.slowdown) == (1.0, 0.5, 1.5)
    assert found.error == pytest.approx(0.2)
    assert found.bound_met is False
    assert record(Reached, json.loads(json.dumps(found.to_json()))) == found
    say_reached(PLANNED, found, trace)
    said = capsys.readouterr().err
    assert "planned 1.20 (+20.0%)" in said
    assert "the machine was 1.50 times slower than while it was profiled\n" in said
    assert said.endswith("the latency bound of 0.45 s is missed\n")


@pytest.mark.parametrize(
    ("readings", "reference"), [([], PROFILED), ([1.0], None)], ids=["no reading", "no reference"]
)
def test_without_a_reading_or_a_reference_the_line_is_left_out(
    readings: list[float], reference: ReferenceTime | None, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, trace = replace(PLANNED, reference=reference), trace_of(readings)
    found = reached(planned, trace)
    assert found is not None
    assert found.slowdown is None
    say_reached(planned, found, trace)
    assert "slower" not in capsys.readouterr().err
