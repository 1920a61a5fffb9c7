"""The commands as functions, and what their objects print."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchbound
from batchbound import CostModel, Limits, Problem, Workload
from batchbound.data.files.disk import InputError
from batchbound.data.plan import Maker


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


def test_wrong_types_name_the_argument_and_what_to_give(problem: Problem, tmp_path: Path) -> None:
    library: Any = batchbound
    made = batchbound.plan(problem, limits=Limits(seconds=0.1))
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: library.plan(problem, limits=5), r"limits is of type int 5. Give Limits\("),
        (lambda: library.plan(5), "problem is of type int 5. Give a Problem, or the path"),
        (lambda: library.solve("x"), "problem is of type str 'x'. Give a Problem"),
        (lambda: library.simulate(5, "fcfs"), "problem is of type int 5"),
        (lambda: library.compare(problem, "search"), "instances is of type Problem. Give problems by name"),
        (lambda: library.compare({"a": 5}, "search"), "instance 'a' is of type int 5"),
        (lambda: library.Problem(1, 2, 3), "workload is of type int 1. Give a Workload"),
        (lambda: library.verify(5), "plan is of type int 5. Give a Plan, or the path of one"),
        (lambda: library.report(made, "trace.jsonl"), "traces is of type str 'trace.jsonl'"),
        (lambda: library.gantt(3), "result is of type int 3"),
        (lambda: library.run(problem, "M"), "plan: Problem is no text"),
        (lambda: library.plan("table3:0:3", slots="many"), "slots: 'many' is not a whole number"),
        (lambda: library.plan("table3:0:3", slot=4), r"^plan\(\) got .* 'slot'; did you mean slots"),
        (lambda: library.run("p.jsonl", "M", slot=4), r"^run\(\) got .* 'slot'; did you mean slots"),
    ]
    for call, message in wrong:
        with pytest.raises(TypeError, match=message):
            call()


def test_errors_of_the_engine_name_the_function_that_was_called() -> None:
    pytest.importorskip("torch")
    llm = batchbound.LLM.from_pretrained("tiny:llama", slots=2)
    assert str(llm) == "LLM(tiny:llama, 2 slots, ragged tier)"
    wrong: dict[str, Any] = {"max_token": 3}
    with pytest.raises(TypeError, match=r"^generate\(\) got .* 'max_token'; did you mean max_tokens"):
        list(llm.generate(["x"], **wrong))
    with pytest.raises(TypeError, match=r"^rollout_function\(\) got .* 'slots'$"):
        batchbound.rollout_function(llm, slots=3)
    with pytest.raises(TypeError, match=r"engine is of type str 'x'\. Give an LLM"):
        batchbound.rollout_function("x")  # type: ignore[arg-type]


def test_a_file_of_a_plan_is_verified_as_the_plan_is(problem: Problem, tmp_path: Path) -> None:
    made = batchbound.plan(problem, limits=Limits(seconds=0.1))
    made.save(tmp_path / "plan.json")
    assert batchbound.verify(tmp_path / "plan.json") is None
    with pytest.raises(InputError, match=r"none\.json"):
        batchbound.verify(str(tmp_path / "none.json"))


def test_the_public_names_are_listed_and_arrays_have_short_texts(problem: Problem) -> None:
    assert dir(batchbound) == sorted(batchbound.__all__)
    result = batchbound.solve(problem, limits=Limits(seconds=0.1))
    assert repr(result.schedule).startswith("Schedule(3 requests on 2 slots, ")
    assert repr(result.bound).startswith("Bound(")
    assert len(repr(result.bound)) < 80


def test_versions_for_a_bug_report_are_printed() -> None:
    versions = batchbound.show_versions()
    assert versions["batchbound"] == batchbound.__version__
    assert {"machine", "compiled search", "numpy"} <= versions.keys()
    assert len(str(versions).splitlines()) == len(versions)


def test_an_option_that_only_prints_is_refused(problem: Problem) -> None:
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
    page = tmp_path / "page.html"
    batchbound.report(tmp_path / "a.plan.json", tmp_path / "a.trace.jsonl", html=page)
    text = page.read_text(encoding="utf-8")
    shown = json.loads(
        text.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    )
    lines = [cells[0] for cells in shown["gain"]]
    assert lines[1:3] == ["first come, first served", "this run"]
    assert lines[-1] == "least possible"
    assert [panel["title"] for panel in shown["panels"]] == ["Run", "Plan", "First come, first served"]
    again = batchbound.run(prompts, "tiny:llama", slots=2, output=answers)
    assert isinstance(again, batchbound.RunResult)
    assert again.finished_before


def test_all_names_are_imported_where_an_extra_is_missing() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, trl=None)\n"
        "from batchbound import *\n"
        "print('plan' in globals(), 'LLM' in globals(), 'AsyncRollouts' in globals())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"]


def test_a_plan_says_that_another_proof_than_its_own_makes_it_optimal() -> None:
    assert Maker("search", "0", "feasible", "time", 1.0, 0).outcome == "feasible"
    assert Maker("search", "0", "optimal", "proof", 1.0, 0).outcome == "optimal"
    unheld = Maker("search", "0", "feasible", "proof", 1.0, 0).outcome
    assert unheld.startswith("optimal by exhaustive search, whose proof the plan does not hold")
