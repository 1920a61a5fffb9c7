"""Predicted lengths: what the truth may be, what a plan follows, and what it is expected to take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import mostly_slow
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.expectation import Expectation, Follow
from batchbound.data.figures import duration
from batchbound.data.files.disk import InputError
from batchbound.data.files.record import plain, record
from batchbound.data.lengths.deconvolution import Deconvolution
from batchbound.data.lengths.prediction_error import LogNormalError, MeasuredError, parse_prediction_error
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.report import Report
from batchbound.data.workload import Workload
from batchbound.heuristics.follow import following, queue_order
from batchbound.heuristics.loop import schedule_of
from batchbound.heuristics.replay_and_repair import Replay
from batchbound.heuristics.simulate import simulate
from batchbound.planning.uncertain import make_robust_plan
from batchbound.solvers.result import Limits
from batchbound.solvers.search.constructive import ski_rental_schedule


def noisy(
    sd: float, seed: int = 0, count: int = 400
) -> tuple[Problem, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """A problem with predicted lengths, and the true ones."""
    workload = generate("table3", seed, count)
    factor = np.exp(sd * np.random.default_rng((seed, 1)).standard_normal(count))
    predicted = np.maximum(1, np.rint(workload.output_tokens * factor)).astype(np.int64)
    problem = Problem(workload.with_output_tokens(predicted), CostModel.paper(), 60)
    return problem, workload.output_tokens


def test_predictions_with_noise_are_too_large_on_average_and_their_means_are_not() -> None:
    problem, truth = noisy(1.0, count=1319)
    predicted = problem.workload.output_tokens
    assert predicted.mean() > 1.4 * truth.mean()
    assert LogNormalError(1.0).expected(predicted).mean() == pytest.approx(truth.mean(), rel=0.1)


def test_a_deconvolution_finds_where_answers_are_cut() -> None:
    problem, truth = noisy(0.5, count=1319)
    drawn = LogNormalError(0.5).sample(problem.workload.output_tokens, np.random.default_rng(0), 20)
    assert truth.max() == 512
    assert 430 < np.median(drawn.max(axis=1)) < 620


def test_the_total_is_as_open_as_the_predictions_leave_it() -> None:
    # Whatever the truth is, exp(-sd^2/2) times the predictions' sum is off by this share as a rule.
    for sd in (0.5, 1.0):
        problem, truth = noisy(sd, count=1319)
        predicted = problem.workload.output_tokens
        off = np.sqrt(np.expm1(sd**2) * (truth**2).sum()) / truth.sum()
        totals = LogNormalError(sd).sample(predicted, np.random.default_rng(0), 99).sum(axis=1)
        assert totals.mean() == pytest.approx(predicted.sum() * np.exp(-(sd**2) / 2), rel=off / 3)
        assert totals.std() / totals.mean() == pytest.approx(off, rel=0.25)


def test_a_total_is_reached_by_those_below_their_limit_and_no_further_than_the_limits() -> None:
    predicted = np.array([100, 100, 400, 400])
    longest = np.array([1000, 1000, 300, 300])
    drawn = LogNormalError(0.1).sample(predicted, np.random.default_rng(0), 50, longest)
    assert (drawn <= longest).all()
    assert drawn.sum(axis=1).max() > 1000 > 2 * 300 + 2 * 130
    full = np.full(30, 10)
    assert (LogNormalError(0.1, "noise").expected(np.full(30, 50), full) == full).all()


def test_predictions_that_scatter_less_than_their_error_are_read_as_spread() -> None:
    constant = np.full(500, 300)
    assert LogNormalError(0.5).for_predictions(constant).reading == "spread"
    problem, _ = noisy(0.5, count=1319)
    assert LogNormalError(0.5).for_predictions(problem.workload.output_tokens).reading == "noise"


def test_a_spread_has_the_stated_deviation() -> None:
    drawn = LogNormalError(0.5, "spread").sample(np.full(4000, 1000), np.random.default_rng(0), 5)
    assert np.log(drawn / 1000).std() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("reading", ["noise", "spread"])
def test_no_sampled_answer_is_longer_than_allowed(reading: str) -> None:
    problem, _ = noisy(0.5)
    longest = np.arange(100, 500)
    error = LogNormalError(0.5, reading)  # type: ignore[arg-type]
    drawn = error.sample(problem.workload.output_tokens, np.random.default_rng(0), 4, longest)
    assert (drawn <= longest).all()
    assert (drawn >= 1).all()
    assert (error.expected(problem.workload.output_tokens, longest) <= longest).all()


def test_sampled_lengths_repeat_with_the_seed() -> None:
    problem, _ = noisy(0.5, count=100)
    predicted = problem.workload.output_tokens
    one, other = (LogNormalError(0.5).sample(predicted, np.random.default_rng(7), 3) for _ in range(2))
    assert (one == other).all()


def test_a_classs_lengths_are_drawn_from_its_own_pairs() -> None:
    predicted = np.repeat([10, 100], 200)
    actual = np.concatenate((np.repeat([5, 15], 100), np.repeat([50, 150], 100)))
    error = MeasuredError(predicted, actual)
    drawn = error.sample(np.array([10, 100]), np.random.default_rng(0), 300)
    assert set(drawn[:, 0]) == {5, 15}
    assert set(drawn[:, 1]) == {50, 150}
    assert error.expected(np.array([10, 100])).tolist() == [10, 100]


def test_a_prediction_between_pairs_takes_the_nearest_ones_in_proportion() -> None:
    error = MeasuredError(np.array([100, 200]), np.array([200, 400]))
    assert error.expected(np.array([150, 1000])).tolist() == [300, 2000]


def test_pairs_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("actual,predicted\n7,10\n12,10\n")
    error = parse_prediction_error(str(tmp_path / "pairs.csv"))
    assert isinstance(error, MeasuredError)
    assert error.actual.tolist() == [7, 12]
    assert error.to_json()["pairs"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("predicted,length\n1,2\n", r"pairs.csv: has no column 'actual'"),
        ("predicted,actual\n", r"has no pair of lengths"),
        ("predicted,actual\n3,0\n", r"line 2, column 'actual': '0' is not a length"),
        ("predicted,actual\n3,4\nx,2\n", r"line 3, column 'predicted': 'x' is not a length"),
    ],
)
def test_wrong_pairs_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pairs.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        parse_prediction_error(str(tmp_path / "pairs.csv"))


@pytest.mark.parametrize("spec", ["0", "-1", "nan", "9", "noise:x", "spread:"])
def test_a_deviation_out_of_range_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match="no prediction error"):
        parse_prediction_error(spec)


def test_a_queue_holds_back_the_longest() -> None:
    problem = Problem(Workload.from_lengths([1] * 5, [3, 9, 5, 7, 1]), CostModel.paper(), 2)
    assert queue_order(problem, "longest-first").tolist() == [1, 3, 2, 0, 4]
    assert queue_order(problem, "longest-first", 2).tolist() == [2, 0, 4, 1, 3]
    assert queue_order(problem, "as-given").tolist() == [0, 1, 2, 3, 4]


@given(st.integers(0, 1000), st.sampled_from(["longest-first", "as-given"]), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_one_pass_over_true_lengths_is_what_the_queue_does(seed: int, follow: Follow, held_back: int) -> None:
    rng = np.random.default_rng(seed)
    planned = Problem(Workload.from_lengths([5] * 30, rng.integers(1, 40, 30)), CostModel.paper(), 6)
    truth = rng.integers(1, 40, 30)
    way = Expectation(1.0, 1.0, 1.0, 0.9, 1, follow, 0.5, held_back)
    trace = simulate(planned, following(way, ski_rental_schedule(planned), planned), truth)
    true = replace(planned, workload=planned.workload.with_output_tokens(truth))
    order = queue_order(planned, follow, held_back)
    assert trace.makespan == pytest.approx(ski_rental_schedule(true, order=order).makespan(true))
    assert schedule_of(trace).check(true) is None


def test_a_plan_of_known_lengths_is_replayed() -> None:
    problem, _ = noisy(0.2, count=20)
    assert isinstance(following(None, ski_rental_schedule(problem), problem), Replay)


@pytest.mark.parametrize("sd", mostly_slow([0.2, 1.0], fast=[1.0]))
def test_a_plan_from_predictions_is_not_worse_than_plain_orders_and_its_interval_holds(sd: float) -> None:
    problem, truth = noisy(sd)
    longest = np.full(len(problem), 512)
    plan = make_robust_plan(problem, LogNormalError(sd), longest=longest, limits=Limits(seconds=0.3))
    assert plan.expected is not None
    assert plan.schedule.check(plan.problem) is None
    reached = simulate(plan.problem, following(plan.expected, plan.schedule, plan.problem), truth).makespan
    true = replace(problem, workload=problem.workload.with_output_tokens(truth))
    plain = [
        ski_rental_schedule(true, order=queue_order(problem, follow)).makespan(true)
        for follow in ("longest-first", "as-given")
    ]
    assert reached <= 1.005 * min(plain)
    assert plan.expected.low <= reached <= plan.expected.high
    assert len(plan.expected.compared) > 5


def test_the_command_records_what_to_expect_and_the_plan_is_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    words = ["plan", "table3:0:60", "--slots", "8", "--length-error", "0.4", "--longest-completion", "512"]
    assert main([*words, "--time-limit", "0.2", "-o", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    plan = Plan.load(path)
    assert plan.expected is not None
    assert printed["expected_s"] == plan.expected.mean
    assert printed["expected_interval_s"] == [plan.expected.low, plan.expected.high]
    assert plan.expected.low <= plan.expected.mean <= plan.expected.high
    assert plan.expected.error["sd"] == 0.4
    assert main(["verify", str(path)]) == 0


@pytest.fixture
def uncertain_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "plan.json"
    words = ["plan", "table3:0:60", "--slots", "8", "--length-error", "0.4", "--longest-completion", "512"]
    assert main([*words, "--time-limit", "0.2", "-o", str(path)]) == 0
    capsys.readouterr()
    return path


@pytest.mark.slow
def test_a_report_says_what_the_plan_expected(
    uncertain_plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(uncertain_plan.parent)
    expected = Plan.load(uncertain_plan).expected
    assert expected is not None
    assert main(["report", str(uncertain_plan), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert Report.from_json(printed).expected == expected
    assert main(["report", str(uncertain_plan)]) == 0
    table = capsys.readouterr().out
    assert duration(expected.mean) in table
    assert f"{duration(expected.low)} to" in table


@pytest.mark.slow
def test_a_plan_is_simulated_on_lengths_as_they_come_out(
    uncertain_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.load(uncertain_plan)
    truth = generate("table3", 7, 60).output_tokens
    ids = plan.problem.workload.ids
    rows = [f"{name},1,{tokens}" for name, tokens in zip(ids, truth, strict=True)]
    (tmp_path / "truth.csv").write_text("\n".join(["id,input_tokens,output_tokens", *rows[::-1]]) + "\n")
    words = ["simulate", str(tmp_path / "truth.csv"), "--plan", str(uncertain_plan)]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    policy = following(plan.expected, plan.schedule, plan.problem)
    assert printed["makespan_s"] == pytest.approx(simulate(plan.problem, policy, truth).makespan)
    assert plan.expected is not None
    assert printed["expected"]["mean"] == plan.expected.mean
    assert printed["output_tokens"] == truth.sum()
    assert main([*words, "--slots", "4"]) == 2
    assert "--slots has no effect with --plan" in capsys.readouterr().err
    assert main(["simulate", "table3:0:9", "--plan", str(uncertain_plan)]) == 2
    assert "has no" in capsys.readouterr().err


def test_a_simulation_of_a_plan_stops_answers_where_a_run_of_it_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n3,9\n3,2\n")
    table, plan = str(tmp_path / "lengths.csv"), str(tmp_path / "plan.json")
    assert main(["plan", table, "--longest-completion", "5", "--time-limit", "0.05", "-o", plan]) == 0
    capsys.readouterr()
    assert main(["simulate", table, "--plan", plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 7
    # Versions before 0.2 and other engines call the option otherwise; help does not.
    for name in ("--longest-answer", "--max-tokens"):
        assert main(["simulate", table, name, "4", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["output_tokens"] == 6
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    told = capsys.readouterr().out
    assert "--longest-answer" not in told
    assert "--max-tokens " not in told


def test_a_damaged_expectation_is_refused() -> None:
    good = plain(Expectation(2.0, 1.0, 3.0, 0.9, 99, "as-given", 0.5))
    assert record(Expectation, good).follow == "as-given"
    with pytest.raises(InputError, match="field 'mean'"):
        record(Expectation, {**good, "mean": "x"})
    with pytest.raises(InputError, match="field 'follow': 'nothing' is none of schedule"):
        record(Expectation, {**good, "follow": "nothing"})


def test_numbers_without_noise_come_back_as_they_are() -> None:
    noisy_numbers = np.log(np.repeat([10.0, 100.0], 50))
    means = Deconvolution(noisy_numbers, 0.05).means()
    assert means == pytest.approx(np.exp(noisy_numbers), rel=0.05)
