"""Progress by the plan: where a run stands, and when it will be done at the pace measured so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.trace import Stage
from batchbound.data.workload import Workload
from batchbound.executor.jobs.length_estimator import Stretch
from batchbound.executor.jobs.plan_clock import PlanClock, Standing
from batchbound.heuristics.loop import execute
from batchbound.heuristics.policy import State, Step
from batchbound.heuristics.replay_and_repair import Replay
from batchbound.heuristics.simulate import remaining_schedule
from batchbound.heuristics.simulator import Simulator
from batchbound.models.bounds.makespan import best_bound
from batchbound.screen.progress import standing_text
from batchbound.solvers.search.constructive import ski_rental_schedule

COST = CostModel(0.02, 1e-4, 0.01, 5e-4, decode_per_kv_token=1e-6, decode_per_change=0.002)


def random_plan(seed: int, count: int = 60) -> tuple[Problem, Schedule]:
    rng = np.random.default_rng(seed)
    answers = np.minimum(200, 2 + np.exp(rng.normal(3, 1, count))).astype(int)
    workload = Workload.from_lengths(rng.integers(5, 80, count).tolist(), answers.tolist())
    problem = Problem(workload, COST, slots=8, prefill_emits_first_token=True)
    return problem, ski_rental_schedule(problem)


def run(
    problem: Problem,
    schedule: Schedule,
    clock: PlanClock,
    slowdown: float,
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None,
    ended: list[tuple[int, int]] | None = None,
) -> list[tuple[float, Standing]]:
    """Return when each stage ended on a machine that is slower than the model, and what the clock said."""
    said, time = [], 0.0

    def on_stage(stage: Stage, done: int) -> None:
        nonlocal time
        begin, time = time, time + slowdown * stage.model_seconds(problem.cost)
        said.append((time, clock.after(replace(stage, start=begin, end=time), done)))

    replay = Replay(schedule, problem)

    def policy(state: State) -> Step:
        step = replay(state)
        if ended is not None and len(step.prefill):
            clock.begun(step.prefill)
        return step

    def on_finish(request: int) -> None:
        if ended is not None and tokens is not None:
            ended.append((request, int(tokens[request])))

    execute(problem, policy, Simulator(problem, tokens), on_stage=on_stage, on_finish=on_finish)
    return said


def take(new: list[tuple[int, int]]) -> list[tuple[int, int]]:
    taken, new[:] = list(new), []
    return taken


@pytest.mark.parametrize("seed", range(5))
def test_the_ends_planned_are_those_of_the_simulation(seed: int) -> None:
    problem, schedule = random_plan(seed)
    trace = execute(problem, Replay(schedule, problem), Simulator(problem))
    assert schedule.finishes(problem) == pytest.approx(trace.finished)


@pytest.mark.parametrize("slowdown", [0.25, 1.0, 7.0])
def test_the_end_foretold_is_within_a_tenth_of_what_remained(slowdown: float) -> None:
    errors = []
    for seed in range(20):
        problem, schedule = random_plan(seed)
        said = run(problem, schedule, PlanClock(problem, schedule, range(len(problem))), slowdown)
        end = said[-1][0]
        for share in (0.25, 0.5, 0.75):
            time, standing = next(each for each in said if each[0] >= share * end)
            errors.append(abs(standing.left - (end - time)) / (end - time))
        assert said[-1][1].left == pytest.approx(0, abs=1e-9)
    assert np.median(errors) < 0.1


def test_a_run_whose_answers_end_early_is_moved_on_with_those_it_finished() -> None:
    errors = []
    for seed in range(20):
        problem, schedule = random_plan(seed)
        tokens = np.maximum(1, problem.workload.output_tokens // 2)
        said = run(problem, schedule, PlanClock(problem, schedule, range(len(problem))), 1.0, tokens)
        assert [standing.done for _, standing in said] == sorted(standing.done for _, standing in said)
        end = said[-1][0]
        time, standing = next(each for each in said if each[0] >= end / 2)
        errors.append(abs(standing.left - (end - time)) / (end - time))
    # Not as good as with lengths as planned, but far from the whole plan's seconds.
    assert np.median(errors) < 0.35


@pytest.mark.slow
@pytest.mark.parametrize("planned", [10, 400])
def test_the_end_foretold_learns_from_lengths_that_are_not_the_planned_ones(planned: int) -> None:
    errors, longer = [], []
    for seed in range(12):
        real = random_plan(seed, 300)[0].workload.output_tokens
        guess = Workload.from_lengths([20] * len(real), [planned] * len(real))
        problem = Problem(guess, COST, slots=8, prefill_emits_first_token=True)
        schedule = ski_rental_schedule(problem)
        new: list[tuple[int, int]] = []
        clock = PlanClock(problem, schedule, range(len(problem)), None, partial(take, new))
        said = run(problem, schedule, clock, 3.0, real, new)
        end = said[-1][0]
        time, standing = next(each for each in said if each[0] >= end / 2)
        errors.append(abs(standing.left - (end - time)) / (end - time))
        longer.append(standing.longer)
        assert standing.done < standing.planned
        assert said[-1][1].left == 0
    assert np.median(errors) < 0.2
    assert all(longer) if planned == 10 else not any(longer)


def test_lengths_are_learned_from_those_under_way_too() -> None:
    """One ended at its planned length, one at twice that, one is beyond 1.5 times: the estimate by hand."""
    stretch = Stretch(np.array([1.0, 2.0]), np.array([1.5]))
    assert stretch.quantile(np.array([0.3, 0.4]), np.zeros(2)).tolist() == [1.0, 2.0]
    assert stretch.quantile(np.array([0.0]), np.array([1.5])).tolist() == [2.0]


@pytest.mark.parametrize(("reached", "foretold"), [(0.5, 1.0), (3.0, 6.0)])
def test_before_any_has_ended_they_end_as_planned_or_as_far_again(reached: float, foretold: float) -> None:
    stretch = Stretch(np.zeros(0), np.array([reached]))
    assert stretch.quantile(np.array([0.5]), np.array([reached])).tolist() == [foretold]


def test_a_run_tells_its_clock_what_begins_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    said: list[Standing] = []

    @contextmanager
    def progress(_: Standing) -> Iterator[Callable[[Standing], None]]:
        yield said.append

    monkeypatch.setattr("batchbound.screen.watching.plan_progress", progress)
    monkeypatch.chdir(tmp_path)
    rows = [{"custom_id": f"r{i}", "body": {"prompt": "Hi", "max_tokens": 9}} for i in range(6)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = ["--model", "tiny:llama"]
    assert main(["plan", "in.jsonl", *model, "--lengths", "constant:2", "--slots", "2", "--work", "1"]) == 0
    assert main(["run", *model]) == 0
    assert max(standing.longer for standing in said) == 2
    assert said[-1].longer == 0 or said[-1].left < said[0].left


def test_a_job_that_resumes_goes_on_from_where_it_stood() -> None:
    problem, schedule = random_plan(3)
    left = np.arange(20, 60)
    rest, thinned = remaining_schedule(problem, schedule, left)
    clock = PlanClock(problem, schedule, left, 1.0)
    planned = schedule.makespan(problem)
    assert clock.begin.done == pytest.approx(planned - thinned.makespan(rest))
    assert clock.begin.planned == planned
    _, last = run(rest, thinned, clock, 2.0)[-1]
    assert last.done == pytest.approx(planned)
    assert last.left == pytest.approx(0)
    assert last.gap is None


def test_the_gap_so_far_is_that_of_the_run_once_it_is_done_and_none_off_the_plan() -> None:
    problem, schedule = random_plan(4)
    bound = best_bound(problem).seconds
    clock = PlanClock(problem, schedule, range(len(problem)), bound)
    said = run(problem, schedule, clock, 1.0)
    charged = schedule.makespan(problem) + COST.decode_per_change * schedule.changes(problem)
    assert said[-1][1].gap == pytest.approx(charged / bound - 1)
    assert all(standing.gap is not None and standing.gap >= 0 for _, standing in said)
    early = np.maximum(1, problem.workload.output_tokens // 2)
    clock = PlanClock(problem, schedule, range(len(problem)), bound)
    assert run(problem, schedule, clock, 1.0, early)[-1][1].gap is None


def test_a_sum_that_rounds_to_below_the_bound_is_no_gap_below_zero() -> None:
    # A tenth of a second each decode step: the sum of the stages is not, to the last bit, that of the plan.
    cost = CostModel(0.1, 0.1, 0.1, 0.1)
    problem = Problem(Workload.from_lengths([3, 1], [8, 3]), cost, 1, prefill_emits_first_token=True)
    schedule = ski_rental_schedule(problem)
    clock = PlanClock(problem, schedule, range(2), schedule.makespan(problem))
    said = run(problem, schedule, clock, 1.0)
    assert [standing.gap for _, standing in said] == [0.0] * len(said)


def test_a_standing_reads_as_prompts_speed_and_time_left() -> None:
    standing = Standing(58.0, 130.0, 4.1, 4.0, 0.021, finished=31, requests=48, speed=3410.2)
    assert standing_text(standing) == "31/48 prompts  3,410 tokens/s  0:04 left"
    assert standing_text(replace(standing, left=725.0)).endswith("  12:05 left")
    assert standing_text(replace(standing, left=7205.0)).endswith("  2:00:05 left")


def test_a_clock_counts_prompts_and_tokens() -> None:
    problem, schedule = random_plan(3)
    left = np.arange(20, 60)
    rest, thinned = remaining_schedule(problem, schedule, left)
    _, last = run(rest, thinned, PlanClock(problem, schedule, left, 1.0), 2.0)[-1]
    assert (last.finished, last.requests) == (len(problem), len(problem))
    assert last.speed > 0
