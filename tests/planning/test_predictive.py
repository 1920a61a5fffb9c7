"""Sampled lengths of a job: their distribution, tail and effects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import PAPER, workload_of

from batchbound import hidden_lengths
from batchbound.data.arrays import IntArray
from batchbound.data.lengths.interval import Interval
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.hidden_lengths import drawn_makespans, simulate_hidden
from batchbound.planning.history import History
from batchbound.planning.predictive import (
    STEP_DEVIATIONS,
    Margin,
    Predictive,
    Tail,
    deviation_of_steps,
    ranked_scores,
)

CAP = 2000
GROUPS, SAMPLES = 24, 4


def step(seed: int, *, effect: float = 0.0, alike: float = 0.3, spread: float = 0.5) -> Workload:
    """Return a step of groups alike by an intraclass correlation, longer or shorter by one factor."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(GROUPS), SAMPLES)
    score = np.sqrt(alike) * rng.standard_normal(GROUPS)[group]
    score += np.sqrt(1 - alike) * rng.standard_normal(len(group))
    lengths = np.minimum(CAP, np.rint(np.exp(5 + effect + spread * score))).astype(np.int64)
    return workload_of([20] * len(group), lengths.tolist(), group=group.tolist())


def renamed(workload: Workload, prefix: str) -> Workload:
    return replace(workload, ids=np.array([f"{prefix}{name}" for name in workload.ids]))


def problem(workload: Workload, slots: int = 8) -> Problem:
    return Problem(workload, PAPER, slots)


def predictive(earlier: list[Workload], cap: int | None = CAP) -> Predictive:
    history = History(tuple(renamed(each, f"{k}/") for k, each in enumerate(earlier)))
    return history.predictive(problem(step(99)), cap)


def draws(found: Predictive, count: int = 60) -> IntArray:
    """Return sets of lengths, shape (sets, requests)."""
    rng = np.random.default_rng(0)
    return np.array([found.draw(rng) for _ in range(count)])


def test_what_is_drawn_is_distributed_as_what_was_seen() -> None:
    earlier = [step(seed) for seed in range(6)]
    drawn, seen = np.log(draws(predictive(earlier))), np.log([each.output_tokens for each in earlier])
    assert drawn.mean() == pytest.approx(seen.mean(), abs=0.05)
    assert drawn.std() == pytest.approx(seen.std(), abs=0.06)
    within = [each.reshape(-1, GROUPS, SAMPLES).var(axis=2, ddof=1).mean() for each in (drawn, seen)]
    assert within[0] == pytest.approx(within[1], rel=0.2)


def test_the_next_length_is_the_largest_with_a_probability_of_one_in_one_more_than_were_seen() -> None:
    rng, lengths = np.random.default_rng(1), np.arange(1, 20)
    beyond = [1 - Margin.drawn(lengths, lengths - 1, CAP, None, rng).below[-1] for _ in range(4000)]
    assert np.mean(beyond) == pytest.approx(1 / 20, abs=0.003)


def test_lengths_grow_with_their_scores_up_to_the_cap() -> None:
    rng = np.random.default_rng(2)
    lengths = np.sort(rng.integers(1, 3000, 400))
    margin = Margin.drawn(lengths, np.arange(400), 9000, Tail.fitted(lengths, 9000), rng)
    drawn = margin.lengths(np.linspace(-8.0, 8.0, 400))
    assert np.all(np.diff(drawn) >= 0)
    assert drawn[0] >= 1
    assert lengths[-1] < drawn[-1] <= 9000


def test_a_tail_is_as_heavy_as_it_was_drawn_and_none_where_all_are_alike() -> None:
    rng = np.random.default_rng(3)
    for shape in (0.0, 1.0):
        share = rng.random(20_000)
        excess = -50 * np.log(share) if shape == 0 else 50 * (share**-shape - 1) / shape
        tail = Tail.fitted(np.rint(200 + excess).astype(np.int64), np.inf)
        assert tail is not None
        assert tail.weight @ tail.shape == pytest.approx(shape, abs=0.3)
    assert Tail.fitted(np.full(500, 70), np.inf) is None
    assert Tail.fitted(np.arange(4), np.inf) is None


