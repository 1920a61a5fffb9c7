"""The search for orders of requests that share beginnings."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from batchbound.data.arrays import IntArray
from batchbound.data.costs.iteration_rates import IterationRates
from batchbound.data.iterations import EngineLimits
from batchbound.data.prefix_tree import PrefixTree
from batchbound.heuristics.prefixes.choice import (
    UNKNOWN_RATES,
    Forecast,
    Outlook,
    Scenario,
    choose,
    possible_rates,
)
from batchbound.heuristics.prefixes.engine import CachedRun
from batchbound.heuristics.prefixes.orders import FILE_ORDER, LONGEST_FIRST
from batchbound.solvers.prefix_search import search_tree_order
from batchbound.solvers.result import Limits, StoppedBy

RATES = IterationRates(1.0, 0.01, 0.05, error=0.02)

RUN = CachedRun(1, 1, 0, 0, 1, 0)


def _outlook(name: str, *seconds: float) -> Outlook:
    return Outlook(name, np.arange(1), tuple(RUN for _ in seconds), seconds)


def _documents(questions: int = 6) -> PrefixTree:
    """Return three documents of 40 tokens, asked in turn."""
    count = 3 * questions
    return PrefixTree(
        np.full(3, -1), np.full(3, 40), np.tile(np.arange(3), questions), np.full(count, 4), unit=4
    )


def test_the_order_of_least_largest_regret_is_chosen() -> None:
    outlooks = {
        FILE_ORDER: _outlook(FILE_ORDER, 10.0, 10.0),
        "one": _outlook("one", 4.0, 9.0),
        "other": _outlook("other", 5.0, 6.0),
    }
    assert choose(outlooks).name == "other"


def test_file_order_is_kept_where_another_may_be_slower() -> None:
    outlooks = {FILE_ORDER: _outlook(FILE_ORDER, 10.0, 10.0), "risky": _outlook("risky", 1.0, 10.1)}
    assert choose(outlooks).name == FILE_ORDER


def test_fitted_costs_are_certain_and_others_are_not() -> None:
    assert possible_rates(RATES) == (RATES,)
    assert len(possible_rates(replace(RATES, error=0.15))) == 3
    ratios = [rates.prompt_tokens / UNKNOWN_RATES.prompt_tokens for rates in possible_rates(None)]
    assert ratios == pytest.approx([1 / 3, 1, 3])


def test_a_scarce_cache_gets_subtrees_and_an_ample_one_longest_first() -> None:
    tree, rng = _documents(), np.random.default_rng(1)
    output = rng.integers(1, 20, len(tree))
    limits = EngineLimits(2, 64, 88, 4)
    scarce = search_tree_order(tree, [Scenario(output, RATES)], limits)
    assert scarce.outlook.runs[0].prompt_tokens == tree.distinct_tokens
    assert scarce.baselines[FILE_ORDER].runs[0].prompt_tokens > 3 * tree.distinct_tokens
    ample = search_tree_order(tree, [Scenario(output, RATES)], EngineLimits(2, 64, 8000, 4))
    assert ample.outlook.seconds[0] <= ample.baselines[LONGEST_FIRST].seconds[0]


def test_without_lengths_only_the_tree_orders() -> None:
    tree = _documents()
    guesses = [Scenario(np.full(len(tree), tokens), RATES) for tokens in (4, 16)]
    found = search_tree_order(tree, guesses, EngineLimits(2, 64, 88, 4), lengths_known=False)
    assert LONGEST_FIRST not in found.baselines
    leaves = tree.leaf[found.outlook.order].tolist()
    assert leaves == sorted(leaves)


def test_the_search_improves_on_every_rule_and_stops_at_its_work() -> None:
    tree, rng = _documents(8), np.random.default_rng(4)
    output = np.maximum(1, rng.lognormal(2.5, 1.0, len(tree)).astype(np.int64))
    limits = EngineLimits(4, 64, 180, 4)
    simple = search_tree_order(tree, [Scenario(output, RATES)], limits)
    searched = search_tree_order(tree, [Scenario(output, RATES)], limits, Limits(work=150))
    assert searched.stopped_by is StoppedBy.WORK
    assert searched.outlook.seconds[0] < simple.outlook.seconds[0]
    again = search_tree_order(tree, [Scenario(output, RATES)], limits, Limits(work=150))
    assert np.array_equal(again.outlook.order, searched.outlook.order)


def test_a_request_that_exceeds_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds the KV cache"):
        Forecast(_documents(), [Scenario(np.full(18, 60), RATES)], EngineLimits(2, 64, 88, 4))


def test_drawn_jobs_are_never_slower_than_any_rule() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        nodes, requests = rng.randint(1, 6), rng.randint(2, 20)
        tree = PrefixTree(
            np.array([rng.randint(-1, node - 1) for node in range(nodes)]),
            np.array([4 * rng.randint(1, 10) for _ in range(nodes)]),
            np.array([rng.randint(-1, nodes - 1) for _ in range(requests)]),
            np.array([rng.randint(1, 12) for _ in range(requests)]),
            unit=4,
        )
        output = np.array([rng.randint(1, 30) for _ in range(requests)])
        most = int((tree.prompt_tokens + output).max())
        limits = EngineLimits(rng.randint(1, 5), rng.choice([8, 64]), most + rng.choice([4, 40, 400]), 4)
        scenarios = [Scenario(output, rates) for rates in possible_rates(rng.choice([None, RATES]))]
        found = search_tree_order(tree, scenarios, limits, Limits(work=5))
        assert np.array_equal(np.sort(found.outlook.order), np.arange(requests))
        rules = found.baselines.values() if len(scenarios) == 1 else [found.baselines[FILE_ORDER]]
        for rule in rules:
            assert found.outlook.is_sure(rule), f"seed {seed}: {rule.name}"


def test_equal_orders_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = PrefixTree(np.full(2, -1), np.full(2, 40), np.repeat(np.arange(2), 4), np.full(8, 4), unit=4)
    simulated, of = list[bytes](), Forecast.of

    def noted(forecast: Forecast, name: str, order: IntArray) -> Outlook:
        simulated.append(order.tobytes())
        return of(forecast, name, order)

    monkeypatch.setattr(Forecast, "of", noted)
    found = search_tree_order(tree, [Scenario(np.full(8, 3), RATES)], EngineLimits(2, 64, 88, 4))
    # All lengths are equal: the file is in the order of every rule.
    assert len(found.baselines) == 4
    assert len(simulated) == len(set(simulated)) == 1


def test_without_lengths_caps_order_where_no_guess_is_slower_than_file_order() -> None:
    tree, caps = _documents(), np.full(18, 4)
    # The last question has room for a long completion, which file order begins last.
    caps[-1] = 60
    guesses = [Scenario(np.minimum(caps, tokens), RATES) for tokens in (16, 64)]
    ample = EngineLimits(2, 64, 8000, 4)
    found = search_tree_order(tree, guesses, ample, lengths_known=False)
    assert found.outlook.name.endswith("by caps")
    assert 17 in found.outlook.order[:4].tolist()
    file = found.baselines[FILE_ORDER]
    assert all(mine <= theirs for mine, theirs in zip(found.outlook.seconds, file.seconds, strict=True))
    assert found.outlook.seconds[1] < 0.8 * file.seconds[1]
