"""Local search for an order of release, by simulating iterations."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..data.arrays import IntArray
from ..data.iterations import EngineLimits, Predicted
from ..data.objective import Goal
from ..heuristics.prefixes.leaps import IterationPrices
from ..heuristics.prefixes.vllm_cache import BlockTree
from ..heuristics.serving.release import Release, predict, shuffled_orders
from ..models.bounds.iterations import iteration_bound
from ..solvers.result import Limits, StoppedBy
from .aimed import aimed_orders, near_neighbour, on_prefix_cache, published_orders
from .release import PACKING_SECONDS, Releasable, named_orders, packed_order

_HELD_BACK = (2.0, 1.75, 1.5, 1.25, 1.0)
"""Completions in flight to try, as multiples of the mean running. Fewer may evict fewer."""

_LATE = 20
"""Length of late acceptance: steps between the compared orders."""

_SEGMENT = 16
"""Most neighbours that one move shifts."""

Rank = tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SearchedRelease:
    """Order and concurrency found by a search.

    release: Order, with its prediction.
    held_back: Completions that the client keeps in flight, if fewer than the engine takes; else None.
    stopped_by: Reason for the end of the search.
    """

    release: Release
    held_back: int | None
    stopped_by: StoppedBy


def search_release(
    work: Releasable,
    limits: EngineLimits,
    prices: IterationPrices | None = None,
    budget: Limits | None = None,
    enough: int = 0,
    goal: Goal | None = None,
) -> SearchedRelease:
    """Search an order that no simple rule beats.

    The search begins with file order, longest first and most tokens first. It then packs requests into slots,
    or shuffles orders if the KV cache is the limit. If lengths are known, it moves requests and keeps every
    order that is no worse.

    Criteria rank the orders in turn. Without prices: no more iterations than the best simple rule, then least
    work (iterations and recomputed tokens). With prices: no more seconds than the best simple rule, no more
    iterations than the best, then fewest seconds.

    With a goal, the search begins with every published order, and the goal's value ranks them, then work.
    Beginnings are shared on a simulated prefix cache.

    enough: Iterations, or value of the goal, at which the search ends.
    goal: Objective other than the makespan, over the completions in the order of requests.
    """
    search = _Search(work, limits, prices, (budget or Limits(), enough), goal)
    try:
        search.run()
    except KeyboardInterrupt:
        if search.best is None:
            raise
        search.stopped_by = StoppedBy.INTERRUPT
    assert search.best is not None
    return SearchedRelease(search.best, search.held_back, search.stopped_by)


class _Search:
    def __init__(
        self,
        work: Releasable,
        limits: EngineLimits,
        prices: IterationPrices | None,
        until: tuple[Limits, int],
        goal: Goal | None,
    ) -> None:
        budget, enough = until
        self._goal, self._tree = goal, None
        self._work, self._limits, self._prices = work, limits, prices
        self._sequences = work.sequences()
        self._short = self._sequences.may_run_short(limits)
        least = iteration_bound(self._sequences, limits).iterations if goal is None else 0
        self._least = max(enough, least)
        if goal is not None and (tree := self._sequences.tree) is not None and len(tree.parent):
            self._tree = BlockTree.of(tree, limits.block_tokens)
        self._left = budget.work
        self._ends = None if budget.seconds is None else time.perf_counter() + budget.seconds
        self._rng = np.random.default_rng(budget.seed)
        self._seed = budget.seed
        self._rank: Callable[[Predicted], Rank] = lambda found: (
            (found.iterations,) if found.value is None else (found.value, found.work)
        )
        self.best: Release | None = None
        self.held_back: int | None = None
        self.stopped_by = StoppedBy.FINISHED

    def run(self) -> None:
        named = []
        for name, order in self._simple().items():
            found = self._predicted(order, None)
            if self.best is None:
                self.best = Release(name, order, found)
            if found is None:
                return
            named.append(Release(name, order, found))
        if self._goal is None:
            self._rank = _ranking([one.predicted for one in named if one.predicted is not None])
        self.best = min(named, key=self._rank_of)
        for name, order in self._candidates():
            if self._over():
                return
            self._try(name, order, self.held_back)
        if self._short and self._tree is None and (self._prices is not None or self._goal is not None):
            self._hold_back()
        if self._work.exact and len(self._work) > 1:
            self._improve()

    def _simple(self) -> dict[str, IntArray]:
        orders = named_orders(self._work, None)
        return orders if self._goal is None else orders | published_orders(self._work, self._limits)

    def _candidates(self) -> Iterator[tuple[str, IntArray]]:
        choices = self._work.choices
        if self._goal is not None:
            yield from aimed_orders(self._work, self._limits, self._goal)
        elif self._short:
            completions = int(self._sequences.output.sum())
            yield from shuffled_orders(self._work.tokens, completions, self._rng).items()
        elif self._work.exact and (choices == 1).all() and not self._over():
            # A limit of work must give the same order each time: packing then gets no seconds.
            left = 0.0 if self._ends is None else self._ends - time.perf_counter()
            seconds = min(PACKING_SECONDS, max(0.0, left))
            yield "packed into slots", packed_order(self._sequences, self._limits, self._seed, seconds)

    def _hold_back(self) -> None:
        """Try fewer completions in flight than the engine takes."""
        assert self.best is not None
        assert self.best.predicted is not None
        mean = int(self._sequences.output.sum()) / self.best.predicted.iterations
        for times in _HELD_BACK:
            fewer = max(1, round(times * mean))
            if self._over():
                return
            if fewer < self._limits.sequences:
                self._try(self.best.name, self.best.order, fewer)

    def _improve(self) -> None:
        """Move requests by late acceptance, which escapes local optima.

        It accepts an order no worse than the current one or the one some steps ago (Burke and Bykov, 2017).
        """
        assert self.best is not None
        name, at, rank = self.best.name, self.best.order, self._rank_of(self.best)
        before = deque([rank] * _LATE)
        neighbour = _neighbour if self._goal is None else near_neighbour
        while not self._over():
            order = neighbour(at, self._rng)
            found = self._try(f"{name}, improved", order, self.held_back)
            if found is not None and found <= max(rank, before[0]):
                at, rank = order, found
            before.popleft()
            before.append(rank)

    def _try(self, name: str, order: IntArray, held_back: int | None) -> Rank | None:
        """Simulate an order, keep it if best, and return its rank."""
        assert self.best is not None
        if self._left is not None:
            self._left -= 1
        found = self._predicted(order, held_back)
        if found is None:
            return None
        rank = self._rank(found)
        if rank < self._rank_of(self.best):
            self.best, self.held_back = Release(name, order, found), held_back
        return rank

    def _rank_of(self, release: Release) -> Rank:
        assert release.predicted is not None
        return self._rank(release.predicted)

    def _predicted(self, order: IntArray, held_back: int | None) -> Predicted | None:
        rows = self._work.expanded(order)
        if self._goal is not None and self._tree is not None:
            return on_prefix_cache(self._tree, self._sequences.output, self._limits, rows, self._goal)
        return predict(
            self._sequences, self._limits, rows, held_back, lag=1, prices=self._prices, goal=self._goal
        )

    def _over(self) -> bool:
        assert self.best is not None
        assert self.best.predicted is not None
        predicted = self.best.predicted
        value = predicted.iterations if self._goal is None else predicted.value or 0
        if self._prices is None and value <= self._least:
            self.stopped_by = StoppedBy.PROOF
        elif self._left is not None and self._left <= 0:
            self.stopped_by = StoppedBy.WORK
        elif self._ends is not None and time.perf_counter() >= self._ends:
            self.stopped_by = StoppedBy.TIME
        elif self._left is not None or self._ends is not None:
            return False
        return True


def _ranking(named: list[Predicted]) -> Callable[[Predicted], Rank]:
    fewest = min(one.iterations for one in named)
    times = [one.seconds for one in named if one.seconds is not None]
    if not times:
        return lambda found: (max(0, found.iterations - fewest), found.work)
    shortest = min(times)

    def rank(found: Predicted) -> Rank:
        assert found.seconds is not None
        late, more = max(0.0, found.seconds - shortest), max(0, found.iterations - fewest)
        return late, more, found.seconds

    return rank


def _neighbour(order: IntArray, rng: np.random.Generator) -> IntArray:
    """Return an order after a small random move."""
    found, count = order.copy(), len(order)
    kind = int(rng.integers(3))
    if kind == 2:
        span = int(rng.integers(2, min(_SEGMENT, count) + 1))
        at = int(rng.integers(count - span + 1))
        found[at : at + span] = rng.permutation(found[at : at + span])
        return found
    one, other = rng.integers(count, size=2).tolist()
    if kind == 1:
        return np.insert(np.delete(found, one), other, found[one])
    found[[one, other]] = found[[other, one]]
    return found
