"""Subtrees of prompts, shared out to replicas."""

from __future__ import annotations

import numpy as np

from batchbound.data.costs.iteration_rates import IterationRates
from batchbound.data.iterations import EngineLimits
from batchbound.data.prefix_tree import PrefixTree
from batchbound.heuristics.prefixes.replicas import share_subtrees

RATES, LIMITS = IterationRates(1.0, 0.01, 0.01), EngineLimits(4)


def _documents(count: int, questions: int, tokens: int = 100) -> PrefixTree:
    leaf = np.tile(np.arange(count), questions)
    return PrefixTree(np.full(count, -1), np.full(count, tokens), leaf, np.full(count * questions, 5))


def test_whole_documents_go_to_one_engine_and_the_engines_are_balanced() -> None:
    tree, rng = _documents(40, 8), np.random.default_rng(0)
    output = rng.integers(1, 40, len(tree))
    engine_of = share_subtrees(tree, output, 2, LIMITS, RATES)
    for document in range(40):
        assert len(set(engine_of[tree.leaf == document].tolist())) == 1
    work = np.bincount(engine_of, weights=output)
    assert abs(work[0] / work.sum() - 0.5) < 0.025


def test_one_document_is_split_where_balance_pays() -> None:
    tree = _documents(1, 8)
    engine_of = share_subtrees(tree, np.full(8, 30), 2, LIMITS, RATES)
    assert np.bincount(engine_of).tolist() == [4, 4]


def test_a_document_is_not_split_where_computing_twice_costs_more() -> None:
    tree = _documents(1, 8, tokens=100_000)
    engine_of = share_subtrees(tree, np.full(8, 1), 2, LIMITS, RATES)
    assert len(set(engine_of.tolist())) == 1


def test_a_common_system_prompt_is_split_below_it() -> None:
    # Ten documents below one system prompt of 20 tokens.
    parent = np.array([-1, *[0] * 10])
    tokens = np.array([20, *[100] * 10])
    tree = PrefixTree(parent, tokens, np.repeat(np.arange(1, 11), 4), np.full(40, 5))
    engine_of = share_subtrees(tree, np.full(40, 10), 2, LIMITS, RATES)
    assert np.bincount(engine_of).tolist() == [20, 20]
    for node in range(1, 11):
        assert len(set(engine_of[tree.leaf == node].tolist())) == 1


def test_requests_without_a_leaf_fill_the_gaps() -> None:
    tree = PrefixTree(np.array([-1]), np.array([100]), np.array([0, 0, 0, -1, -1, -1]), np.full(6, 5))
    engine_of = share_subtrees(tree, np.full(6, 50), 2, LIMITS, RATES)
    assert len(set(engine_of[:3].tolist())) == 1
    assert np.bincount(engine_of).tolist() == [3, 3]
