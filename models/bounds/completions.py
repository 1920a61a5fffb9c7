"""Least total completion time, and least time of the first K requests, of an engine of iterations."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from itertools import combinations

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.iterations import UNLIMITED, EngineLimits, Sequences
from ...data.objective import Goal, ObjectiveBound, last_of, sums_of
from ...data.prefix_tree import PrefixTree
from .tree_area import own_blocks

_MIXTURES = 10
"""Parts into which a mixture of two resources is divided."""

_MIXED = 100_000
"""Most sequences for which mixtures are tried."""

_ROUNDING = 1e-9
"""Relative part subtracted from sums, against rounding."""

Amounts = tuple[FloatArray, FloatArray]
"""Share of all that an iteration has, and iterations from its mean use to the end, shape (sequences,)."""


def completion_bound(sequences: Sequences, limits: EngineLimits, goal: Goal) -> ObjectiveBound:
    r"""Return the least value of a goal for any order, with a certificate.

    Every argument holds with evictions and recomputation. A sequence i uses a resource (slots, tokens of an
    iteration, blocks of the KV cache) in its own iterations alone; all together use at most one unit of it an
    iteration. Let :math:`p_i` be what it uses in all, drawn without a break :math:`m_i` iterations after its
    begin on average, of :math:`o_i` in all. A break only moves use away from the end, so from the mean time
    of its use to its end are at least :math:`d_i = \max(o_i - m_i, p_i / 2)` iterations.

    - *total*: mean times of use obey Eastman, Even and Isaacs (1964), so that the sum of completion times is
      at least the sorted prefix sums of :math:`p`, minus :math:`\sum p_i / 2`, plus :math:`\sum d_i`. By
      slots, shortest first is optimal even if requests may be interrupted (McNaughton 1959).
    - *first K*: the K requests that are complete used at least the K smallest :math:`p`, and one of them
      takes at least the K-th smallest number of iterations.

    A mixture of resources is a resource, too: the certificate states its weights. Of a shared beginning, each
    request below it is charged a part: of its blocks one over the most requests that draw at once, of its
    tokens one over all of them. A request of several completions uses the sum of their parts, and is complete
    with the last of them.
    """
    objective, item = goal.objective, goal.item
    rows = sequences.rows(limits)
    resources = resources_of(sequences, limits)
    claims: list[tuple[int, str, Mapping[str, object]]] = []
    if objective.count is not None:
        longest = np.partition(last_of(rows, item), objective.count - 1)[objective.count - 1]
        claims.append((int(longest), "longest request", {"kind": "longest"}))
    elif item is None:
        claims.append((shortest_first(rows, limits.sequences), "shortest first", {"kind": "list"}))
    else:
        claims.append((int(last_of(rows, item).sum()), "longest requests", {"kind": "longest"}))
    for weights in _mixtures(list(resources), len(rows)):
        value = whole_above(_by_use(resources, weights, goal))
        claims.append((value, " and ".join(weights), {"kind": "use", "weights": weights}))
    value, source, certificate = max(claims, key=lambda claim: claim[0])
    return ObjectiveBound(value, source, certificate)


def whole_above(value: float) -> int:
    """Return the least whole number that a sum proves, rounding errors allowed for."""
    return math.ceil(value * (1 - _ROUNDING) - _ROUNDING)


def _mixtures(names: list[str], count: int) -> list[dict[str, float]]:
    single: list[dict[str, float]] = [{name: 1.0} for name in names]
    if count > _MIXED:
        return single
    shares = [k / _MIXTURES for k in range(1, _MIXTURES)]
    return single + [{a: share, b: 1 - share} for a, b in combinations(names, 2) for share in shares]


def _by_use(resources: Mapping[str, Amounts], weights: Mapping[str, float], goal: Goal) -> float:
    objective, item = goal.objective, goal.item
    use = sums_of(np.sum([w * resources[name][0] for name, w in weights.items()], axis=0), item)
    if objective.count is not None:
        return float(np.partition(use, objective.count - 1)[: objective.count].sum())
    late = sums_of(
        np.sum([w * np.prod(resources[name], axis=0) for name, w in weights.items()], axis=0), item
    )
    # Per item: its uses' mean times, weighted by the uses.
    tails = np.maximum(np.divide(late, use, out=np.zeros_like(late), where=use > 0), use / 2)
    return float(np.cumsum(np.sort(use)).sum() - use.sum() / 2 + tails.sum())


def shortest_first(rows: IntArray, slots: int) -> int:
    """Return the total completion time of the list schedule, shortest first."""
    free, total = [0] * min(slots, len(rows)), 0
    for length in np.sort(rows).tolist():
        total += heapq.heapreplace(free, free[0] + length) + length
    return total


def resources_of(sequences: Sequences, limits: EngineLimits) -> dict[str, Amounts]:
    """Return what each sequence uses of each resource."""
    rows, output = sequences.rows(limits).astype(float), sequences.output.astype(float)
    resources = {"slots": (rows / limits.sequences, rows / 2)}
    if limits.batched_tokens < UNLIMITED:
        computed = _computed(sequences)
        # The prompt is computed by the first draw, then a token at each of the others.
        used = computed + output - 1
        late = (computed * (output - 0.5) + (output - 1) ** 2 / 2) / used
        resources["tokens"] = (used / limits.batched_tokens, late)
    if limits.blocks is not None and sequences.exact:
        blocks, late_blocks = _held(sequences, limits)
        late = np.divide(late_blocks, blocks, out=np.zeros_like(blocks), where=blocks > 0)
        resources["KV"] = (blocks / limits.blocks, late)
    return resources


def _computed(sequences: Sequences) -> FloatArray:
    """Return the prompt tokens charged to each sequence, shape (sequences,)."""
    own: FloatArray = (sequences.prompt - sequences.shared).astype(float)
    tree = sequences.tree
    if tree is None or (tree.continues >= 0).any():
        return own  # shared tokens may be generated ones
    return own + _charged(tree, tree.tokens / tree.requests_below)


def _charged(tree: PrefixTree, of_node: FloatArray) -> FloatArray:
    """Return the sum over the nodes above each request, shape (requests,)."""
    sums = list[float]()
    for parent, amount in zip(tree.parent.tolist(), of_node.tolist(), strict=True):
        sums.append(amount + (sums[parent] if parent >= 0 else 0.0))
    return np.array([*sums, 0.0])[tree.leaf]


def _held(sequences: Sequences, limits: EngineLimits) -> tuple[FloatArray, FloatArray]:
    """Return blocks over all draws, and each times its iterations to the end, shape (sequences,)."""
    size, output = limits.block_tokens, sequences.output
    tree = sequences.tree
    if tree is None:
        own = sequences.prompt - sequences.shared
        # If all but the last token are shared, another prompt may hold the last one, too.
        first = np.where((own == 1) & ((sequences.shared > 0) | (size == 1)), -1, own)
        return drawn_late(first, output, size)
    first, skipped, held = own_blocks(tree, size)
    blocks, late = drawn_late(first, output - skipped, size)
    blocks, late = np.where(held, blocks, 0.0), np.where(held, late, 0.0)
    shares = _charged(tree, _node_shares(tree, np.where(held & (skipped == 0), -(-first // size), 0), limits))
    return blocks + shares * output, late + shares * output * output / 2


def _node_shares(tree: PrefixTree, first_blocks: IntArray, limits: EngineLimits) -> FloatArray:
    """Return the blocks of each node over the most requests below it that draw at once.

    first_blocks: Least blocks that each request holds for itself while it draws, shape (requests,).
    """
    assert limits.blocks is not None
    through = tree.through // limits.block_tokens
    alone = through - np.where(tree.parent >= 0, np.append(through, 0)[tree.parent], 0)
    smallest = list[list[int]]([[] for _ in alone])
    for leaf, blocks in zip(tree.leaf.tolist(), first_blocks.tolist(), strict=True):
        if leaf >= 0:
            smallest[leaf].append(blocks)
    most = np.ones(len(alone))
    for node in reversed(range(len(alone))):
        below = sorted(smallest[node])[: limits.sequences]
        room, together = limits.blocks - int(through[node]), np.cumsum(below)
        most[node] = max(1, int(np.searchsorted(together, room, side="right")))
        if (parent := int(tree.parent[node])) >= 0:
            smallest[parent].extend(below)
    return alone / most


def drawn_late(first: IntArray, output: IntArray, size: int) -> tuple[FloatArray, FloatArray]:
    """Return the blocks over all draws, and their sum weighted by the iterations to the end.

    A draw s holds ``first + s - 1`` tokens, and is ``output - s + 1/2`` iterations from the end. A negative
    ``first`` holds nothing.
    """
    held = first >= 0
    begin = np.where(held, first, 1)
    most = int((begin + output).max())
    blocks = -(-np.arange(most + 1) // size)
    once = np.cumsum(blocks)
    twice = np.cumsum(once)
    last = begin + np.maximum(output, 0) - 1
    total = once[last] - once[begin - 1]
    # Draw s counts in the partial sums up to draws s .. output.
    partial = twice[last] - twice[begin - 1] - np.maximum(output, 0) * once[begin - 1]
    weighted = partial - total / 2
    return np.where(held, total, 0).astype(float), np.where(held, weighted, 0).astype(float)
