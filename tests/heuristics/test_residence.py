"""Shared beginnings in a simulated prefix cache over time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchbound.data.iterations import EngineLimits
from batchbound.data.prefix_tree import PrefixTree
from batchbound.heuristics.prefixes.residence import MOST_MOMENTS, MOST_NODES, residence, shown_nodes

ONE_AT_A_TIME = EngineLimits(1, 64, 48, 4)
"""One sequence, and KV cache for one document of 40 tokens with its question."""


def _documents(count: int, questions: int) -> PrefixTree:
    """Return documents of 40 tokens, asked in turn."""
    leaf = np.tile(np.arange(count), questions)
    return PrefixTree(np.full(count, -1), np.full(count, 40), leaf, np.full(len(leaf), 4), unit=4)


def _begins(held: npt.NDArray[np.bool_]) -> list[int]:
    """Return how often each node begins to be held."""
    before = np.vstack((np.zeros((1, held.shape[1]), np.bool_), held[:-1]))
    counts: list[int] = (held & ~before).sum(0).tolist()
    return counts


def test_documents_in_turn_are_evicted_and_by_document_they_are_not() -> None:
    tree, output = _documents(2, 3), np.full(6, 3)
    in_turn = residence("in turn", tree, output, ONE_AT_A_TIME, range(6))
    assert _begins(in_turn.held) == [3, 3]
    assert in_turn.prompt_tokens == 6 * 44
    by_document = residence("by document", tree, output, ONE_AT_A_TIME, [0, 2, 4, 1, 3, 5])
    # The second document is computed as the first one is evicted, and both only once.
    last = by_document.kept[-1].tolist()
    assert last[1] == 1.0 > last[0]
    assert by_document.prompt_tokens == tree.distinct_tokens == 2 * 40 + 6 * 4


def test_a_long_run_is_thinned_to_its_end() -> None:
    tree = _documents(2, 1000)
    run = residence("in turn", tree, np.full(2000, 2), ONE_AT_A_TIME, range(2000))
    assert MOST_MOMENTS // 2 <= len(run.at) <= MOST_MOMENTS + 1
    assert np.all(np.diff(run.at) >= 0)


def test_the_nodes_that_save_most_are_shown_depth_first() -> None:
    # A root of 8 tokens, below it one of 16 and one of 2, which completes no block.
    tree = PrefixTree(np.array([-1, 0, 0]), np.array([8, 2, 16]), np.array([1, 1, 2, 2]), np.full(4, 3))
    assert shown_nodes(tree, 4).tolist() == [0, 2]
    many = _documents(2 * MOST_NODES, 2)
    assert len(shown_nodes(many, 4)) == MOST_NODES
