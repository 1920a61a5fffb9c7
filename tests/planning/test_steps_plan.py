"""Plans over several steps: what is chosen, what is expected, and how it narrows as completions end."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from builders import PAPER, workload_of

from batchbound.data.costs.cost import CostModel
from batchbound.data.files.disk import InputError, read_json_object, write_json
from batchbound.data.lengths.steps_plan import StepsPlan, Way
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.unknown_lengths.registry import hidden_policy, without_lengths
from batchbound.heuristics.unknown_lengths.steps import StepsRun, reached_tokens, simulate_steps
from batchbound.models.bounds.makespan import best_bound
from batchbound.planning.history import History
from batchbound.planning.steps import make_steps_plan, steps_of, update_steps_plan
from batchbound.solvers.result import Limits

GROUPS, SAMPLES, STEPS, CAP = 4, 3, 2, 400
STEP = np.repeat(np.arange(STEPS), GROUPS * SAMPLES)


def rollouts(seed: int, prefix: str = "") -> Workload:
    """Return steps of a few groups, with a heavy tail that is cut."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(STEPS * GROUPS), SAMPLES)
    score = 0.5 * rng.standard_normal(STEPS * GROUPS)[group] + 0.8 * rng.standard_normal(len(group))
    lengths = np.clip(np.rint(np.exp(4 + score)), 1, CAP).astype(int)
    workload = workload_of([20] * len(group), lengths.tolist(), group=group.tolist())
    return replace(workload, ids=np.array([f"{prefix}{name}" for name in workload.ids]))


HISTORY = History((rollouts(50, "x"), rollouts(51, "y")))


def job(seed: int = 0) -> Problem:
    return Problem(rollouts(seed), PAPER, 4)


@cache
def planned(
    permitted: Way, policy: str | None = "fcfs-ski", seed: int = 0, seconds: float | None = 1e-9
) -> StepsPlan:
    """Return a plan, by default by the fewest sets of lengths, which no time at all leaves."""
    limits = Limits(seconds=seconds)
    return make_steps_plan(job(seed), STEP, HISTORY, permitted, policy=policy, longest=CAP, limits=limits)


def served(plan: StepsPlan, problem: Problem) -> StepsRun:
    blind = without_lengths(problem)
    made = hidden_policy(plan.policy, blind, HISTORY.known(blind, CAP))
    return simulate_steps(blind, STEP, plan.way, made, problem.workload.output_tokens)


@pytest.mark.slow
def test_what_changes_the_data_is_never_more_than_the_user_permits() -> None:
    barrier = planned(Way())
    assert barrier.way == Way()
    assert (barrier.expected.stale_share, barrier.expected.kept_bias) == (0, 0)
    ahead = planned(Way(ahead=1.0, keep_kv=True), policy=None)
    assert ahead.way.ahead <= 1.0
    assert ahead.expected.stale_share > 0
    assert ahead.expected.total.mean < barrier.expected.total.mean
    assert len(ahead.expected.compared) == 3 * 3
    assert planned(Way(keep=2)).way == Way(keep=2)


@pytest.mark.slow
def test_a_time_limit_leaves_fewer_sets_of_lengths_to_expect_by() -> None:
    whole, short = (
        make_steps_plan(
            job(), STEP, HISTORY, Way(ahead=1.0), policy="fcfs", longest=CAP, limits=Limits(seconds=seconds)
        )
        for seconds in (None, 1e-9)
    )
    assert whole.expected.samples == 99
    assert short.expected.samples == 19
    assert len(short.expected.compared) == len(whole.expected.compared)
    later = update_steps_plan(short, HISTORY, {"0": 9}, seconds=1e-9)
    assert later.expected.samples == 19


