"""Small problems solved to a proven optimum: every packing into slots, every order within a slot."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...data.costs.cost import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...models.bounds.least_counts import least_counts
from ...models.formulations.full_model import UnsupportedProblemError
from ...models.formulations.packings import Slot, packings
from ...models.formulations.slot_free import floor_binds, schedule_of_starts
from ..result import Limits, StoppedBy
from ..search.schedule_search import search_schedule
from .from_the_end import best_from_the_end, can_search_from_the_end
from .outcome import REPEATABLE_STEPS, ExactOutcome, LimitReachedError
from .roundless import best_around_roundless, can_leave_out_roundless
from .stage_states import best_by_states, can_list_states

STEPS_PER_REQUEST = 15
"""Steps, for each request, of the search that gives the enumeration something to beat."""
FEWEST = 12
"""Requests up to which states settle most problems."""
FIRST_STATES, FIRST_STATES_OF_FEWEST = 30_000, 700_000
"""States looked at before packings are enumerated, and of so few requests."""
AGAIN_SHARE = 0.6
"""Most of what is left of the time limit for a proof that a checker can repeat, once there is another."""
ROUNDLESS_SHARE = 0.5
"""Most of the time limit for a search without the requests that take no round, which may prove too little."""
LEAST_SECONDS = 1e-6
"""What is left of a time limit at least: a limit must be positive."""
START_SHARE = 0.25
"""Most of the time limit that search may take."""
MOST_ORDERS = 5_040
"""Orders of one slot's requests beyond which the enumeration gives up."""
ROWS_AT_ONCE = 100_000
"""Orders of several slots looked at together; bounds the memory."""
SORTED_AT_ONCE = 20_000
"""Packings looked at in order of their rounds: those that need few lead to good schedules early."""
MANY_ORDERS = 4
"""Orders per window of a slot from which it pays to look at single windows first."""
LOWER_HALF = 0xFFFFFFFF
LOOK_AT_CLOCK = 256
"""Steps of the enumeration between two looks at the clock."""
PRECISION = 1e-10
"""Relative difference below which two costs are the same."""


