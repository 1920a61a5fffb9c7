"""Argument that shared beginnings take memory for as long as a request below them draws."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...data.arrays import IntArray
from ...data.iterations import EngineLimits
from ...data.prefix_tree import PrefixTree


def tree_area(tree: PrefixTree, output: IntArray, limits: EngineLimits, drawn_before: int = 0) -> int:
    r"""Return the least iterations in which a KV cache of blocks lets all tokens be drawn.

    In the iteration that draws its token s, a request holds its prompt and s - 1 tokens in full. It draws at
    most one token an iteration, and at most S requests draw. A block is held once for all requests that share
    it from the beginning, and not otherwise. Warm caches, evictions, preemptions, recomputation and any order
    are allowed.

    Let :math:`P_v` be the blocks from the root through node v, :math:`t_v` those of v alone, :math:`o_i` the
    tokens that request i draws, and :math:`a_i` the sum over its draws of the blocks after its last node.
    From the leaves to the root,

    .. math::
        W_v &= \sum_{i \text{ ends at } v} a_i + \sum_{c \text{ child of } v} (t_c U_c + W_c), \\
        U_v &= \max(o_i \text{ below } v, U_c, \lceil \textstyle\sum o_i / S \rceil,
                    \lceil W_v / (C - P_v) \rceil).

    At least :math:`U_v` iterations draw a token below v. The proof: :math:`P_v` is held in each of them, so
    at most :math:`C - P_v` blocks are held below v. Summed over these iterations, what is held below v is at
    least each request's own blocks at its draws, in as many iterations, and the blocks of each child in at
    least :math:`U_c`, which is :math:`W_v` by induction.

    A prompt that another one continues holds nothing for itself, since the longer prompt may have the same
    tokens. Equal prompts hold nothing for themselves at their first draw, and no whole block of their prompt
    later. Their completions differ: they share no generated block.

    output: Tokens of each completion, or its least draws, shape (requests,).
    drawn_before: Tokens that each request holds at its first draw beyond its prompt.
    """
    assert limits.blocks is not None
    size, capacity = limits.block_tokens, limits.blocks
    held = _own_blocks(tree, output, size, drawn_before).tolist()
    through = (tree.through // size).tolist()
    parents = tree.parent.tolist()
    # The last entry is the root of all.
    area, draws, longest = ([0] * (len(parents) + 1) for _ in range(3))
    for leaf, blocks, drawn in zip(tree.leaf.tolist(), held, output.tolist(), strict=True):
        area[leaf] += blocks
        draws[leaf] += drawn
        longest[leaf] = max(longest[leaf], drawn)
    for node in range(len(parents) - 1, -2, -1):
        above = through[node] if node >= 0 else 0
        needed = max(longest[node], -(-draws[node] // limits.sequences))
        if capacity > above:
            needed = max(needed, -(-area[node] // (capacity - above)))
        longest[node] = needed
        if node >= 0:
            parent = parents[node]
            tokens = above - (through[parent] if parent >= 0 else 0)
            area[parent] += area[node] + tokens * needed
            draws[parent] += draws[node]
            longest[parent] = max(longest[parent], needed)
    return longest[-1]


def _own_blocks(tree: PrefixTree, output: IntArray, size: int, drawn_before: int) -> IntArray:
    """Return the blocks after each request's last node, summed over its draws."""
    first, skipped, held = own_blocks(tree, size)
    # Equal prompts are one text until they hold a drawn token.
    begin = first + np.where(skipped, 0, drawn_before)
    drawn = drawn_blocks(begin, output - skipped + np.where(skipped, drawn_before, 0), size)
    return np.where(held, drawn, 0)


def own_blocks(tree: PrefixTree, size: int) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
    """Return how each request holds blocks of its own, three columns of shape (requests,).

    The columns are the tokens after its last node at its first draw that holds any; the draws before that
    one, 1 for equal prompts; and False for a prompt that another one continues.
    """
    prompt = tree.prompt_tokens
    equal, continued = _alike(tree, prompt)
    own = prompt - np.append(tree.through // size * size, 0)[tree.leaf]
    return np.where(equal, prompt % size + 1, own), equal.astype(np.int64), ~continued


def _alike(tree: PrefixTree, prompt: IntArray) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which prompts equal another one, and which are continued by another one."""
    later = np.flatnonzero(tree.continues >= 0)
    before = tree.continues[later]
    same = prompt[later] == prompt[before]
    first = np.arange(len(tree))
    first[later[same]] = before[same]
    while (first[first] != first).any():
        first = first[first]
    continued = np.zeros(len(tree), np.bool_)
    continued[first[before[~same]]] = True
    return np.bincount(first)[first] > 1, continued[first]


def drawn_blocks(first: IntArray, output: IntArray, size: int) -> IntArray:
    """Return the blocks of sequences that begin with some tokens, summed over their draws.

    Each draw but the last adds a token.
    """
    blocks: IntArray = _blocks_up_to(first + output - 1, size) - _blocks_up_to(first - 1, size)
    return blocks


def _blocks_up_to(tokens: IntArray, size: int) -> IntArray:
    """Return the sum over x = 1 .. tokens of ceil(x / size)."""
    whole, rest = tokens // size, tokens % size
    total: IntArray = size * whole * (whole + 1) // 2 + rest * (whole + 1)
    return total