def test_policies_told_more_than_can_be_known_say_what_is_left_to_foresight() -> None:
    plan = planned(Way(), "fcfs")
    expected = plan.expected
    assert expected.told_tendencies is not None
    assert expected.told_lengths is not None
    # First come, first served with a barrier is the plan itself.
    assert expected.recovered(expected.total) == pytest.approx(0)
    assert expected.recovered(expected.bound) == pytest.approx(1)
    shares = [expected.recovered(each) for each in (expected.told_tendencies, expected.told_lengths)]
    assert all(share is not None and 0 < share < 1 for share in shares)
    under_way = update_steps_plan(plan, HISTORY, {"0": 9}).expected
    assert (under_way.told_tendencies, under_way.told_lengths) == (None, None)


def test_nothing_is_begun_ahead_where_it_gains_nothing() -> None:
    alike = [each.with_output_tokens(np.full(len(each), 50)) for each in HISTORY.workloads]
    found = make_steps_plan(
        job(), STEP, History(tuple(alike)), Way(ahead=1.0, keep_kv=True), policy="fcfs", longest=50
    )
    assert found.way == Way()


def test_the_lengths_of_the_job_are_not_read() -> None:
    first, second = (planned(Way(ahead=1.0), seed=seed) for seed in (0, 7))
    assert first.to_json() == second.to_json()
    assert set(first.fleet.workload.output_tokens.tolist()) == {1}


@pytest.mark.parametrize("way", [Way(), Way(ahead=1.0, keep_kv=True), Way(keep=2), Way(ahead=1.0, keep=2)])
def test_the_bound_is_below_what_any_sampled_run_takes(way: Way) -> None:
    from batchbound.planning.steps import _Lengths

    nothing = np.zeros(len(STEP), dtype=np.int64)
    lengths = _Lengths(without_lengths(job()), STEP, HISTORY, CAP, nothing, None, 0)
    for at, truth in enumerate(each.lengths for each in lengths._sets[:20]):
        run = lengths.run(way, "fcfs-ski", at)
        assert lengths._bound(way, truth) <= run.makespan * (1 + 1e-9)
    if way == Way():
        first = lengths._sets[0].lengths
        whole = replace(job(), workload=job().workload.with_output_tokens(first))
        parts = [replace(whole, workload=whole.workload.select(np.flatnonzero(k == STEP))) for k in (0, 1)]
        total = sum(best_bound(part).seconds for part in parts)
        assert lengths._bound(way, first) == pytest.approx(total)


def test_what_goes_on_in_another_slot_is_below_no_bound_that_lets_nothing_give_way() -> None:
    from batchbound.planning.steps import _Lengths

    # Three of nine decode steps and one of twelve on three slots: 18 in whole pieces, 15 in parts.
    truth, step, way = np.array([12, 9, 5, 1, 9, 9]), np.array([0, 0, 1, 1, 2, 2]), Way(ahead=2.0)
    workload = workload_of([1] * 6, truth.tolist(), group=step.tolist())
    problem = Problem(workload, CostModel(0.0, 0.0, 1.0, 0.0), slots=3)
    blind = without_lengths(problem)
    ran = simulate_steps(blind, step, way, hidden_policy("learned", blind), truth)
    lengths = _Lengths(blind, step, HISTORY, CAP, np.zeros(6, dtype=np.int64), None, 0)
    assert ran.makespan < best_bound(problem).seconds
    assert lengths._bound(way, truth) <= ran.makespan
    assert lengths._bound(replace(way, keep_kv=True), truth) == best_bound(problem).seconds


