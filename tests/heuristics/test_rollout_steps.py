"""Several steps of rollouts: barriers, requests that go on, groups that keep some, and tail batching."""

from __future__ import annotations

import numpy as np
import pytest
from builders import UNIT, mostly_slow, workload_of
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.lengths.steps import BARRIER, Way
from batchbound.data.problem import Problem
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.unknown_lengths.registry import hidden_policy, without_lengths
from batchbound.heuristics.unknown_lengths.steps import StepsRun, simulate_steps

WAYS = (
    BARRIER,
    Way(ahead=0.5),
    Way(ahead=1.0, keep_kv=True),
    Way(keep=1),
    Way(ahead=0.5, keep=1),
    Way(ahead=0.5, restart=True),
    Way(ahead=0.5, restart=True, keep=1),
    Way(groups=0.5),
)


def rollouts(groups: list[int], outputs: list[int], slots: int) -> Problem:
    return Problem(workload_of([1] * len(groups), outputs, group=groups), UNIT, slots)


def run(problem: Problem, step: list[int], way: Way, name: str = "fcfs") -> StepsRun:
    blind = without_lengths(problem)
    policy = hidden_policy(name, blind)
    return simulate_steps(blind, np.array(step), way, policy, problem.workload.output_tokens)


def seconds(prefills: list[int], decodes: list[int]) -> float:
    """Return the seconds of stages of so many tokens and of decode steps of so many slots."""
    return sum(UNIT.prefill_seconds(tokens) for tokens in prefills) + sum(map(UNIT.decode_seconds, decodes))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    groups, steps = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    samples = draw(st.integers(2, 3))
    count = groups * steps * samples
    group = np.repeat(np.arange(groups * steps), samples).tolist()
    step = np.repeat(np.arange(steps), groups * samples).tolist()
    lengths = draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    return group, step, lengths, draw(st.integers(1, 5))


@pytest.mark.parametrize("name", mostly_slow(["fcfs", "fcfs-ski", "learned"], fast=["learned"]))
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=6, deadline=None)
@given(job=jobs())
def test_every_group_keeps_what_it_should_and_nothing_is_shortened(
    name: str, way: Way, job: tuple[list[int], list[int], list[int], int]
) -> None:
    group, step, lengths, slots = job
    found = run(rollouts(group, lengths, slots), step, way, name)
    kept = np.bincount(np.array(group)[found.kept], minlength=max(group) + 1)
    whole = np.bincount(group).min() if way.keep is None else way.keep
    assert set(kept.tolist()) <= ({whole} if way.groups is None else {0, whole})
    assert way.groups is None or set(found.ended[found.kept].tolist()) == set(step)
    assert found.tokens[found.kept].tolist() == np.array(lengths)[found.kept].tolist()
    assert (found.begun[found.kept] >= 0).all()
    assert (found.ended[found.kept] >= found.begun[found.kept]).all()
    assert (found.seconds >= 0).all()


@settings(max_examples=25, deadline=None)
@given(job=jobs(), name=st.sampled_from(["fcfs", "fcfs-ski"]))
def test_with_a_barrier_steps_take_what_each_takes_alone(
    job: tuple[list[int], list[int], list[int], int], name: str
) -> None:
    group, step, lengths, slots = job
    found = run(rollouts(group, lengths, slots), step, BARRIER, name)
    for k, took in enumerate(found.seconds.tolist()):
        mine = [i for i in range(len(step)) if step[i] == k]
        alone = rollouts([group[i] for i in mine], [lengths[i] for i in mine], slots)
        blind = without_lengths(alone)
        trace = simulate(blind, hidden_policy(name, blind), alone.workload.output_tokens)
        assert took == pytest.approx(trace.makespan)
    assert found.staleness == 0
    assert found.lost == 0
    assert found.kept_bias(np.array(lengths)) == 0


