"""A job on several numbers of slots and replicas: seconds, device-hours and money."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.planning.sweep import device_hours, slots_to_try, sweep
from batchbound.solvers import Limits

EIGHT_ALIKE = Problem(
    Workload.from_lengths([10] * 8, [6] * 8),
    CostModel(prefill_base=1.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0),
    slots=8,
    prefill_emits_first_token=True,
)
"""A prefill stage takes a second, a decode step too, whatever is in them: a request has five steps."""


def test_more_slots_and_replicas_take_less_time_and_not_always_less_money() -> None:
    points = sweep(EIGHT_ALIKE, (2, 8), (1, 2), limits=Limits(seconds=0.4))
    found = {(point.replicas, point.slots): point.makespan for point in points}
    # A stage and five steps for each fill of the slots there are.
    assert found == {(1, 2): 24.0, (1, 8): 6.0, (2, 2): 12.0, (2, 8): 6.0}
    assert [(point.replicas, point.slots) for point in points] == [(1, 2), (1, 8), (2, 2), (2, 8)]
    hours = {(point.replicas, point.slots): device_hours(point.replicas, point.makespan) for point in points}
    assert hours[2, 8] == 2 * hours[1, 8] == pytest.approx(12 / 3600)
    assert all(point.bound is not None and point.bound <= point.makespan for point in points)


def test_half_a_day_on_four_devices_is_two_device_days() -> None:
    assert device_hours(4, 12 * 3600.0) == 48.0


def test_slots_are_halved_down_to_an_eighth() -> None:
    assert slots_to_try(64) == (8, 16, 32, 64)
    assert slots_to_try(3) == (1, 3)


def test_the_command_prints_a_table_and_writes_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [
        "plan",
        "table3:0:24",
        "--slots",
        "4",
        "--sweep",
        "1,3",
        "--price",
        "2.5",
        "--time-limit",
        "0.3",
    ]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [
        "replicas",
        "slots",
        "makespan",
        "s",
        "bound",
        "s",
        "gap",
        "device-hours",
        "money",
    ]
    assert [line.split()[:2] for line in lines[2:]] == [[n, s] for n in ("1", "3") for s in ("1", "2", "4")]
    assert main([*command, "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["sweep"]:
        assert row["device_hours"] == pytest.approx(row["replicas"] * row["makespan_s"] / 3600)
        assert row["money"] == pytest.approx(2.5 * row["device_hours"])
        assert row["bound_s"] <= row["makespan_s"] * (1 + 1e-9)
    assert not list(tmp_path.iterdir())


def test_a_plan_says_its_device_hours_and_given_a_price_its_money(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "table3:0:24", "--slots", "4", "--replicas", "2", "--time-limit", "0.2", "--json"]
    assert main([*command, "--price", "3", "-o", str(tmp_path / "a.json")]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["device_hours"] == pytest.approx(2 * summary["makespan_s"] / 3600)
    assert summary["money"] == pytest.approx(3 * summary["device_hours"])
    assert main([*command, "-o", str(tmp_path / "b.json")]) == 0
    assert json.loads(capsys.readouterr().out)["money"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sweep", "1,2", "--replicas", "2"], "--replicas has no effect with --sweep"),
        (["--sweep", "1,2", "-o", "other.json"], "--output has no effect with --sweep"),
        (["--sweep", "1,2", "--for", "vllm"], "--for has no effect with --sweep"),
        (["--sweep", "1,2", "--slots", "auto"], "--slots auto has no effect with --sweep"),
        (["--sweep", "1,1"], "1,1 names a number twice"),
        (["--sweep", "0"], "0"),
        (["--price", "-1"], "-1"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["plan", "table3:0:24", "--time-limit", "1", *options])
    except SystemExit as error:
        status = int(str(error))
    assert status == 2
    assert said in capsys.readouterr().err
