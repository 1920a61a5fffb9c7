"""Whole subtrees of prompts for replicas, split only where balance pays for computing twice."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.costs.iteration_rates import IterationRates
from ...data.iterations import EngineLimits
from ...data.prefix_tree import PrefixTree

_SPLITS = 200
"""Most subtrees that are split for balance."""

_BALANCED = 0.001
"""Work of the busiest engine above the mean that needs no split."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Requests that stay together.

    node: Node that stands above all of them; -1 for one request without a leaf.
    """

    node: int
    requests: IntArray


def share_subtrees(
    tree: PrefixTree, output: IntArray, engines: int, limits: EngineLimits, rates: IterationRates
) -> IntArray:
    """Return the engine of each request, shape (requests,).

    Subtrees go to the least loaded engine, the one of most work first. While that leaves an engine with more
    work than a split would, its largest subtree is split into its children, which computes its tokens twice.
    A request's work is its share of the slots, and its own tokens; a node is work of each engine that
    computes it.
    """
    work: FloatArray = np.asarray(
        (rates.iterations / limits.sequences + rates.decodes) * output + rates.prompt_tokens * tree.own,
        np.float64,
    )
    node_work: FloatArray = np.asarray(rates.prompt_tokens * tree.tokens, np.float64)
    parts = _roots(tree)
    best, least = np.zeros(len(tree), dtype=np.int64), np.inf
    for _ in range(_SPLITS):
        engine_of = _least_loaded(tree, parts, work, node_work, engines)
        loads = _loads(tree, engine_of, work, node_work, engines)
        # What is computed twice delays the engines together, as it does one of them alone.
        twice = float(loads.sum() - work.sum() - node_work.sum())
        if loads.max() + twice / engines < least:
            best, least = engine_of, float(loads.max()) + twice / engines
        busiest = int(np.argmax(loads))
        mine = [part for part in parts if engine_of[part.requests[0]] == busiest and len(part.requests) > 1]
        if not mine:
            break
        largest = max(mine, key=lambda part: float(work[part.requests].sum()))
        if loads.max() <= loads.mean() * (1 + max(1 / max(1, len(tree)), _BALANCED)):
            break
        parts = [part for part in parts if part is not largest] + _split(tree, largest)
    return best


def _roots(tree: PrefixTree) -> list[_Part]:
    """Return the subtrees of the roots, and the requests without a leaf."""
    of = tree.root
    alone = [_Part(-1, np.array([request])) for request in np.flatnonzero(of < 0).tolist()]
    return alone + [_Part(node, np.flatnonzero(of == node)) for node in np.unique(of[of >= 0]).tolist()]


def _split(tree: PrefixTree, part: _Part) -> list[_Part]:
    """Return the parts below a part's node; halves where it has none."""
    below = np.full(len(tree.parent) + 1, -1)
    for node, parent in enumerate(tree.parent.tolist()):
        if node > part.node:
            below[node] = node if parent == part.node else below[parent] if parent >= 0 else -1
    child = below[tree.leaf[part.requests]]
    direct = part.requests[child < 0]
    parts = [_Part(node, part.requests[child == node]) for node in np.unique(child[child >= 0]).tolist()]
    if not parts:
        half = len(direct) // 2
        return [_Part(part.node, direct[:half]), _Part(part.node, direct[half:])]
    return parts + ([_Part(part.node, direct)] if direct.size else [])


def _least_loaded(
    tree: PrefixTree, parts: list[_Part], work: FloatArray, node_work: FloatArray, engines: int
) -> IntArray:
    """Return the engine of each request: each part goes to the least loaded, the largest first."""
    below = np.concatenate((tree.tokens * 0.0, [0.0]))
    for node, parent in enumerate(tree.parent.tolist()):
        below[node] = node_work[node] + (below[parent] if parent >= 0 else 0.0)
    sizes = [
        float(work[part.requests].sum()) + (float(below[part.node]) if part.node >= 0 else 0.0)
        for part in parts
    ]
    loads = [(0.0, engine) for engine in range(engines)]
    engine_of = np.zeros(len(tree), dtype=np.int64)
    for at in np.argsort(-np.array(sizes), kind="stable").tolist():
        load, engine = heapq.heappop(loads)
        engine_of[parts[at].requests] = engine
        heapq.heappush(loads, (load + sizes[at], engine))
    return engine_of


def _loads(
    tree: PrefixTree, engine_of: IntArray, work: FloatArray, node_work: FloatArray, engines: int
) -> FloatArray:
    """Return the work of each engine, with each node once on each engine that has a request below it."""
    loads = np.bincount(engine_of, weights=work, minlength=engines).astype(np.float64)
    for engine in range(engines):
        used = tree.sums_below((engine_of == engine).astype(np.int64)) > 0
        loads[engine] += float(node_work[used].sum())
    return loads
