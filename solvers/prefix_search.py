"""Search for an order of requests that share beginnings, by simulating the engine's cache."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..data.arrays import IntArray
from ..data.iterations import EngineLimits
from ..data.prefix_tree import PrefixTree
from ..data.readers.server_run import HELD_BACK
from ..heuristics.prefixes.choice import Forecast, Outlook, Scenario, choose, least_seconds
from ..heuristics.prefixes.holding import MOST_HELD
from ..heuristics.prefixes.orders import FILE_ORDER, LONGEST_FIRST, baseline_orders, tree_orders
from .result import Limits, StoppedBy

_SIMULATED = 5_000_000
"""Requests over all orders that are simulated before any search."""

_LATE = (1, 20)
"""Lengths of late acceptance: steps between the compared orders. The next one follows when one has stalled.

An order that takes milliseconds to simulate gets a few hundred steps, in which the shortest gains most.
"""

_STALLED = 10
"""Moves without a better order after which a search ends, for each request."""

_TRIES = 8
"""Attempts at drawing a move that changes the order."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchedOrder:
    """Order found by a search.

    outlook: The order, and what it is predicted to take.
    baselines: The same of the rules that it was compared with, by name.
    stopped_by: Reason for the end of the search.
    """

    outlook: Outlook
    baselines: Mapping[str, Outlook]
    stopped_by: StoppedBy