def test_the_next_steps_group_fills_the_tail_and_goes_on() -> None:
    # Two slots, two steps of one group of two; the second is let in from the start and begins after 1 step.
    problem = rollouts([0, 0, 1, 1], [1, 3, 4, 1], slots=2)
    found = run(problem, [0, 0, 1, 1], Way(ahead=1.0, keep_kv=True))
    first = seconds([2, 1], [2, 2, 2])
    assert found.seconds[0] == pytest.approx(first)
    assert found.begun.tolist() == [0, 0, 0, 1]
    assert found.ended.tolist() == [0, 0, 1, 1]
    # Request 2 has two decode steps left, request 3 one.
    assert found.seconds[1] == pytest.approx(seconds([1], [2, 1]))
    assert found.stale_share == 0.25


def test_kv_of_the_weights_before_is_computed_anew_unless_it_is_kept() -> None:
    problem = rollouts([0, 0, 1, 1], [1, 3, 4, 1], slots=2)
    kept, anew = (
        run(problem, [0, 0, 1, 1], Way(ahead=1.0, keep_kv=keep_kv)).seconds for keep_kv in (True, False)
    )
    assert anew[0] == pytest.approx(kept[0])
    # Request 2 comes back with 1 + 2 tokens, in one stage with request 3's one.
    assert anew[1] - kept[1] == pytest.approx(UNIT.prefill_seconds(4) - UNIT.prefill_seconds(1))


def test_one_of_two_is_kept_and_the_longer_one_is_lost() -> None:
    problem = rollouts([0, 0, 1, 1], [2, 9, 7, 3], slots=2)
    found = run(problem, [0, 0, 1, 1], Way(keep=1))
    assert found.kept.tolist() == [True, False, False, True]
    assert found.makespan == pytest.approx(seconds([2, 2], [2] * 5))
    assert found.lost == 2 + 3
    assert found.kept_bias(np.array([2, 9, 7, 3])) == pytest.approx(2.5 / 5.25 - 1)


def test_what_ends_beside_the_one_that_is_kept_is_lost_once() -> None:
    problem = rollouts([0, 0, 0, 1], [2, 2, 9, 1], slots=3)
    found = run(problem, [0, 0, 0, 1], Way(keep=1))
    assert found.kept.tolist() == [True, False, False, True]
    assert found.lost == 2 + 2


def test_the_first_of_two_groups_is_enough_and_the_other_is_given_up() -> None:
    problem = rollouts([0, 0, 1, 1, 2, 2, 3, 3], [9, 9, 1, 2, 3, 3, 9, 9], slots=4)
    found = run(problem, [0] * 4 + [1] * 4, Way(groups=0.5))
    assert found.kept.tolist() == [False, False, True, True, True, True, False, False]
    assert found.seconds.tolist() == pytest.approx([seconds([4], [4, 3]), seconds([4], [4, 4, 4])])
    assert found.lost == 2 * 2 + 2 * 3
    assert found.ages() == [4]
    assert found.kept_bias(problem.workload.output_tokens) == pytest.approx(9 / 45 * 8 / 4 - 1)


def test_tail_batching_starts_late_groups_again_in_a_step_of_their_own() -> None:
    # Two groups are let in, one is waited for: the long one starts again from nothing.
    problem = rollouts([0, 1], [9, 2], slots=2)
    found = run(problem, [0, 1], Way(ahead=1.0, restart=True))
    assert found.seconds.tolist() == pytest.approx([seconds([2], [2, 2]), seconds([1], [1] * 9)])
    assert found.lost == 2
    assert found.begun.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Way(ahead=-0.1), "ahead is -0.1"),
        (lambda: Way(keep=0), "keep is 0"),
        (lambda: Way(restart=True), "restart has no effect"),
        (lambda: Way(keep_kv=True), "keep_kv has no effect"),
        (lambda: Way(ahead=0.5, restart=True, keep_kv=True), "keep_kv has no effect"),
        (lambda: run(rollouts([0, 0], [1, 1], 1), [1, 0], BARRIER), "steps descend"),
        (lambda: run(rollouts([0, 0], [1, 1], 1), [0, 1], BARRIER), "in several steps"),
        (lambda: run(rollouts([0, 0], [1, 1], 1), [0, 0], Way(keep=2)), "it has no effect"),
    ],
)
def test_a_way_that_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