def best_by_enumeration(
    problem: Problem, limits: Limits | None = None, start: Schedule | None = None
) -> ExactOutcome:
    r"""
    Return an optimal schedule, or the best one found within the limits.

    :func:`~batchbound.solvers.exact.stage_states.best_by_states` takes any small problem, and where memory
    is scarce :func:`~batchbound.solvers.exact.from_the_end.best_from_the_end` goes before it. Where a stage
    costs the same whatever it prefills and nothing but slots is scarce, it only begins, and is followed by an
    enumeration of packings that takes more requests.

    A makespan is then :math:`a S + c R` and a constant. To beat the incumbent with S stages, R may be at most
    some :math:`R_S`, and so may the sum of the requests in any slot: few packings do. In each, a slot may
    idle for :math:`R_S` less its load, so with its requests in a given order the m-th starts within that many
    rounds after the sum of those before it, and S - 1 stages after the first have to stab all these windows.
    Orders are added slot by slot, and dropped once the windows so far cannot be stabbed; what is left is
    settled by trying every choice of stage times.

    Only schedules are looked at in which no slot idles through a stage while a request still waits for it:
    that request could start then, with no more stages or rounds. So every slot is used from the start, and
    every later stage begins when some request ends.

    Parameters
    ----------
    problem
        One that :func:`can_enumerate` accepts.
    limits
        Work is in steps.
    start
        A schedule to beat; by default what a short search finds.

    Raises
    ------
    UnsupportedProblemError
        If the problem has arrival times, shared prompts that are computed again, or too many requests for
        what else it has.
    """
    if not can_enumerate(problem):
        what = ", ".join(_unsaid(problem))
        if not problem.workload.arrival.any():
            what = f"as many as {len(problem)} requests on {problem.slots} slots with {what}"
        raise UnsupportedProblemError(f"the enumeration cannot take {what}; choose another solver")
    limits, begun = limits or Limits(), time.monotonic()
    if start is None:
        seconds = None if limits.seconds is None else START_SHARE * limits.seconds
        steps = STEPS_PER_REQUEST * len(problem)
        start = search_schedule(problem, seconds=seconds, iterations=steps, seed=limits.seed).schedule
    deadline = None if limits.seconds is None else begun + limits.seconds
    if _unsaid(problem):
        return _best_of_states(problem, limits, deadline, start)
    best, steps = start.without_idle_rounds(problem), 0
    if can_list_states(problem):
        few = FIRST_STATES_OF_FEWEST if len(problem) <= FEWEST else FIRST_STATES
        few = few if limits.work is None else min(few, max(1, limits.work // 2))
        first = best_by_states(problem, replace(_left(limits, deadline, 0), work=few), best)
        if first.stopped_by is not StoppedBy.WORK:
            return first
        best, steps = first.schedule, first.steps
    search = _Enumeration(problem, best, deadline, _left(limits, deadline, steps).work)
    stopped_by = StoppedBy.PROOF
    try:
        search.run()
    except LimitReachedError as limit:
        stopped_by = limit.stopped_by
    except KeyboardInterrupt:
        stopped_by = StoppedBy.INTERRUPT
    steps += search.steps
    left = _left(limits, deadline, steps)
    if stopped_by is StoppedBy.GAVE_UP and can_list_states(problem):
        last = best_by_states(problem, left, search.best)
        return replace(last, steps=steps + last.steps)
    return ExactOutcome(search.best, stopped_by, steps, "packings")


def _best_of_states(
    problem: Problem, limits: Limits, deadline: float | None, start: Schedule
) -> ExactOutcome:
    """Return the best schedule by states; of scarce memory by orders from the end first, which take less."""
    left = _left(limits, deadline, 0)
    if can_search_from_the_end(problem, left.seconds):
        first = best_from_the_end(problem, left, start)
    elif can_leave_out_roundless(problem):
        share = None if left.seconds is None else ROUNDLESS_SHARE * left.seconds
        first = best_around_roundless(problem, replace(left, seconds=share), start)
        if first.stopped_by is StoppedBy.TIME:
            first = replace(first, stopped_by=StoppedBy.GAVE_UP)
    else:
        return best_by_states(problem, left, start)
    if first.stopped_by in (StoppedBy.TIME, StoppedBy.WORK, StoppedBy.INTERRUPT):
        return first
    left = _left(limits, deadline, first.steps)
    if first.stopped_by is not StoppedBy.PROOF:
        return best_by_states(problem, left, first.schedule)
    # A checker repeats the argument by states: it is tried as long as a checker could follow.
    work = REPEATABLE_STEPS["states"]
    seconds = None if left.seconds is None else AGAIN_SHARE * left.seconds
    left = replace(left, seconds=seconds, work=work if left.work is None else min(work, left.work))
    again = best_by_states(problem, left, first.schedule)
    return again if again.stopped_by is StoppedBy.PROOF else first


def can_enumerate(problem: Problem) -> bool:
    """Return whether the problem is free of arrival times, and small enough for what else it has."""
    return not _unsaid(problem) or can_list_states(problem)


def _left(limits: Limits, deadline: float | None, steps: int) -> Limits:
    """Return what is left of limits, at least a little."""
    seconds = None if deadline is None else max(LEAST_SECONDS, deadline - time.monotonic())
    return replace(limits, seconds=seconds, work=None if limits.work is None else max(1, limits.work - steps))


def _unsaid(problem: Problem) -> list[str]:
    unsaid = {
        "arrival times": bool(problem.workload.arrival.any()),
        "a cap on the tokens of a prefill stage": problem.prefill_token_cap is not None,
        "a KV capacity": problem.kv_capacity is not None,
        "a least cost of prefill stages": floor_binds(problem),
        "a bend in the cost of prefill stages": problem.reaches_bend,
        "requests without a decode round": bool((problem.rounds < 1).any()),
        "shared prompts that are computed again": not problem.keeps_every_prefix,
        "decode rounds that cost nothing": problem.cost.decode_base <= 0,
    }
    return [what for what, present in unsaid.items() if present]


class _Enumeration:
    """The best schedule so far, and the enumeration that ends when none is better."""

    def __init__(self, problem: Problem, best: Schedule, deadline: float | None, work: int | None) -> None:
        self.problem = problem
        self.deadline = deadline
        self.work = work
        self.steps = 0
        self.accept(best)

    def accept(self, schedule: Schedule) -> None:
        cost = self.problem.cost
        self.best = schedule
        self.cost = cost.prefill_base * schedule.prefill_stages() + cost.decode_base * schedule.rounds.sum()

    def tick(self, steps: int = 1) -> None:
        before = self.steps // LOOK_AT_CLOCK
        self.steps += steps
        if self.work is not None and self.steps > self.work:
            raise LimitReachedError(StoppedBy.WORK)
        if self.deadline is None or self.steps // LOOK_AT_CLOCK == before:
            return
        if time.monotonic() > self.deadline:
            raise LimitReachedError(StoppedBy.TIME)

    def rounds_to_beat(self, stages: int) -> int:
        """Return the most rounds with which so many stages are better than the best schedule."""
        cost = self.problem.cost
        return int((self.cost * (1 - PRECISION) - cost.prefill_base * stages) // cost.decode_base)

    def run(self) -> None:
        """Leave no packing from which a better schedule could be made."""
        slots = min(self.problem.slots, len(self.problem))
        capacity = self.rounds_to_beat(least_counts(self.problem).stages)
        every = packings(self.problem.rounds, slots, capacity, self.tick)
        while some := sorted(itertools.islice(every, SORTED_AT_ONCE), key=_load):
            for packing in some:
                self._settle(packing)

    def _settle(self, packing: tuple[Slot, ...]) -> None:
        """Leave no better schedule with that packing."""
        stages = max(map(len, packing))
        while (rounds := self.rounds_to_beat(stages)) >= _load(packing):
            starts = self.starts_within(packing, stages, rounds)
            if starts is None:
                stages += 1
            else:
                self.accept(schedule_of_starts(self.problem, starts))

    def starts_within(self, packing: tuple[Slot, ...], stages: int, rounds: int) -> IntArray | None:
        """Return the round at which each request starts with that packing, stages and rounds, or None."""
        # Slots that may idle least leave the fewest ways, so they come first.
        slots = sorted(packing, key=lambda slot: (rounds - sum(slot), -len(slot)))
        idle = [rounds - sum(slot) for slot in slots]
        if max(map(_number_of_orders, slots)) > MOST_ORDERS:
            raise LimitReachedError(StoppedBy.GAVE_UP)
        orders = []
        for slot in slots:
            orders.append(_orders(slot))
            self.tick(len(orders[-1]))
        for chosen in self._stabbed(orders, idle, stages - 1):
            sequences = [orders[j][row].tolist() for j, row in enumerate(chosen)]
            self.tick()
            times = _stage_times(sequences, [0] * len(slots), [0] * len(slots), idle, stages)
            if times is not None:
                return self._starts(sequences, times)
        return None

    def _stabbed(self, orders: list[IntArray], idle: list[int], points: int) -> Iterator[list[int]]:
        """Yield an order for every slot such that so many points stab all windows of starts."""
        choices = [_Choices.of(*slot) for slot in zip(orders, idle, strict=True)]

        def add(slot: int, rows: IntArray, needed: IntArray, chosen: IntArray) -> Iterator[list[int]]:
            if slot == len(choices):
                yield from chosen.tolist()
                return
            block = max(1, ROWS_AT_ONCE // (choices[slot].windows.size + 1))
            for begin in range(0, len(rows), block):
                part = slice(begin, begin + block)
                least = needed[part, None] + choices[slot].isolated(rows[part])
                row, order = np.nonzero(least <= points)
                self.tick(len(least) + len(row))
                together = np.concatenate((rows[part][row], choices[slot].windows[order]), axis=1)
                together.sort(axis=1)
                stabs = _stabs(together)
                fits = np.flatnonzero(stabs <= points)
                if len(fits):
                    picked = np.column_stack((chosen[part][row[fits]], order[fits]))
                    yield from add(slot + 1, together[fits], stabs[fits], picked)

        nothing = np.zeros((1, 0), dtype=np.int64)
        yield from add(0, nothing, np.zeros(1, dtype=np.int64), nothing)

    def _starts(self, sequences: list[list[int]], times: list[int]) -> IntArray:
        starts_of: dict[int, list[int]] = defaultdict(list)
        for sequence in sequences:
            ready = 0
            for length in sequence:
                begin = next(at for at in times if at >= ready)
                starts_of[length].append(begin)
                ready = begin + length
        starts = [starts_of[length].pop() for length in self.problem.rounds.tolist()]
        return np.array(starts, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Choices:
    """
    The windows in which the later requests of a slot start, for each of its orders.

    A window is one number, its end in the upper half and its beginning in the lower: sorted, the windows are
    stabbed greedily.

    Parameters
    ----------
    windows
        Shape (orders, requests - 1).
    distinct
        The windows that some order has, shape (distinct,).
    holds
        Whether an order has a window, shape (distinct, orders), or None where knowing the windows that meet
        no other says little: few orders, or windows of one order that may overlap.
    """

    windows: IntArray
    distinct: IntArray
    holds: NDArray[np.float32] | None

    @classmethod
    def of(cls, orders: IntArray, idle: int) -> _Choices:
        first = np.cumsum(orders, axis=1)[:, :-1]
        windows = ((first + idle) << 32) | first
        distinct, at = np.unique(windows, return_inverse=True)
        holds = None
        if idle < orders.min() and len(orders) > MANY_ORDERS * len(distinct):
            holds = np.zeros((len(distinct), len(orders)), dtype=np.float32)
            holds[at.reshape(windows.shape), np.arange(len(orders))[:, None]] = 1.0
        return cls(windows, distinct, holds)

    def isolated(self, rows: IntArray) -> IntArray:
        """Return how many windows of each order meet none of a row's: each needs a point of its own."""
        if self.holds is None:
            return np.zeros((len(rows), len(self.windows)), dtype=np.int64)
        alone = np.ones((len(rows), len(self.distinct)), dtype=bool)
        first, last = (self.distinct & LOWER_HALF).astype(np.int32), (self.distinct >> 32).astype(np.int32)
        begins, ends = (rows & LOWER_HALF).astype(np.int32), (rows >> 32).astype(np.int32)
        for begin, end in zip(begins.T, ends.T, strict=True):
            alone &= (begin[:, None] > last) | (end[:, None] < first)
        return (alone.astype(np.float32) @ self.holds).astype(np.int64)


def _load(packing: tuple[Slot, ...]) -> int:
    return max(map(sum, packing))


def _number_of_orders(slot: Slot) -> int:
    same = (math.factorial(slot.count(length)) for length in set(slot))
    return math.factorial(len(slot)) // math.prod(same)


@functools.lru_cache(maxsize=256)
def _orders(slot: Slot) -> IntArray:
    """Return the distinct orders of a slot's requests, shape (orders, requests)."""

    def after(taken: list[int], left: list[int]) -> Iterator[list[int]]:
        if not left:
            yield taken
        for length in sorted(set(left)):
            rest = left.copy()
            rest.remove(length)
            yield from after([*taken, length], rest)

    return np.array(list(after([], list(slot))), dtype=np.int64)


def _stabs(windows: IntArray) -> IntArray:
    """Return the fewest points that stab all windows of each row, which are sorted by their ends."""
    points = np.zeros(len(windows), dtype=np.int64)
    last = np.full(len(windows), -1, dtype=np.int64)
    for column in windows.T:
        missed = (column & LOWER_HALF) > last
        points += missed
        last = np.where(missed, column >> 32, last)
    return points


def _stage_times(
    sequences: list[list[int]], begun: list[int], ready: list[int], idle: list[int], stages: int
) -> list[int] | None:
    """
    Return times of at most so many stages that serve every slot's sequence, or None if there are none.

    Of each slot so many requests have begun, the last is done in round ``ready``, and so many rounds may
    still be idled away.
    """
    waiting = [j for j, sequence in enumerate(sequences) if begun[j] < len(sequence)]
    if not waiting:
        return []
    if max(len(sequences[j]) - begun[j] for j in waiting) > stages:
        return None
    latest = min(ready[j] + idle[j] for j in waiting)
    for time_ in sorted({ready[j] for j in waiting if ready[j] <= latest}, reverse=True):
        begun_then, ready_then, idle_then = begun.copy(), ready.copy(), idle.copy()
        for j in waiting:
            if ready[j] <= time_:
                begun_then[j] += 1
                ready_then[j] = time_ + sequences[j][begun[j]]
                idle_then[j] -= time_ - ready[j]
        rest = _stage_times(sequences, begun_then, ready_then, idle_then, stages - 1)
        if rest is not None:
            return [time_, *rest]
    return None
