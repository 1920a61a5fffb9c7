"""Order of requests by kinds: in turn, then longer ones first if that saves steps."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.arrays import IntArray
from ...data.problem import Problem
from ..policy import State
from ..queues.admission import Admission
from ..queues.ordered import Ordered, arrival_order, longest_first
from ..queues.queue_policy import QueuePolicy
from .pacing import PacedPolicy
from .seen_lengths import SeenLengths


@dataclass(frozen=True, slots=True)
class KindParams:
    """Parameters of an order by kinds, and its least gain.

    blocks: Least distance of a request's place within its kind from its place in the order, as shares, for
        which kinds start in turn; 1 never starts them so. A mixed order stays as it is.
    scouts: Most requests of each kind that start first; more show the kinds sooner and reorder more.
    fewest: Ended or running completions of a kind before it is separated from the others.
    samples: Most sampled sets of lengths; more decide better and take longer.
    draws: Sampled lengths for one decision; a larger job gets fewer sets, but at least two.
    largest: Most waiting requests for which the order is reconsidered.
    differ: Least ratio of mean lengths of the longest to the shortest kind for which orders are sampled.
    margin: Least share of the decode steps that the order must save to be followed.
    sure: Standard errors by which its saving must exceed zero.
    growth: Share of new completions that triggers a new order.
    pause: New completions per waiting request that trigger it; more spare large jobs slow decisions.
    """

    blocks: float = 0.3
    scouts: int = 4
    fewest: int = 2
    samples: int = 24
    draws: int = 20_000
    largest: int = 100_000
    differ: float = 1.1
    margin: float = 0.005
    sure: float = 2.0
    growth: float = 0.25
    pause: float = 0.001


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """Progress of a job without known lengths.

    waiting, running, ended: True for requests in this state, shape (requests,).
    reached: Tokens of each completion so far, shape (requests,).
    """

    waiting: npt.NDArray[np.bool_]
    running: npt.NDArray[np.bool_]
    ended: npt.NDArray[np.bool_]
    reached: IntArray


class LearntKinds:
    """Order of requests by the lengths that each kind showed so far.

    Kinds that stand in blocks start in turn. Longer ones go first as soon as this saves decode steps. One
    half of the completions gives the order of kinds; lengths sampled from the other half test it, and vice
    versa. So a chance difference shows no saving, and the order stays.

    order: Given order, shape (requests,).
    kind: Kind of each request, counted from zero, shape (requests,).
    cap: Most tokens of each completion, zero if unknown, shape (requests,).
    slots: Completions that run at a time.
    seed: Seed of the sampled lengths.
    """

    def __init__(
        self,
        order: IntArray,
        kind: IntArray,
        cap: IntArray,
        slots: int,
        *,
        params: KindParams | None = None,
        seed: int = 0,
    ) -> None:
        self._params, self._slots = params or KindParams(), slots
        self._kind, self._cap = kind, cap
        self._most = np.where(cap > 0, cap, np.inf)
        self._rng = np.random.default_rng(seed)
        self._place = _place_in_kind(order, kind)
        mixed = _in_turn(order, kind, cap, self._place, self._params.blocks)
        # The first few requests of each kind show its length early.
        self.given = mixed[np.argsort(self._place[mixed] >= self._params.scouts, kind="stable")]
        self._due, self._follows = 1, False

    def due(self, ended: int) -> bool:
        """Return whether enough completions ended for a new order."""
        if ended < self._due:
            return False
        pause = int(self._params.pause * (len(self.given) - ended))
        self._due = int(ended * (1 + self._params.growth)) + 1 + pause
        return True

    def order(self, now: Progress) -> IntArray | None:
        """Return the order of the waiting requests; None to leave it."""
        waiting = self.given[now.waiting[self.given]]
        if not 0 < len(waiting) <= self._params.largest or np.ptp(self._kind[waiting]) == 0:
            return None
        begun, saved = np.flatnonzero(now.running | now.ended), []
        lengths = self._lengths(begun, now)
        means = [lengths[kind].mean for kind in np.unique(self._kind[waiting]).tolist()]
        if max(means) < self._params.differ * min(means):
            self._follows = False
            return waiting
        for half in (0, 1):
            mine = self._place[begun] % 2 == half
            learnt_from, held_out = begun[mine], begun[~mine]
            order = self._longest_kinds(waiting, self._lengths(learnt_from, now))
            saved += self._saved(waiting, order, self._lengths(held_out, now), now)
        mean, error = float(np.mean(saved)), float(np.std(saved)) / len(saved) ** 0.5
        # An order that is followed already must only stay better.
        enough = 0.0 if self._follows else max(self._params.margin, self._params.sure * error)
        self._follows = mean > enough
        return self._longest_kinds(waiting, lengths) if self._follows else waiting

    def _lengths(self, seen: IntArray, now: Progress) -> list[SeenLengths]:
        """Return each kind's lengths; rare kinds use those of all."""

        def lengths(chosen: IntArray) -> SeenLengths:
            cap = float(self._cap[chosen].mean()) if len(chosen) else 1.0
            return SeenLengths.of(now.reached[chosen], now.ended[chosen], cap)

        distributions = []
        for kind in range(int(self._kind.max()) + 1):
            members = seen[self._kind[seen] == kind]
            distributions.append(lengths(members if len(members) >= self._params.fewest else seen))
        return distributions

    def _longest_kinds(self, waiting: IntArray, lengths: list[SeenLengths]) -> IntArray:
        mean = np.array([kind.mean for kind in lengths])
        return waiting[np.argsort(-mean[self._kind[waiting]], kind="stable")]

    def _saved(
        self, waiting: IntArray, order: IntArray, lengths: list[SeenLengths], now: Progress
    ) -> list[float]:
        """Return the saved share of the steps left, for each sample."""
        running, savings = np.flatnonzero(now.running), []
        steps = np.zeros(len(self._kind))
        for _ in range(max(2, min(self._params.samples, self._params.draws // len(waiting)))):
            for kind, distribution in enumerate(lengths):
                mine = waiting[self._kind[waiting] == kind]
                steps[mine] = distribution.sample(self._rng, np.zeros(len(mine)))
                of_kind = running[self._kind[running] == kind]
                reached = now.reached[of_kind].astype(np.float64)
                steps[of_kind] = distribution.sample(self._rng, reached) - reached
            steps_left = np.minimum(steps, self._most)
            begun = steps_left[running].tolist() + [0.0] * (self._slots - len(running))
            file_order = decode_steps_of(begun, steps_left[waiting].tolist())
            savings.append(
                1 - decode_steps_of(begun, steps_left[order].tolist()) / file_order if file_order else 0.0
            )
        return savings


class KindOrder:
    """Queue with the kinds in turn, until longer ones should come first.

    order, kind, cap: As in :class:`LearntKinds`.
    """

    def __init__(self, problem: Problem, order: IntArray, kind: IntArray, cap: IntArray) -> None:
        self._kinds = LearntKinds(order, kind, cap, problem.slots)
        self._started = np.zeros(len(kind), dtype=np.bool_)
        self._queue = Ordered(self._kinds.given)

    def propose(self, state: State, free: IntArray) -> tuple[list[int], list[int]]:
        """Return the first waiting requests, one per free slot."""
        if self._kinds.due(int(np.count_nonzero(self._started)) - len(state.running)):
            self._order_again(state)
        return self._queue.propose(state, free)

    def take(self, requests: Sequence[int]) -> None:
        """Record that these requests are prefilled."""
        self._started[requests] = True
        self._queue.take(requests)

    def put_back(self, requests: Sequence[int]) -> None:
        """Return these requests to their places."""
        self._queue.put_back(requests)

    def _order_again(self, state: State) -> None:
        """Reconsider the order by the completions seen so far."""
        running = np.zeros(len(self._started), dtype=np.bool_)
        running[state.running] = True
        now = Progress(state.waiting, running, self._started & ~running, state.decoded)
        order = self._kinds.order(now)
        if order is None:
            return
        rest = np.setdiff1d(self._kinds.given, order)
        self._queue = Ordered(np.concatenate((order, rest)))
        self._queue.take(rest.tolist())


def by_kinds(problem: Problem, kind: IntArray, cap: IntArray, *, longest_cap_first: bool) -> QueuePolicy:
    """Return a fresh policy by kinds, initially by caps or by arrival."""
    order = longest_first(problem) if longest_cap_first else arrival_order(problem)
    return PacedPolicy(KindOrder(problem, order, kind, cap), Admission(problem))


def _place_in_kind(order: IntArray, kind: IntArray) -> IntArray:
    """Return each request's place among those of its kind."""
    place = np.zeros(len(order), dtype=np.int64)
    for number in range(int(kind.max()) + 1):
        mine = order[kind[order] == number]
        place[mine] = np.arange(len(mine))
    return place


def _in_turn(order: IntArray, kind: IntArray, cap: IntArray, place: IntArray, blocks: float) -> IntArray:
    """Return the order with the kinds of each cap in turn, if they stand in blocks.

    As long as no kind is known to be longer, the last requests should not all be of one kind.
    """
    share, mixed = (place + 0.5) / np.bincount(kind)[kind], order.copy()
    if np.abs(share[order] - (np.arange(len(order)) + 0.5) / len(order)).max() < blocks:
        return mixed
    for value in np.unique(cap):
        at = np.flatnonzero(cap[order] == value)
        mixed[at] = order[at][np.argsort(share[order[at]], kind="stable")]
    return mixed


def decode_steps_of(begun: Sequence[float], waiting: Sequence[float]) -> float:
    """Return the decode steps until all requests have ended.

    Each waiting one takes the first free slot.
    """
    ends = list(begun)
    heapq.heapify(ends)
    last = max(ends)
    for steps in waiting:
        end = ends[0] + steps
        heapq.heapreplace(ends, end)
        last = max(last, end)
    return last


def worth_of_lengths(problem: Problem, samples: int = 8, seed: int = 0) -> float:
    """Return the share of decode steps that known lengths can save.

    Lengths are sampled evenly up to the caps, and the given order is compared with a lower bound: no schedule
    takes fewer steps than its slots allow or its longest request needs.
    """
    rng, saved = np.random.default_rng(seed), []
    for _ in range(samples):
        steps = np.ceil(problem.decode_steps * rng.random(len(problem)))
        file_order = decode_steps_of([0.0] * problem.slots, steps.tolist())
        bound = max(steps.sum() / problem.slots, steps.max())
        saved.append(1 - bound / file_order if file_order else 0.0)
    return float(np.mean(saved))
