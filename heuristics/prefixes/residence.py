"""Shared beginnings in a prefix cache over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.arrays import FloatArray, IntArray
from ...data.iterations import EngineLimits
from ...data.prefix_tree import PrefixTree
from .engine import TreeEngine
from .vllm_cache import BlockTree

MOST_NODES, MOST_MOMENTS = 60, 400
"""Most nodes and moments to show; a job with more shows those that save most."""


@dataclass(frozen=True, slots=True, eq=False)
class Residence:
    """Nodes of a tree in the cache of a simulated run.

    name: Name of the order.
    at: Iteration of each moment, ascending, shape (moments,).
    kept: Share of each node's blocks in the cache, shape (moments, nodes).
    held: True where a running request holds a node at the end of an event, shape (moments, nodes).
    prompt_tokens: Prompt tokens that the run computes.
    """

    name: str
    at: IntArray
    kept: FloatArray
    held: npt.NDArray[np.bool_]
    prompt_tokens: int


def shown_nodes(tree: PrefixTree, block_tokens: int) -> IntArray:
    """Return the nodes that save most prompt tokens, depth first, shape (nodes,).

    A node that completes no block is cached with those below it, and is left out.
    """
    saved = tree.tokens * (tree.requests_below - 1) * (BlockTree.of(tree, block_tokens).blocks > 0)
    most = np.argsort(-saved, kind="stable")[: min(MOST_NODES, int((saved > 0).sum()))]
    return most[np.argsort(tree.depth_first()[most])]


def residence(
    name: str,
    tree: PrefixTree,
    output: IntArray,
    limits: EngineLimits,
    order: Sequence[int],
    after: Sequence[int] | None = None,
) -> Residence:
    """Simulate an order; return which of the shown nodes its cache has.

    output: Tokens of each completion, shape (requests,).
    after: Completions after which each request of the order is sent; None if all wait at the engine.
    Raises ValueError if a request alone exceeds the KV cache.
    """
    blocks, nodes = BlockTree.of(tree, limits.block_tokens), shown_nodes(tree, limits.block_tokens)
    engine = TreeEngine(blocks, output, limits, order, after)
    at, kept, held = [0], [np.zeros(len(nodes))], [np.zeros(len(nodes), np.bool_)]
    every = 1
    for event, iteration in enumerate(engine.events(), 1):
        if event % every:
            continue
        cached, holders = engine.cache.state
        at.append(iteration)
        kept.append(cached[nodes] / blocks.blocks[nodes])
        held.append(holders[nodes] > 0)
        if len(at) > MOST_MOMENTS:
            at, kept, held, every = at[::2], kept[::2], held[::2], 2 * every
    return Residence(name, np.array(at), np.array(kept), np.array(held), engine.result.prompt_tokens)
