"""The commands as functions, and what their objects print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import batchbound
from batchbound import CostModel, Limits, Problem, Workload
from batchbound.data.files.disk import InputError


@pytest.fixture
def problem() -> Problem:
    workload = Workload.from_lengths(input_tokens=[4, 4, 9], output_tokens=[5, 2, 7])
    return Problem(workload, CostModel(0.5, 0.0, 0.4, 0.0), slots=2)


def test_problems_plans_and_results_print_a_few_lines(problem: Problem) -> None:
    made = batchbound.plan(problem, limits=Limits(seconds=0.1))
    result = batchbound.solve(problem, limits=Limits(seconds=0.1))
    report = batchbound.report(made, [batchbound.simulate(problem, "fcfs")])
    for one in (problem.workload, problem, made, result, report):
        assert 2 <= len(str(one).splitlines()) <= 12
        assert repr(one) == str(one)
        assert one._repr_html_().startswith("<table>")
        assert len(one.to_frame()) >= 1
    assert made.to_frame()["slot"].tolist() == made.schedule.slot_of.tolist()
    assert report.to_html().startswith("<!")


def test_a_file_of_lengths_is_planned_with_a_cost_model_or_a_file_of_one(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n4,5\n4,2\n")
    cost = tmp_path / "cost.json"
    stated = {"prefill_base": 1.0, "prefill_per_token": 0.0, "decode_base": 1.0, "decode_per_slot": 0.0}
    cost.write_text(json.dumps({"batchbound_cost": 2, "cost": stated}))
    assert CostModel.load(cost) == CostModel(1.0, 0.0, 1.0, 0.0)
    for given in (cost, CostModel.load(cost)):
        made = batchbound.plan(lengths, slots=2, cost=given, time_limit=0.1)
        assert made.makespan == pytest.approx(5.0)


def test_a_plan_is_drawn_beneath_first_come_first_served(problem: Problem) -> None:
    figure = batchbound.gantt(batchbound.plan(problem, limits=Limits(seconds=0.1)))
    assert len(figure.axes) >= 2


def test_wrong_types_end_in_one_sentence(problem: Problem) -> None:
    with pytest.raises(InputError, match="limits is 5"):
        batchbound.plan(problem, limits=5)  # type: ignore[call-overload]
    with pytest.raises(InputError, match="plan: Problem is no text"):
        batchbound.run(problem, "M")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword argument 'slot'"):
        batchbound.plan("table3:0:3", slot=4)  # type: ignore[call-overload]
    with pytest.raises(InputError, match="json has no effect on a function"):
        batchbound.plan("table3:0:3", json=True)


def test_prompts_run_as_the_command_runs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("BATCHBOUND_COST_CACHE", str(tmp_path / "costs"))
    prompts, answers = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    bodies = [{"custom_id": f"r{i}", "body": {"prompt": "Count.", "max_tokens": 2 + i}} for i in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in bodies))
    result = batchbound.run(prompts, "tiny:llama", slots=2, output=answers)
    assert len(answers.read_text().splitlines()) == 3
    assert (tmp_path / "a.plan.json").exists()
    assert (tmp_path / "a.trace.jsonl").exists()
    assert isinstance(result, batchbound.RunResult)
    assert len(batchbound.gantt(result).axes) >= 2
    again = batchbound.run(prompts, "tiny:llama", slots=2, output=answers)
    assert isinstance(again, batchbound.RunResult)
    assert again.finished_before
