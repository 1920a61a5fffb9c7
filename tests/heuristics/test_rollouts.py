"""Policies for groups of completions whose lengths nobody knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import UNIT, workload_of
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.arrays import IntArray
from batchbound.data.problem import Problem
from batchbound.data.trace import Trace
from batchbound.heuristics.policy import Step
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.unknown_lengths.groups import group_numbers
from batchbound.heuristics.unknown_lengths.learned import WAVES_AT_FIRST
from batchbound.heuristics.unknown_lengths.lengths import Known, LengthModel, Observed
from batchbound.heuristics.unknown_lengths.registry import hidden_policy, without_lengths

HIDDEN = ("learned",)
"""Policies that may not know a length."""


def observed(group: list[int], tokens: list[int], ended: list[bool] | None = None) -> Observed:
    over = np.ones(len(group), dtype=np.bool_) if ended is None else np.array(ended)
    return Observed(np.array(group), np.array(tokens), over)


def rollouts(groups: list[int], outputs: list[int], slots: int, **limits: int) -> Problem:
    return Problem(workload_of([1] * len(groups), outputs, group=groups), UNIT, slots, **limits)  # type: ignore[arg-type]


def drawn(share: float, groups: int, samples: int, seed: int) -> tuple[IntArray, IntArray]:
    """Return groups and log-normal lengths with this intraclass correlation of their logarithms."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), samples)
    own = rng.standard_normal(len(group))
    scores = np.sqrt(share) * rng.standard_normal(groups)[group] + np.sqrt(1 - share) * own
    return group, np.maximum(1, np.exp(6 + 0.7 * scores)).astype(np.int64)


def decisions(trace: Trace) -> list[tuple[float, str, int]]:
    return [(stage.start, stage.kind, stage.active) for stage in trace.stages]


