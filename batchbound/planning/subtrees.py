"""Whole subtrees of prompts for the engines of a plan, where that takes fewer seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..data.arrays import IntArray
from ..data.costs.iteration_rates import IterationRates
from ..data.iterations import EngineLimits
from ..data.prefix_tree import PrefixTree
from ..heuristics.prefixes.choice import Scenario, possible_rates
from ..heuristics.prefixes.replicas import share_subtrees
from ..solvers.prefix_search import search_tree_order

_SIMULATED = 200_000
"""Most completions for which several ways of sharing out are simulated."""


def share_between(tree: PrefixTree, request: IntArray) -> bool:
    """Return whether different requests share a beginning.

    request: Request of each completion, shape (completions,).
    """
    first = np.unique(request, return_index=True)[1]
    return bool((tree.select(first).requests_below > 1).any())


def share_out(
    tree: PrefixTree,
    output: IntArray,
    request: IntArray,
    engines: tuple[int, EngineLimits],
    rates: IterationRates | None,
    apart: IntArray,
) -> IntArray:
    """Return the engine of each completion, shape (completions,).

    Subtrees go whole to one engine, if the busiest one then takes fewer simulated seconds.

    output, request: Tokens of each completion and its request, shape (completions,).
    engines: Number of engines, and the limits of each.
    apart: Engines by a rule that knows no beginnings, which is kept if it takes no more.
    """
    count, limits = engines
    _, first, number = np.unique(request, return_index=True, return_inverse=True)
    possible = possible_rates(None if rates is None else replace(rates, error=0.0))
    usual = possible[len(possible) // 2]
    ways = [share_subtrees(tree, output, count, limits, each)[first][number] for each in possible]
    if len(tree) > _SIMULATED:
        return ways[len(ways) // 2]
    together = None if len(first) == len(request) else request

    def seconds(engine_of: IntArray) -> float:
        busiest = 0.0
        for members in (np.flatnonzero(engine_of == engine) for engine in range(count)):
            if members.size:
                part = tree.select(members)
                sent = None if together is None else together[members]
                scenario = [Scenario(output[members], usual)]
                found = search_tree_order(part, scenario, limits, together=sent)
                busiest = max(busiest, found.outlook.seconds[0])
        return busiest

    return min([apart, *ways], key=seconds)
