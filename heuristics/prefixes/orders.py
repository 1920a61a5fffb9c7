"""Orders of requests that keep shared beginnings together, and the rules they must beat."""

from __future__ import annotations

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.prefix_tree import PrefixTree

FILE_ORDER, SORTED, BY_LEAF, LONGEST_FIRST = "file order", "sorted by text", "by beginning", "longest first"

_PARTS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Parts of the KV cache that neighbouring subtrees may fill and still be served as one group."""


def baseline_orders(tree: PrefixTree, output: IntArray | None = None) -> dict[str, IntArray]:
    """Return the orders that need no planning, by name.

    output: Tokens of each completion, shape (requests,); None without lengths.
    """
    place = np.arange(len(tree))
    orders = {
        FILE_ORDER: place,
        SORTED: np.lexsort((place, tree.depth_first_key())),
        BY_LEAF: np.lexsort((place, _first_of_leaf(tree))),
    }
    if output is not None:
        orders[LONGEST_FIRST] = np.argsort(-output, kind="stable")
    return orders


def tree_orders(
    tree: PrefixTree, output: IntArray | None = None, kv_tokens: int | None = None
) -> dict[str, IntArray]:
    """Return orders that serve subtrees one after another, by name.

    Subtrees come depth first. Between subtrees, the one goes first that has most decode work for each
    computed token, or the longest completion, or most work, or the first request in the file. Within a leaf,
    the longest completion goes first, or the first in the file if lengths are unknown. With lengths,
    neighbouring subtrees that fit a part of the KV cache together are also tried as one group.

    output: Tokens of each completion, shape (requests,); None without lengths.
    kv_tokens: Tokens of KV cache; None without a limit.
    """
    place = np.arange(len(tree))
    if output is None:
        first = _extreme_below(tree, place)
        return {"subtrees in file order": _depth_first(tree, first, place, place)}
    work, computed = tree.sums_below(output), tree.sums_below(tree.own) + _tokens_below(tree)
    longest = -output
    keys: dict[str, tuple[FloatArray, FloatArray]] = {
        "by decode work": (-work / np.maximum(computed, 1), -output / tree.own),
        "by longest completion": (_extreme_below(tree, longest).astype(float), longest.astype(float)),
        "by total work": (-work.astype(float), longest.astype(float)),
    }
    orders = {}
    for name, (of_node, of_request) in keys.items():
        order = orders[f"subtrees {name}"] = _depth_first(tree, of_node, of_request, longest)
        if kv_tokens is None:
            continue
        needed = _computed_so_far(tree, order)
        for part in _PARTS:
            group = np.empty(len(tree), dtype=np.int64)
            group[order] = needed // max(1, int(part * kv_tokens))
            mixed = np.lexsort((place, longest, group))
            if not np.array_equal(mixed, order):
                orders[f"subtrees {name}, {part:.0%} of the cache at a time"] = mixed
    return orders


def _depth_first(
    tree: PrefixTree, of_node: FloatArray | IntArray, of_request: FloatArray | IntArray, within: IntArray
) -> IntArray:
    """Return the requests by subtrees, depth first.

    of_node: Key of each node among its siblings; the smallest goes first, shape (nodes,).
    of_request: The same key of requests without a leaf, which compete with the roots, shape (requests,).
    within: Key of requests of one leaf, shape (requests,).
    """
    alone, roots = tree.leaf < 0, np.flatnonzero(tree.parent < 0)
    values = np.concatenate((of_node[roots], of_request[alone]))
    rank = np.empty(len(values), dtype=np.int64)
    rank[np.argsort(values, kind="stable")] = np.arange(len(values))
    of_root = np.zeros(len(tree.parent) + 1, dtype=np.int64)
    of_root[roots] = rank[: len(roots)]
    first = of_root[np.append(_roots(tree), -1)[tree.leaf]]
    first[alone] = rank[len(roots) :]
    return np.lexsort((np.arange(len(tree)), within, tree.depth_first_key(of_node), first))


def _roots(tree: PrefixTree) -> IntArray:
    """Return the root above each node, shape (nodes,)."""
    roots = list[int]()
    for node, parent in enumerate(tree.parent.tolist()):
        roots.append(node if parent < 0 else roots[parent])
    return np.array(roots, dtype=np.int64)


def _first_of_leaf(tree: PrefixTree) -> IntArray:
    """Return the first request with each request's leaf, shape (requests,)."""
    place = np.arange(len(tree))
    first = np.full(len(tree.parent) + 1, len(tree))
    np.minimum.at(first, tree.leaf, place)
    return np.where(tree.leaf < 0, place, first[tree.leaf])


def _extreme_below(tree: PrefixTree, values: IntArray) -> IntArray:
    """Return the least value of the requests below each node, shape (nodes,)."""
    least = np.full(len(tree.parent) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, tree.leaf, values)
    lists = least[:-1].tolist()
    for node, parent in reversed(list(enumerate(tree.parent.tolist()))):
        if parent >= 0:
            lists[parent] = min(lists[parent], lists[node])
    return np.array(lists, dtype=np.int64)


def _tokens_below(tree: PrefixTree) -> IntArray:
    """Return the tokens of each node and of those below it, shape (nodes,)."""
    tokens = tree.tokens.tolist()
    for node, parent in reversed(list(enumerate(tree.parent.tolist()))):
        if parent >= 0:
            tokens[parent] += tokens[node]
    return np.array(tokens, dtype=np.int64)


def _computed_so_far(tree: PrefixTree, order: IntArray) -> IntArray:
    """Return the distinct tokens before each leaf's first request in an order, shape (requests,)."""
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    tokens = tree.own[order].astype(np.int64)
    first = _extreme_below(tree, rank)
    # A node without requests is never computed.
    used = first < len(order)
    np.add.at(tokens, first[used], tree.tokens[used])
    before = np.cumsum(tokens) - tokens
    leaf = tree.leaf[order]
    begins = np.flatnonzero((leaf < 0) | np.append(True, leaf[1:] != leaf[:-1]))
    return before[np.repeat(begins, np.diff(np.append(begins, len(order))))]
