"""The choice among orders by predicted seconds, under costs that are not certain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...data.arrays import IntArray
from ...data.costs.iteration_rates import IterationRates
from ...data.iterations import TOKENS_PER_ITERATION, EngineLimits
from ...data.prefix_tree import PrefixTree
from .engine import CachedRun, TreeEngine
from .holding import hold_back
from .orders import FILE_ORDER
from .vllm_cache import BlockTree

UNKNOWN_RATES = IterationRates(
    iterations=1.0,
    decodes=1 / TOKENS_PER_ITERATION,
    prompt_tokens=1 / TOKENS_PER_ITERATION,
    source="assumed",
)
"""Costs of an engine never measured, in iterations: a token's share of reading the weights once."""

PROMPT_RATIOS = (1 / 3, 1.0, 3.0)
"""Multiples of a prompt token's cost that are held possible while costs are not fitted."""

CERTAIN_ERROR = 0.05
"""Relative error of fitted costs up to which they alone decide."""

_EQUAL = 1e-9
"""Relative difference of seconds that counts as equal."""


def possible_rates(rates: IterationRates | None) -> tuple[IterationRates, ...]:
    """Return the costs to plan for: the fitted ones, or several while they are uncertain."""
    if rates is not None and rates.error is not None and rates.error <= CERTAIN_ERROR:
        return (rates,)
    usual = UNKNOWN_RATES if rates is None else rates
    return tuple(replace(usual, prompt_tokens=ratio * usual.prompt_tokens) for ratio in PROMPT_RATIOS)


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """What a job may turn out to be: lengths, and costs of iterations.

    output: Tokens of each completion, shape (requests,).
    """

    output: IntArray
    rates: IterationRates


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """An order and what it is predicted to take.

    runs: Simulated run in each scenario.
    seconds: Its seconds in each scenario.
    after: Completions after which each request of the order is sent, shape (requests,); None if all wait at
        the engine.
    """

    name: str
    order: IntArray
    runs: tuple[CachedRun, ...]
    seconds: tuple[float, ...]
    after: IntArray | None = None

    def regret(self, best: Sequence[float]) -> float:
        """Return the largest seconds over those of the best order of a scenario."""
        return max(mine / least if least else 1.0 for mine, least in zip(self.seconds, best, strict=True))

    def is_sure(self, other: Outlook) -> bool:
        """Return whether no scenario has this order take more seconds than another."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return all(mine <= theirs * (1 + _EQUAL) for mine, theirs in pairs)


class Forecast:
    """Simulations of one job in several scenarios.

    together: Number of each completion's request, shape (completions,): a request's completions are sent
        together. None if each is a request of its own.

    Raises ValueError if a request alone exceeds the KV cache.
    """

    def __init__(
        self,
        tree: PrefixTree,
        scenarios: Sequence[Scenario],
        limits: EngineLimits,
        together: IntArray | None = None,
    ) -> None:
        self._blocks, self._limits = BlockTree.of(tree, limits.block_tokens), limits
        self._together = together
        self._scenarios = tuple(scenarios)
        longest = np.maximum.reduce([scenario.output for scenario in scenarios])
        needed = tree.prompt_tokens + longest
        if limits.blocks is not None and int(needed.max()) > limits.blocks * limits.block_tokens:
            raise ValueError("a request alone exceeds the KV cache")

    def held_back(self, name: str, order: IntArray) -> Outlook:
        """Return the same if requests are held back until they fit, by the first scenario's lengths."""
        return self.of(
            name, *hold_back(self._blocks, self._scenarios[0].output, self._limits, order.tolist())
        )

    def of(self, name: str, order: IntArray, after: IntArray | None = None) -> Outlook:
        """Return what an order is predicted to take.

        after: Completions after which each request of it is sent; None if all wait at the engine.
        """
        if self._together is not None:
            order = kept_together(order, self._together)
        times = None if after is None else after.tolist()
        runs: dict[int, CachedRun] = {}
        for scenario in self._scenarios:
            if id(scenario.output) not in runs:
                engine = TreeEngine(self._blocks, scenario.output, self._limits, order.tolist(), times)
                runs[id(scenario.output)] = engine.run()
        each = tuple(runs[id(scenario.output)] for scenario in self._scenarios)
        priced = zip(each, self._scenarios, strict=True)
        return Outlook(
            name, order, each, tuple(run.seconds(scenario.rates) for run, scenario in priced), after
        )


def kept_together(order: IntArray, together: IntArray) -> IntArray:
    """Return an order in which each request's completions follow the first of them."""
    label = together[order]
    first = np.full(int(label.max()) + 1, len(order))
    np.minimum.at(first, label, np.arange(len(order)))
    return order[np.argsort(first[label], kind="stable")]


def least_seconds(outlooks: Sequence[Outlook]) -> tuple[float, ...]:
    """Return the fewest seconds of any order in each scenario."""
    return tuple(map(min, zip(*(outlook.seconds for outlook in outlooks), strict=True)))


def choose(outlooks: Mapping[str, Outlook]) -> Outlook:
    """Return the order of least largest regret that is never slower than file order.

    File order itself is the answer where no other order is sure. On a tie the order that comes first in
    ``outlooks`` is taken, file order before all.
    """
    file = outlooks[FILE_ORDER]
    best = least_seconds(list(outlooks.values()))
    sure = [
        file,
        *(outlook for outlook in outlooks.values() if outlook is not file and outlook.is_sure(file)),
    ]
    return min(sure, key=lambda outlook: outlook.regret(best))