def test_completions_cut_at_the_cap_count_as_longer() -> None:
    rng = np.random.default_rng(4)
    lengths = np.rint(rng.exponential(100, 4000)).astype(np.int64) + 1
    means = []
    for cap in (2000, 350):
        tail = Tail.fitted(np.minimum(lengths, cap), cap)
        assert tail is not None
        likely = tail.weight > 0
        means.append(float(np.median(tail.scale[likely])))
        assert tail.weight @ tail.shape == pytest.approx(0.0, abs=0.35)


def test_few_earlier_steps_leave_more_open_than_many() -> None:
    widths = []
    for count in (1, 2, 8):
        means = draws(predictive([step(seed, effect=0.1 * (-1) ** seed) for seed in range(count)])).mean(
            axis=1
        )
        widths.append(np.quantile(means, 0.95) / np.quantile(means, 0.05))
    assert widths[0] > widths[1] > widths[2] > 1.05


def test_steps_that_differ_are_seen_to() -> None:
    def expected_deviation(effects: list[float]) -> float:
        steps = [step(seed, effect=effect) for seed, effect in enumerate(effects)]
        lengths = np.concatenate([each.output_tokens for each in steps])
        scores = [ranked_scores(each.output_tokens, lengths) for each in steps]
        return float(deviation_of_steps(scores, [each.group for each in steps]) @ STEP_DEVIATIONS)

    assert expected_deviation([0.0] * 6) < 0.2 < expected_deviation([-0.4, 0.4, -0.3, 0.5, 0.0, -0.5])
    assert deviation_of_steps([np.zeros(3)], [np.arange(3)]).sum() == pytest.approx(1)


def test_another_model_predicts_each_length_as_far_as_models_agree() -> None:
    base = step(5, alike=0.95, spread=0.9)
    rng = np.random.default_rng(6)

    def model(noise: float) -> Workload:
        factor = np.exp(noise * rng.standard_normal(len(base)))
        return base.with_output_tokens(np.maximum(1, np.rint(base.output_tokens * factor)).astype(np.int64))

    agreement = []
    for noise in (0.1, 1.5):
        found = History(tuple(model(noise) for _ in range(5))).predictive(problem(base), CAP)
        drawn = draws(found)
        agreement.append(
            np.mean([np.corrcoef(np.log(each), np.log(base.output_tokens))[0, 1] for each in drawn])
        )
    assert agreement[0] > 0.75
    assert agreement[1] < 0.6
    # One earlier epoch alone is no certainty of the next one's lengths.
    alone = draws(History((model(0.0),)).predictive(problem(base), CAP))
    assert (alone != base.output_tokens).mean() > 0.5


@pytest.mark.parametrize("count", [1, 3])
def test_without_a_cap_nothing_is_expected_beyond_twice_the_longest_seen(count: int) -> None:
    earlier = step(7)
    lengths = earlier.output_tokens.copy()
    lengths[np.argsort(lengths)[-count:]] = 1900
    drawn = draws(predictive([earlier.with_output_tokens(lengths)], None), count=300)
    # Three that share the largest length were cut there.
    assert drawn.max() <= (3800 if count == 1 else 1900)


@pytest.mark.slow
def test_the_interval_holds_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_lengths, "SAMPLES", {})  # fewer sets of lengths, as for large jobs
    held = 0
    for seed in range(40):
        effects = 0.15 * np.random.default_rng(1000 + seed).standard_normal(4)
        steps = [step(10 * seed + k, effect=float(effect)) for k, effect in enumerate(effects)]
        history = History(tuple(renamed(each, f"{k}/") for k, each in enumerate(steps[:3])))
        job = problem(steps[3])
        found = Interval.of(list(drawn_makespans(job, history, "fcfs-ski", CAP, seed=seed)))
        held += found.low <= simulate_hidden(job, "fcfs-ski").makespan <= found.high
    # At a probability of 0.9, fewer than 32 of 40 and all 40 are each seen three times in two hundred.
    assert 32 <= held <= 39
