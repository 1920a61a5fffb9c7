"""Orders that keep shared beginnings together."""

from __future__ import annotations

import random

import numpy as np

from batchbound.data.iterations import EngineLimits
from batchbound.data.prefix_tree import PrefixTree
from batchbound.heuristics.prefixes.engine import TreeEngine
from batchbound.heuristics.prefixes.orders import (
    BY_LEAF,
    FILE_ORDER,
    LONGEST_FIRST,
    SORTED,
    baseline_orders,
    tree_orders,
)
from batchbound.heuristics.prefixes.vllm_cache import BlockTree

TWO_DOCUMENTS = PrefixTree(
    np.array([-1, -1]), np.array([8, 8]), np.array([1, 0, 1, 0]), np.array([2, 2, 2, 2])
)
"""Four questions: the first and third on one document, the second and fourth on another."""


def test_the_rules_are_what_their_names_say() -> None:
    orders = baseline_orders(TWO_DOCUMENTS, np.array([1, 4, 3, 2]))
    assert {name: order.tolist() for name, order in orders.items()} == {
        FILE_ORDER: [0, 1, 2, 3],
        SORTED: [1, 3, 0, 2],
        BY_LEAF: [0, 2, 1, 3],
        LONGEST_FIRST: [1, 2, 3, 0],
    }


def test_without_lengths_no_order_uses_them() -> None:
    assert LONGEST_FIRST not in baseline_orders(TWO_DOCUMENTS)
    assert tree_orders(TWO_DOCUMENTS)["subtrees in file order"].tolist() == [0, 2, 1, 3]


def test_the_subtree_of_most_decode_work_for_a_computed_token_goes_first() -> None:
    orders = tree_orders(TWO_DOCUMENTS, np.array([1, 4, 4, 2]))
    assert orders["subtrees by decode work"].tolist() == [1, 3, 2, 0]


def test_the_subtree_with_the_longest_completion_goes_first() -> None:
    orders = tree_orders(TWO_DOCUMENTS, np.array([1, 4, 5, 4]))
    assert orders["subtrees by longest completion"].tolist() == [2, 0, 1, 3]


def test_subtrees_that_fit_the_cache_together_are_one_group_longest_first() -> None:
    orders = tree_orders(TWO_DOCUMENTS, np.array([1, 4, 3, 2]), kv_tokens=100)
    assert orders["subtrees by total work, 50% of the cache at a time"].tolist() == [1, 2, 3, 0]


def test_a_request_without_a_leaf_competes_with_the_roots() -> None:
    tree = PrefixTree(np.array([-1]), np.array([8]), np.array([0, -1, 0]), np.array([2, 2, 2]))
    orders = tree_orders(tree, np.array([3, 9, 2]))
    assert orders["subtrees by longest completion"].tolist() == [1, 0, 2]
    assert tree_orders(tree)["subtrees in file order"].tolist() == [0, 2, 1]


def test_every_order_holds_each_request_once_and_keeps_subtrees_whole() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        nodes = rng.randint(1, 8)
        tree = PrefixTree(
            np.array([rng.randint(-1, node - 1) for node in range(nodes)]),
            np.array([rng.randint(1, 9) for _ in range(nodes)]),
            np.array([rng.randint(-1, nodes - 1) for _ in range(12)]),
            np.array([rng.randint(1, 9) for _ in range(12)]),
        )
        output = np.array([rng.randint(1, 20) for _ in range(12)])
        orders = baseline_orders(tree, output) | tree_orders(tree, output, 40) | tree_orders(tree)
        for name, order in orders.items():
            assert np.array_equal(np.sort(order), np.arange(12)), name
        for name in ("subtrees by decode work", "subtrees by total work", "subtrees in file order"):
            assert _is_whole(tree, orders[name].tolist()), f"{name}, seed {seed}"


def _is_whole(tree: PrefixTree, order: list[int]) -> bool:
    """Return whether each subtree's requests follow one another."""
    for node in range(len(tree.parent)):
        below = []
        for place, request in enumerate(order):
            at = int(tree.leaf[request])
            while at > node:
                at = int(tree.parent[at])
            if at == node:
                below.append(place)
        if below and below[-1] - below[0] + 1 != len(below):
            return False
    return True


def test_subtrees_in_turn_compute_each_document_once_where_file_order_does_not() -> None:
    # Three documents of 40 tokens, asked in turn; the cache holds one and a half.
    tree = PrefixTree(np.full(3, -1), np.full(3, 40), np.tile(np.arange(3), 4), np.full(12, 4), unit=4)
    blocks, limits = BlockTree.of(tree, 4), EngineLimits(2, 64, 64, 4)
    output = np.full(12, 3)
    orders = baseline_orders(tree, output) | tree_orders(tree, output, 64)
    runs = {name: TreeEngine(blocks, output, limits, order.tolist()).run() for name, order in orders.items()}
    assert runs["subtrees by decode work"].prompt_tokens == tree.distinct_tokens == 168
    assert runs[FILE_ORDER].prompt_tokens > 3 * 168