@pytest.mark.slow
def test_the_interval_narrows_as_completions_end_and_closes_on_what_it_takes() -> None:
    plan, problem = planned(Way(ahead=0.5, keep_kv=True), seconds=None), job()
    run, tokens = served(plan, problem), problem.workload.output_tokens
    names = problem.workload.ids.tolist()
    whole = dict(zip(names, tokens.tolist(), strict=True))
    first = {name: whole[name] for name, ended in zip(names, run.ended.tolist(), strict=True) if ended == 0}
    assert 0 < len(first) < len(whole)
    later = update_steps_plan(plan, HISTORY, first)
    widths = [each.total.high - each.total.low for each in (plan.expected, later.expected)]
    assert widths[1] < widths[0]
    first_step = later.expected.seconds[0]
    assert (first_step.low, first_step.high) == pytest.approx((run.seconds[0], run.seconds[0]))
    assert later.expected.total.low <= run.makespan <= later.expected.total.high
    done = update_steps_plan(later, HISTORY, whole)
    assert done.expected.total.low == pytest.approx(run.makespan)
    assert done.expected.total.high == pytest.approx(run.makespan)
    assert done.way == plan.way


def reached(problem: Problem, way: Way, ended: list[bool]) -> list[int]:
    """Return each request's tokens, first come, first served, as the last of those ended has all of its."""
    blind, is_over = without_lengths(problem), np.array(ended)
    lengths = np.where(is_over, problem.workload.output_tokens, 50)
    one_step = np.zeros(len(problem), dtype=np.int64)
    found = reached_tokens(blind, one_step, way, hidden_policy("fcfs", blind), lengths, is_over)
    tokens: list[int] = found.tolist()
    return tokens


def test_what_still_runs_is_longer_than_it_was_when_the_last_of_the_others_ended() -> None:
    # One slot each: 3 and 9 begin, the third at 3; as it ends at 3 + 4, the second has 7.
    problem = Problem(workload_of([1] * 4, [3, 9, 4, 6], group=[0, 0, 1, 1]), PAPER, 2)
    assert reached(problem, Way(), [True, False, True, False]) == [3, 7, 4, 0]


def test_what_ended_beside_the_one_that_is_kept_counts_as_ended() -> None:
    # Three slots: the first two end together after 3 steps, and one of them is kept; the third has 3 by then.
    problem = Problem(workload_of([1] * 4, [3, 3, 9, 20], group=[0, 0, 1, 1]), PAPER, 3)
    assert reached(problem, Way(keep=1), [True, True, False, False]) == [3, 3, 3, 0]


def test_what_was_stopped_right_after_its_prompt_has_the_token_that_this_yielded() -> None:
    # Two slots: the first ends with its first token, and the other of its group is stopped.
    problem = Problem(workload_of([1] * 4, [1, 9, 9, 9], group=[0, 0, 1, 1]), PAPER, 2)
    problem = replace(problem, prefill_emits_first_token=True)
    blind = without_lengths(problem)
    ended = np.array([True, False, False, False])
    found = reached_tokens(
        blind,
        np.zeros(4, dtype=np.int64),
        Way(keep=1),
        hidden_policy("fcfs", blind),
        np.where(ended, problem.workload.output_tokens, 50),
        ended,
    )
    assert found.tolist() == [1, 1, 0, 0]


def test_steps_are_shared_out_by_whole_groups() -> None:
    assert steps_of(job(), 4).tolist() == np.repeat(np.arange(4), 6).tolist()
    with pytest.raises(ValueError, match="9 steps of 8 groups"):
        steps_of(job(), 9)


def test_a_plan_comes_back_from_its_file_and_is_no_schedule(tmp_path: Path) -> None:
    plan, path = planned(Way(keep=2)), tmp_path / "steps.json"
    plan.save(path)
    assert StepsPlan.load(path).to_json() == plan.to_json()
    with pytest.raises(InputError, match="is a plan of several steps, no plan"):
        Plan.load(path)
    write_json(path, read_json_object(path) | {"step": [0]})
    with pytest.raises(InputError, match="field 'step': has 1 entries for 24 requests"):
        StepsPlan.load(path)


@pytest.mark.parametrize(
    ("ended", "message"), [({"no": 3}, "'no' is no request"), ({"0": 0}, "has 0 tokens"), ({"0": 900}, "900")]
)
def test_what_cannot_have_ended_is_refused(ended: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        update_steps_plan(planned(Way()), HISTORY, ended)