def search_tree_order(
    tree: PrefixTree,
    scenarios: Sequence[Scenario],
    limits: EngineLimits,
    budget: Limits | None = None,
    *,
    lengths_known: bool = True,
    enough: float = 0.0,
    together: IntArray | None = None,
    may_hold: bool = False,
) -> SearchedOrder:
    """Search the order of fewest predicted seconds.

    The rules come first (file order, sorted by text, by beginning, longest first), then orders by subtrees.
    If lengths are known, subtrees and requests are then moved by late acceptance. The result takes no more
    seconds than file order in any scenario, and with one scenario no more than any rule.

    budget: Stopping criteria; ``work`` counts simulated orders.
    lengths_known: False if the scenarios' lengths are guesses, the last one nearest to the caps; orders then
        use none but caps.
    enough: Seconds of the first scenario at which the search ends.
    together: Number of each completion's request, whose completions are sent together; None if each is one.
    may_hold: True if the client may hold requests back until they fit into the KV cache; it does so only with
        known lengths, if requests would be preempted.

    Raises ValueError if a request alone exceeds the KV cache.
    """
    forecast, budget = Forecast(tree, scenarios, limits, together), budget or Limits()
    output = scenarios[0].output if lengths_known else None
    distinct = dict[bytes, Outlook]()

    def outlook_of(name: str, order: IntArray) -> Outlook:
        same = distinct.get(order.tobytes())
        if same is None:
            same = distinct[order.tobytes()] = forecast.of(name, order)
        return replace(same, name=name)

    baselines = {name: outlook_of(name, order) for name, order in baseline_orders(tree, output).items()}
    outlooks = dict(baselines)
    most = max(len(distinct) + 1, _SIMULATED // (len(tree) * len({id(one.output) for one in scenarios})))
    orders = tree_orders(tree, output, limits.kv_tokens)
    if not lengths_known:
        orders |= _by_caps(tree, scenarios[-1].output, limits)
    for name, order in orders.items():
        if len(distinct) >= most:
            break
        outlooks[name] = outlook_of(name, order)
    best = choose(outlooks)
    if may_hold and lengths_known and len(tree) <= MOST_HELD and best.runs[0].preemptions:
        for name, order in tree_orders(tree, output).items():
            held = f"{name}, {HELD_BACK}"
            outlooks[held] = forecast.held_back(held, order)
        best = choose(outlooks)
    if not lengths_known or len(tree) < 2 or (budget.seconds is None and budget.work is None):
        return SearchedOrder(best, baselines, StoppedBy.FINISHED)
    search = _Search(tree, forecast, best, baselines[FILE_ORDER], least_seconds(list(outlooks.values())))
    stopped_by = search.run(budget, enough)
    return SearchedOrder(search.best, baselines, stopped_by)


def _by_caps(tree: PrefixTree, caps: IntArray, limits: EngineLimits) -> dict[str, IntArray]:
    """Return orders by the caps of completions, as far as these differ."""
    if not np.ptp(caps):
        return {}
    orders = {LONGEST_FIRST: np.argsort(-caps, kind="stable"), **tree_orders(tree, caps, limits.kv_tokens)}
    return {f"{name}, by caps": order for name, order in orders.items()}


class _Search:
    """Late acceptance over moves of subtrees and of requests (Burke and Bykov, 2017)."""

    def __init__(
        self, tree: PrefixTree, forecast: Forecast, start: Outlook, file: Outlook, least: Sequence[float]
    ) -> None:
        self._forecast, self._file, self._least = forecast, file, least
        self.best = start
        self._moves = _Moves(tree)

    def run(self, budget: Limits, enough: float) -> StoppedBy:
        """Search until a limit; keep the best order that is sure."""
        ends = None if budget.seconds is None else time.perf_counter() + budget.seconds
        rng, left = random.Random(budget.seed), budget.work
        most, stalled = _STALLED * max(*_LATE, len(self.best.order)), 0
        name, at = f"{self.best.name}, improved", self.best
        outlook_of = self._forecast.of if self.best.after is None else self._forecast.held_back
        regret = best = at.regret(self._least)
        lengths = iter(_LATE)
        before = deque([regret] * next(lengths))
        try:
            while self.best.seconds[0] > enough:
                stalled += 1
                if stalled > most:
                    longer = next(lengths, None)
                    if longer is None:
                        return StoppedBy.STALLED
                    at, regret, stalled, before = self.best, best, 0, deque([best] * longer)
                if ends is not None and time.perf_counter() >= ends:
                    return StoppedBy.TIME
                if left is not None:
                    if left <= 0:
                        return StoppedBy.WORK
                    left -= 1
                order = self._moves.neighbour(at.order.tolist(), rng)
                outlook = outlook_of(name, np.array(order, dtype=np.int64))
                found = outlook.regret(self._least)
                if found <= max(regret, before[0]):
                    at, regret = outlook, found
                if found < best and outlook.is_sure(self._file):
                    self.best, best, stalled = outlook, found, 0
                before.popleft()
                before.append(regret)
        except KeyboardInterrupt:
            return StoppedBy.INTERRUPT
        return StoppedBy.GAP


class _Moves:
    """Moves in an order of requests: a subtree's run goes elsewhere, or a request does."""

    def __init__(self, tree: PrefixTree) -> None:
        place = tree.depth_first()
        parents, leaves = tree.parent.tolist(), tree.leaf.tolist()
        size = [1] * len(parents)
        for node in reversed(range(len(parents))):
            if parents[node] >= 0:
                size[parents[node]] += size[node]
        self._first = place.tolist()
        self._last = (place + np.array(size, dtype=np.int64) - 1).tolist() if len(parents) else []
        self._parent, self._leaf = parents, leaves
        self._at: list[int] = [self._first[leaf] if leaf >= 0 else -1 for leaf in leaves]

    def neighbour(self, order: list[int], rng: random.Random) -> list[int]:
        """Return another order."""
        for _ in range(_TRIES):
            moved = self._move(order, rng)
            if moved is not None:
                return moved
        return order

    def _move(self, order: list[int], rng: random.Random) -> list[int] | None:
        kind, at = rng.random(), rng.randrange(len(order))
        if kind < 0.5:
            begin, end = self._run(order, at, rng)
            rest = order[:begin] + order[end:]
            if not rest:
                return None
            to, _ = self._run(rest, rng.randrange(len(rest)), rng)
        elif kind < 0.8:
            begin, end = at, at + 1
            rest = order[:begin] + order[end:]
            to = rng.randrange(len(order))
        else:
            other = rng.randrange(len(order))
            swapped = order[:]
            swapped[at], swapped[other] = order[other], order[at]
            return None if at == other else swapped
        return None if to == begin else rest[:to] + order[begin:end] + rest[to:]

    def _run(self, order: list[int], at: int, rng: random.Random) -> tuple[int, int]:
        """Return the run of requests around a place that are below one of its nodes."""
        path, node = [], self._leaf[order[at]]
        while node >= 0:
            path.append(node)
            node = self._parent[node]
        if not path:
            return at, at + 1
        node = rng.choice(path)
        first, last = self._first[node], self._last[node]
        begin = end = at
        while begin > 0 and first <= self._at[order[begin - 1]] <= last:
            begin -= 1
        while end + 1 < len(order) and first <= self._at[order[end + 1]] <= last:
            end += 1
        return begin, end + 1
