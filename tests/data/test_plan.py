"""Plans on disk: one machine and a fleet in one kind of file, and the files of version 1."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import problem_of

from batchbound.data.costs.cost import CostModel
from batchbound.data.files.disk import InputError
from batchbound.data.plan import Plan
from batchbound.judging import verify
from batchbound.planning.plan import make_plan

PLANS = Path(__file__).parent / "plans"


@pytest.mark.parametrize("version", [1, 2, 4, "3"])
def test_a_plan_of_another_version_is_refused_with_what_to_do(version: object, tmp_path: Path) -> None:
    value = json.loads((PLANS / "one.json").read_text()) | {"batchbound_plan": version}
    (tmp_path / "plan.json").write_text(json.dumps(value))
    said = (
        rf"plan.json, field 'batchbound_plan': a batchbound plan of version {version!r}, not 3. Plan again."
    )
    with pytest.raises(InputError, match=re.escape(said)):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("name", ["one", "predicted", "fleet"])
def test_a_plan_loads_and_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    plan = Plan.load(PLANS / f"{name}.json")
    assert verify(plan) is None
    assert (plan.expected is not None) == (name == "predicted")
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == (PLANS / f"{name}.json").read_text()
    assert Plan.load(tmp_path / "plan.json").digest() == plan.digest()


@pytest.mark.parametrize("number", [int, np.int64, np.float32])
def test_a_plan_of_whole_costs_is_recognised_after_saving(
    number: Callable[[int], Any], tmp_path: Path
) -> None:
    cost = CostModel(number(2), number(0), number(1), number(0))
    plan = make_plan(problem_of([3], [2], slots=1, cost=cost), solver="lpt-ski")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").digest() == plan.digest()


def test_a_fleet_of_one_is_a_problem_and_a_schedule() -> None:
    plan = Plan.load(PLANS / "one.json")
    assert plan.schedule.check(plan.problem) is None
    assert plan.problem.slots == plan.fleet.replicas[0].slots == 2


def test_a_fleet_of_several_has_no_one_schedule() -> None:
    plan = Plan.load(PLANS / "fleet.json")
    with pytest.raises(ValueError, match="for 2 replicas, not for one"):
        _ = plan.schedule
    with pytest.raises(ValueError, match="for 2 replicas, not for one"):
        _ = plan.problem


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("fleet.replicas.0.slots", "x", "'x' is not a whole number"),
        ("fleet.replicas.0.slots", 0, "0 is not at least 1"),
        ("fleet.replicas.0.cost.decode_base", True, "True is not a number"),
        ("fleet.replicas.0.cost.decode_bass", 1.0, "the field is unknown"),
        ("bound.terms.prefill stages", "x", "'x' is not a number"),
        ("schedule.replica_of", [0, 0.5], "is not a list of whole numbers"),
        ("groups", "apart", "'apart' is none of any, together, spread"),
        ("maker", [], "is not an object"),
    ],
)
def test_a_wrong_field_is_named_with_its_path_and_its_value(
    place: str, value: object, said: str, tmp_path: Path
) -> None:
    whole = json.loads(json.dumps(Plan.load(PLANS / "one.json").to_json()))
    *steps, last = place.split(".")
    inside = whole
    for step in steps:
        inside = inside[int(step) if isinstance(inside, list) else step]
    inside[last] = value
    (tmp_path / "plan.json").write_text(json.dumps(whole))
    with pytest.raises(InputError) as caught:
        Plan.load(tmp_path / "plan.json")
    assert str(caught.value) == f"{tmp_path / 'plan.json'}, field '{place}': {said}. Plan again."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"batchbound_plan": 2, "makespan_s": NaN}', "a number that is not finite"),
        ('{"batchbound_plan": 2, "makespan_s": 1e999}', "a number that is not finite"),
        ('{"batchbound_plan": 2, "makespan_s": 1' + 40 * "0" + "}", "has more than 64 bits"),
        ('{"a":' * 100_000, "not JSON that can be parsed"),
        ('{"batchbound_plan": 4}', "a batchbound plan of version 4, not 3"),
        ("{}", "holds neither a plan nor requests"),
        ('{\n  "slots": 8\n}', "holds neither a plan nor requests"),
        ("{", r"line 1: not valid JSON"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        Plan.load(tmp_path / "plan.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"custom_id": "a", "body": {"prompt": "x"}}\n',
        '{"prompt": "x"}\n',
        '{"prompt": "x"}',
        "input_tokens,output_tokens\n3,4\n",
    ],
)
def test_requests_in_the_place_of_a_plan_are_told_from_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(text)
    with pytest.raises(
        InputError, match=r"in.txt: holds requests and is not a plan. Make a plan from it: batch"
    ):
        Plan.load(tmp_path / "in.txt")


def test_a_plan_is_written_to_the_file_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "plan.json").symlink_to("disk/plan.json")
    for _ in range(2):
        Plan.load(PLANS / "one.json").save(tmp_path / "plan.json")
        assert (tmp_path / "plan.json").is_symlink()
        assert Plan.load(tmp_path / "disk" / "plan.json").makespan == pytest.approx(45.19274)
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["plan.json"]