@st.composite
def groups_and_lengths(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    count = draw(st.integers(2, 16))
    lengths = st.lists(st.integers(1, 15), min_size=count, max_size=count)
    groups = draw(st.lists(st.integers(-1, 4), min_size=count, max_size=count))
    return groups, draw(lengths), draw(lengths), draw(st.integers(1, 4))


@pytest.mark.parametrize("name", HIDDEN)
@settings(max_examples=15, deadline=None)
@given(case=groups_and_lengths())
def test_what_a_policy_is_told_of_lengths_changes_nothing(
    name: str, case: tuple[list[int], list[int], list[int], int]
) -> None:
    groups, truth, told, slots = case
    traces = []
    for planned in (truth, told):
        problem = rollouts(groups, planned, slots, kv_capacity=40)
        traces.append(simulate(problem, policy_named(name, problem), np.array(truth)))
    assert decisions(traces[0]) == decisions(traces[1])
    assert traces[0].stage_of.tolist() == traces[1].stage_of.tolist()
    assert traces[0].slot_of.tolist() == traces[1].slot_of.tolist()


@pytest.mark.parametrize("name", HIDDEN)
@settings(max_examples=15, deadline=None)
@given(case=groups_and_lengths(), seed=st.integers(0, 99), part=st.floats(0, 1))
def test_lengths_of_requests_yet_to_start_do_not_change_what_was_decided_before(
    name: str, case: tuple[list[int], list[int], list[int], int], seed: int, part: float
) -> None:
    groups, truth, _, slots = case
    problem = rollouts(groups, truth, slots)
    before = simulate(problem, policy_named(name, problem))
    moment = float(np.quantile(before.prefilled, part, method="lower"))
    later = np.flatnonzero(before.prefilled > moment)
    other = np.array(truth)
    other[later] = np.random.default_rng(seed).permutation(other[later])
    shuffled = rollouts(groups, other.tolist(), slots)
    after = simulate(shuffled, policy_named(name, shuffled))
    early = before.prefilled <= moment
    assert (after.prefilled[early] == before.prefilled[early]).all()
    assert (after.slot_of[early] == before.slot_of[early]).all()
    assert (after.prefilled[~early] > moment).all()


def test_requests_without_a_group_are_groups_of_their_own() -> None:
    problem = rollouts([7, -1, 7, -1, 3], [1] * 5, slots=1)
    number, count = group_numbers(problem)
    assert count == 4
    assert number[0] == number[2]
    assert len({*number[[0, 1, 3, 4]].tolist()}) == 4


def observed_all(group: IntArray, tokens: IntArray) -> Observed:
    return Observed(group, tokens, np.ones(len(group), dtype=np.bool_))


def test_of_a_group_not_seen_the_expected_lengths_are_the_pooled_ones() -> None:
    model = LengthModel.learnt(observed([0, 1, 2, 3], [10, 20, 30, 60]), 5)
    assert model.expected(np.array([4])) == pytest.approx([30.0], abs=0.5)
    # Nothing is known of group 4 but the pool: past 20 rounds it is 30 or 60, and past 60 about to end.
    assert model.remaining(np.array([4, 4]), np.array([20, 60])) == pytest.approx([25.0, 1.0], abs=0.5)


def test_what_is_left_at_most_is_a_quantile_of_the_longer_lengths() -> None:
    model = LengthModel.learnt(observed([0, 1, 2, 3], [10, 20, 30, 60]), 5)
    group, tokens = np.array([4, 4, 4]), np.array([0, 20, 60])
    # Each of the four is as likely: 60 is the last quarter of all, and the upper half beyond 20.
    assert model.remaining_at_most(group, tokens, 0.95).tolist() == [60, 40, 1]
    assert model.remaining_at_most(group, tokens, 0.4).tolist() == [20, 10, 1]


def test_what_still_runs_is_allowed_for_as_kaplan_and_meier_do() -> None:
    # By hand: survival past 10 is 3/4; the one that left at 15 shares what it has among 20 and 40.
    seen = observed([0, 1, 2, 3], [10, 20, 40, 15], [True, True, True, False])
    model = LengthModel.learnt(seen, 5)
    assert model.lengths.tolist() == [10, 20, 40]
    pooled = 0.25 * 10 + 0.375 * 20 + 0.375 * 40
    assert model.expected(np.array([4])) == pytest.approx([pooled], abs=0.5)


def test_a_group_that_outlived_the_others_is_expected_to_be_longer() -> None:
    group, tokens = drawn(0.9, 20, 8, seed=3)
    running = np.append(tokens, np.full(2, tokens.max() * 2))
    seen = Observed(np.append(group, [20, 20]), running, np.append(np.ones(len(group)), [0, 0]).astype(bool))
    expected = LengthModel.learnt(seen, 22).expected(np.arange(22))
    assert expected[20] > expected[21]
    assert expected[20] == expected.max()


@given(seed=st.integers(0, 999), share=st.sampled_from([0.0, 0.5, 0.95]), cut=st.integers(50, 2000))
@settings(max_examples=25, deadline=None)
def test_every_probability_sums_to_one_and_something_always_remains(
    seed: int, share: float, cut: int
) -> None:
    group, tokens = drawn(share, 6, 5, seed)
    ended = tokens <= cut
    ended[0] = True
    model = LengthModel.learnt(Observed(group, np.where(ended, tokens, cut), ended), 7)
    assert model.mass.sum(axis=1) == pytest.approx(1.0)
    assert model.share_weight.sum() == pytest.approx(1.0)
    assert (model.remaining(group, tokens) >= 1).all()
    assert np.isfinite(model.expected(np.arange(7))).all()


def test_a_model_of_nothing_ended_is_refused() -> None:
    with pytest.raises(ValueError, match="no request has ended"):
        LengthModel.learnt(observed([0], [5], [False]), 1)


def test_the_learned_policy_serves_by_arrival_where_groups_do_not_differ() -> None:
    group, tokens = drawn(0.0, 40, 8, seed=5)
    problem = rollouts(group.tolist(), tokens.tolist(), slots=16)
    blind = without_lengths(problem)
    ours, plain = (
        simulate(blind, hidden_policy(name, blind), problem.workload.output_tokens)
        for name in ("learned", "fcfs-ski")
    )
    before = len(problem) - int(WAVES_AT_FIRST * problem.slots)
    order = np.argsort(ours.prefilled[:before], kind="stable")
    assert order.tolist() == list(range(before))
    assert ours.makespan <= plain.makespan * 1.05


def test_the_learned_policy_gains_where_groups_are_alike() -> None:
    gains = []
    for seed in range(6):
        group, tokens = drawn(0.95, 12, 8, seed)
        problem = rollouts(group.tolist(), tokens.tolist(), slots=16)
        blind = without_lengths(problem)
        seconds = {
            name: simulate(blind, hidden_policy(name, blind), problem.workload.output_tokens).makespan
            for name in ("learned", "fcfs-ski")
        }
        gains.append(1 - seconds["learned"] / seconds["fcfs-ski"])
    assert np.mean(gains) > 0.03


@settings(max_examples=30, deadline=None)
@given(case=groups_and_lengths(), swap=st.sampled_from([0.0, 0.01, 1.0]))
def test_a_job_with_moved_kv_caches_completes_each_request_once(
    case: tuple[list[int], list[int], list[int], int], swap: float
) -> None:
    groups, truth, _, slots = case
    problem = rollouts(groups, truth, slots)
    blind = without_lengths(problem)
    trace = simulate(blind, hidden_policy("learned", blind, swap=swap), np.array(truth), swap=swap)
    assert trace.tokens.tolist() == truth
    assert np.isfinite(trace.finished).all()


def test_moving_takes_its_seconds_out_and_back_and_no_prefill_stage() -> None:
    # Request 0 holds 1 + 3 tokens when it goes to the host; at 0.5 s a token it takes 2 s there and 2 s back.
    problem = rollouts([0, 1], [5, 2], slots=1)
    steps = iter(
        [
            Step(prefill=[0], slots=[0], decode_steps=0),
            Step(decode_steps=3),
            Step(decode_steps=0, evict=[0]),
            Step(prefill=[1], slots=[0], decode_steps=0),
            Step(decode_steps=2),
            Step(prefill=[0], slots=[0], decode_steps=0),
            Step(decode_steps=2),
        ]
    )
    moved = simulate(problem, lambda _state: next(steps), swap=0.5)
    prefill, decode = UNIT.prefill_seconds(1), UNIT.decode_seconds(1)
    assert moved.makespan == pytest.approx(2 * prefill + 7 * decode + 4.0)


def test_preemption_swaps_what_is_nearly_done_for_what_may_be_long() -> None:
    group, tokens = drawn(0.95, 12, 8, seed=2)
    evictions = []
    for lengths in (np.minimum(tokens, 600), tokens):
        problem = rollouts(group.tolist(), lengths.tolist(), slots=32)
        blind = without_lengths(problem)
        trace = simulate(blind, hidden_policy("learned", blind, swap=1e-6), lengths, swap=1e-6)
        assert trace.tokens.tolist() == lengths.tolist()
        evictions.append(trace.evictions)
    # Where nothing is cut, what has run long is no nearer its end.
    assert evictions[0] > 0
    assert evictions[1] == 0


@pytest.mark.slow
def test_giving_way_ends_sooner_where_long_groups_reach_a_cap() -> None:
    seconds = []
    for seed in range(12):
        group, tokens = drawn(0.95, 16, 8, seed)
        tokens = np.minimum(tokens, 900)
        problem = rollouts(group.tolist(), tokens.tolist(), slots=32)
        blind, known = without_lengths(problem), Known(longest=900)
        policies = {swap: hidden_policy("learned", blind, known, swap) for swap in (None, 1e-6)}
        seconds.append([simulate(blind, each, tokens, swap=swap).makespan for swap, each in policies.items()])
    stay, moved = np.array(seconds).T
    assert moved.mean() < 0.98 * stay.mean()


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_rounding_decides_nothing(seed: int) -> None:
    group, tokens = drawn(0.95, 12, 8, seed)
    tokens = np.minimum(tokens, 600)
    problem = rollouts(group.tolist(), tokens.tolist(), slots=32)
    blind, rng = without_lengths(problem), np.random.default_rng(seed)
    learnt = LengthModel.learnt

    def noisy(*args: Any) -> LengthModel:
        model = learnt(*args)
        return replace(model, mass=model.mass * (1 + 1e-14 * rng.standard_normal(model.mass.shape)))

    plain = simulate(blind, hidden_policy("learned", blind, swap=1e-6), tokens, swap=1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LengthModel, "learnt", noisy)
        other = simulate(blind, hidden_policy("learned", blind, swap=1e-6), tokens, swap=1e-6)
    assert decisions(other) == decisions(plain)


def test_the_cap_is_as_likely_as_completions_reach_it() -> None:
    tokens = np.append(np.arange(1, 81), [90] * 20)
    seen = observed(np.arange(100).tolist(), tokens.tolist())
    assert LengthModel.learnt(seen, 100).capped == pytest.approx(0.2, abs=0.02)
    assert LengthModel.learnt(seen, 100, Known(longest=90)).capped == pytest.approx(0.2, abs=0.02)
    assert LengthModel.learnt(seen, 100, Known(longest=91)).capped == 0
    shorter = LengthModel.learnt(seen, 100, Known(longest=50))
    assert shorter.capped == pytest.approx(0.51, abs=0.02)
    assert shorter.lengths.max() == 50
    alone = observed(np.arange(80).tolist(), tokens[:80].tolist())
    assert LengthModel.learnt(alone, 80).capped == 0


def test_nothing_is_moved_where_every_group_has_one_request() -> None:
    tokens = np.minimum(drawn(0.0, 80, 1, seed=3)[1], 500)
    noise = np.random.default_rng(1).standard_normal(len(tokens))
    known = Known(score=np.log(tokens) + 0.3 * noise)
    traces = []
    for groups, swap in (([-1] * 80, None), ([-1] * 80, 1e-9), ([0, 0, *[-1] * 78], 1e-9)):
        problem = rollouts(groups, tokens.tolist(), slots=16)
        blind = without_lengths(problem)
        told = known if len(set(groups)) == 1 else Known(score=known.score[1:])  # type: ignore[index]
        traces.append(simulate(blind, hidden_policy("learned", blind, told, swap), tokens, swap=swap))
    stay, alone, mixed = traces
    assert decisions(alone) == decisions(stay)
    assert alone.evictions == 0
    assert mixed.evictions > 0


def test_a_model_of_some_groups_says_the_same_of_them_as_one_of_all() -> None:
    group, tokens = drawn(0.5, 12, 1, seed=3)
    known = Known(score=np.where(group % 5 == 0, np.nan, np.log(tokens)))
    seen = Observed(group[:8], tokens[:8], np.arange(8) < 6)
    every = LengthModel.learnt(seen, 12, known)
    some = LengthModel.learnt(seen, 12, known, wanted=np.arange(12) > 5)
    assert some.mass[6:] == pytest.approx(every.mass[6:], abs=1e-12)
    assert every.mass.sum(axis=1) == pytest.approx(np.ones(12))
    assert some.predicted_share == every.predicted_share


def test_predictions_order_the_groups_from_the_start() -> None:
    problem = rollouts([0, 1, 2, 3], [2, 9, 4, 7], slots=1)
    known = Known(score=np.array([2.0, 9.0, 4.0, 7.0]))
    blind = without_lengths(problem)
    trace = simulate(blind, hidden_policy("learned", blind, known), problem.workload.output_tokens)
    assert np.argsort(trace.prefilled)[0] == 1


def test_predictions_that_say_nothing_are_given_up() -> None:
    group, tokens = np.arange(300), drawn(0.0, 300, 1, seed=4)[1]
    seen = observed_all(group, tokens)
    told = LengthModel.learnt(seen, 300, Known(score=tokens.astype(float)))
    noise = np.random.default_rng(0).standard_normal(300)
    untold = LengthModel.learnt(seen, 300, Known(score=noise))
    assert told.predicted_share > 0.7
    assert untold.predicted_share < 0.05


def test_earlier_steps_tell_the_share_before_anything_has_ended() -> None:
    past = observed_all(*drawn(0.9, 60, 8, seed=6))
    none = Observed(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_))
    model = LengthModel.learnt(none, 5, Known(past=past))
    assert model.share == pytest.approx(0.9, abs=0.06)
    assert model.expected(np.arange(5)) == pytest.approx(np.mean(past.tokens), rel=0.1)


def test_nothing_is_expected_beyond_the_cap() -> None:
    seen = observed([0, 1, 2], [10, 900, 900], [True, False, False])
    assert LengthModel.learnt(seen, 3, Known(longest=1000)).lengths.max() <= 1000
    assert LengthModel.learnt(seen, 3).lengths.max() > 1000


def test_a_policy_that_goes_by_lengths_is_refused_without_them() -> None:
    problem = rollouts([0, 1], [5, 2], slots=1)
    with pytest.raises(ValueError, match="'lpt' goes by lengths"):
        hidden_policy("lpt", problem)
