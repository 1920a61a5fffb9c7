"""Small problems under scarce KV memory solved to a proven optimum, back from the end of the schedule."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from ...data.costs.cost import FloatArray, IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ..result import Limits, StoppedBy
from .least_rounds import NEVER, Shapes, earliest, in_order, least_rounds
from .outcome import ExactOutcome, LimitReachedError
from .stage_states import can_list_states

BoolArray = NDArray[np.bool_]

MOST_REQUESTS = 14
"""Requests up to which all sets of them are listed."""
MOST_STATES = 600_000
"""States of a layer beyond which it gives up: some three hundred bytes each are held."""
AT_ONCE = 5_000
"""States followed together; bounds the memory."""
BEAM = 200
"""States that a layer keeps in the first pass, which looks for a schedule to beat."""
TRIED = 30
"""Ends of a search that are made schedules."""
PRECISION = 1e-10
"""Relative difference below which two costs are the same."""


def can_search_from_the_end(problem: Problem) -> bool:
    """Return whether memory can run out, rounds cost something, each request takes one, and they are few."""
    return (
        len(problem) <= MOST_REQUESTS
        and problem.memory_can_run_out
        and problem.cost.decode_base > 0
        and bool((problem.rounds > 0).all())
        and can_list_states(problem)
    )


def best_from_the_end(problem: Problem, limits: Limits, start: Schedule) -> ExactOutcome:
    r"""
    Return an optimal schedule, or the best one found; ``GAVE_UP`` where a relaxation is not tight.

    Rounds are counted back from the end. There a request begins with all its tokens and only shrinks, so one
    that fits in a round fits in the next ones, and what it holds in round u follows from the round in which
    it is over (where its prefill stage is): :math:`a + \tau - 1 - u`. A group is requests of one stage time.

    *Every optimum has an order and groups.* Its groups are its stages, none of which costs less split in two:
    as a stage's seconds are convex in its tokens, none of its parts does. Sort the requests by when they
    begin. Given order and groups, take for each request the first round that is not before the one before it,
    in which it fits beside those before it, and from which it is over no earlier than others of its group;
    where it is over later, its group is delayed to that. All of this is monotone, so repeating it from
    nothing ends in the least rounds that keep all rules, and the optimum's are no less.

    *The relaxation* follows orders and groups request by request, but does not look back: a group that a
    later request delays is delayed from then on, and what began in between stays. Nothing begins later than
    in the schedule of that order and those groups, so no cost is above its cost, and of equal states one is
    kept. A state is which requests wait, and of those under way when each is over and its group. Schedules
    are made of the cheapest ends; if one costs more than the relaxation says, and that is below the best,
    nothing is proven.

    *Groups joined late.* A request joins groups under way only. With :math:`\rho` the fewest rounds of those
    that may join the group of a new one, let the new one, of n rounds, begin :math:`k \rho` after the first
    round in which it fits, for each k. The optimum's round x lies less than :math:`\rho` after one of these.
    One of :math:`r \ge \rho` rounds joins in the optimum in round :math:`x + n - r`, so the group is still
    under way. From k = 1 on some request has to join; a group that none joins could begin in the first round.

    Bounds: the rounds of what waits on its own (:func:`~batchbound.solvers.exact.least_rounds.least_rounds`)
    with what has just begun, slots, KV tokens, and the cheapest stages of what waits.

    Parameters
    ----------
    problem
        One that :func:`can_search_from_the_end` accepts.
    limits
        Work is in states.
    start
        A schedule to beat.
    """
    deadline = None if limits.seconds is None else time.monotonic() + limits.seconds
    search = _EndSearch(problem, start, deadline, limits.work)
    try:
        if not search.run(BEAM):
            search.run(None)
        stopped_by = StoppedBy.PROOF if search.tight else StoppedBy.GAVE_UP
    except LimitReachedError as limit:
        stopped_by = limit.stopped_by
    return ExactOutcome(search.best, stopped_by, search.steps, "orders")


class _Sets:
    """
    What is known of each set of requests, a bit for each of them.

    Attributes
    ----------
    stages
        The least seconds of prefill stages of a set all started at one time, shape (sets,).
    apart
        The least seconds of its prefill stages at whatever times, shape (sets,).
    rounds, least, tokens_read
        Decode steps, the fewest rounds, and tokens of keys and values read in them, shape (sets,).
    fewest
        Rounds of its shortest request, :data:`NEVER` of none, shape (sets,).
    joins
        The fewest rounds of one of a set that may share the stage of a request, shape (requests, sets).
    lacks
        The fewest tokens that the capacity needs for so many requests to share their stage with one of a set,
        beside what they hold at first less one each, shape (slots + 1, sets).
    """

    def __init__(self, problem: Problem, shapes: Shapes, prompts: IntArray) -> None:
        self._cost = problem.cost
        limits = (problem.prefill_token_cap, shapes.capacity)
        self._most = min(limit for limit in limits if limit is not None)
        self._prompts, self._shapes = prompts.tolist(), shapes
        count = len(prompts)
        self.sets = np.arange(1 << count)
        member = (self.sets[:, None] >> np.arange(count)) & 1
        stages = self._stages()
        self.single = dict(stages)
        self.stages = self._split(stages)
        self.apart = self._split([(bits, cost) for bits, cost in stages if self._starts_together(bits)])
        self.rounds = member @ shapes.rounds
        read = shapes.rounds * shapes.first + shapes.rounds * (shapes.rounds - 1) // 2
        self.tokens_read = member @ read
        self.least = least_rounds(shapes)
        self.fewest = np.where(member, shapes.rounds, NEVER).min(axis=1)
        self.joins = np.full((count, len(self.sets)), NEVER)
        self.lacks = np.full((shapes.columns + 1, len(self.sets)), NEVER)
        for one in range(count):
            having = member[:, one] == 1
            rounds, peak = int(shapes.rounds[one]), int(shapes.peaks[one])
            for other in range(count):
                if other != one and self._may_join(one, other):
                    self.joins[other][having] = np.minimum(self.joins[other][having], rounds)
            for size in range(1, shapes.columns + 1):
                self.lacks[size][having] = np.minimum(self.lacks[size][having], size * rounds + peak)

    def saved(self, one: IntArray | int, other: IntArray | int) -> FloatArray:
        """Return the seconds that starting two sets at one time saves."""
        seconds: FloatArray = self.stages[one] + self.stages[other] - self.stages[one | other]
        return seconds

    def split(self, bits: int) -> Iterator[int]:
        """Yield the stages of a set that is started at one time, each a set."""
        while bits:
            parts = (part for part in self.single if part & ~bits == 0 and part & bits & -bits)
            stage = min(parts, key=lambda part: self.single[part] + self.stages[bits ^ part])
            bits ^= stage
            yield stage

    def _stages(self) -> list[tuple[int, float]]:
        """Return every set that one stage can start, with its seconds."""
        found = []
        for size in range(1, self._shapes.columns + 1):
            for chosen in itertools.combinations(range(len(self._prompts)), size):
                tokens = sum(self._prompts[request] for request in chosen)
                if tokens <= self._most:
                    bits = sum(1 << request for request in chosen)
                    found.append((bits, float(self._cost.prefill_seconds(tokens))))
        return found

    def _starts_together(self, bits: int) -> bool:
        """Return whether requests that start together fit in the last round of each."""
        rounds, first = self._shapes.rounds.tolist(), self._shapes.first.tolist()
        chosen = [request for request in range(len(rounds)) if bits >> request & 1]
        return all(
            sum(first[i] + rounds[j] - 1 for i in chosen if rounds[i] >= rounds[j]) <= self._shapes.capacity
            for j in chosen
        )

    def _split(self, stages: list[tuple[int, float]]) -> FloatArray:
        """Return the least seconds of stages that make up each set."""
        least = np.full(len(self.sets), np.inf)
        least[0] = 0.0
        # The lowest request of a set is in some stage, and what is left has only higher ones.
        for request in reversed(range(len(self._prompts))):
            having = self.sets[(self.sets & ((2 << request) - 1)) == 1 << request]
            for bits, seconds in stages:
                if bits & -bits == 1 << request:
                    rows = having[(having & bits) == bits]
                    least[rows] = np.minimum(least[rows], seconds + least[rows ^ bits])
        return least

    def _may_join(self, one: int, other: int) -> bool:
        """Return whether one may share the stage of another that begins before it, and this saves time."""
        rounds, first = self._shapes.rounds.tolist(), self._shapes.first.tolist()
        last = first[other] + rounds[one] - 1 + first[one] + rounds[one] - 1
        fits = rounds[one] <= rounds[other] and last <= self._shapes.capacity
        return fits and float(self.saved(1 << one, 1 << other)) > PRECISION * float(self.stages[-1])


@dataclass(frozen=True, slots=True, eq=False)
class _States:
    """
    States right after a request begins, back from the end, as columns.

    Parameters
    ----------
    waiting
        The requests that wait, a bit each, shape (states,).
    now
        The round in which the last one begins, shape (states,).
    spent, least
        Seconds of the stages of what is over, and the least seconds of any schedule, shape (states,).
    over, who, group
        Of each request under way, the latest over first: the round back at which it is over (-1 for a free
        slot), its number, and the bits of its group, shape (slots, states).
    due
        1 where another has to join its group, else 0, shape (slots, states).
    parent, request, joined
        The state it came from (a row of the layer before), what begins, and the group it joins or 0,
        shape (states,).
    """

    waiting: IntArray
    now: IntArray
    spent: FloatArray
    least: FloatArray
    over: IntArray
    who: IntArray
    group: IntArray
    due: IntArray
    parent: IntArray
    request: IntArray
    joined: IntArray

    def take(self, rows: IntArray | BoolArray | slice) -> _States:
        return _States(*(getattr(self, column.name)[..., rows] for column in fields(self)))

    @staticmethod
    def together(parts: list[_States]) -> _States:
        columns = (column.name for column in fields(_States))
        return _States(
            *(np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in columns)
        )

    @property
    def heads(self) -> BoolArray:
        """Whether each under way is the first request of its group, shape (slots, states)."""
        heads: BoolArray = (self.over > self.now) & (1 << self.who == (self.group & -self.group))
        return heads


class _EndSearch:
    """The best schedule so far, and the layers of states that could lead to a better one."""

    def __init__(self, problem: Problem, best: Schedule, deadline: float | None, work: int | None) -> None:
        assert problem.kv_capacity is not None
        self.problem, self.best = problem, best
        self.deadline, self.work, self.steps = deadline, work, 0
        self.order = np.lexsort((-problem.prompt_tokens, -problem.rounds))
        rounds, first = problem.rounds[self.order], problem.kv_at_start[self.order]
        self.shapes = Shapes(rounds, first, problem.slots, problem.kv_capacity)
        self.sets = _Sets(problem, self.shapes, problem.prompt_tokens[self.order])
        cost = problem.cost
        self.round = cost.decode_base
        self.constant = cost.decode_per_slot * int(rounds.sum())
        self.constant += cost.decode_per_kv_token * problem.kv_token_rounds
        self.seconds = best.makespan(problem) - self.constant
        # Seconds are convex in tokens: two sets in one stage take no less than this below two stages.
        self.shared = float(cost.prefill_seconds(0))
        self.relaxed = np.inf
        self.kept: list[_States] = []

    @property
    def to_beat(self) -> float:
        return self.seconds - PRECISION * (self.seconds + self.constant)

    @property
    def tight(self) -> bool:
        """Whether no end of the relaxation is cheaper than the best schedule."""
        return self.relaxed >= self.to_beat

    def tick(self, steps: int) -> None:
        self.steps += steps
        if self.work is not None and self.steps > self.work:
            raise LimitReachedError(StoppedBy.WORK)
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise LimitReachedError(StoppedBy.TIME)

    def run(self, beam: int | None) -> bool:
        """Go through all layers, with a beam's states at most in each; return whether these were all."""
        every, self.relaxed = True, np.inf
        none = np.zeros(1, dtype=np.int64)
        empty = np.zeros((self.shapes.columns, 1), dtype=np.int64)
        everyone, free = none + len(self.sets.sets) - 1, empty - 1
        spent = np.zeros(1)
        states = _States(everyone, none, spent, spent, free, empty, empty, empty, none, none, none)
        self.kept = [states]
        for _ in range(len(self.order)):
            parts = []
            for begin in range(0, len(states.waiting), AT_ONCE):
                block = np.arange(begin, min(begin + AT_ONCE, len(states.waiting)))
                parts += self._after(states, block)
            if not parts:
                break
            states = self._distinct(_States.together(parts))
            if len(states.waiting) > MOST_STATES:
                raise LimitReachedError(StoppedBy.GAVE_UP)
            if beam is not None and len(states.waiting) > beam:
                states, every = states.take(np.argpartition(states.least, beam)[:beam]), False
            self.kept.append(states)
        else:
            self._end(states)
        return every

    def _after(self, states: _States, block: IntArray) -> list[_States]:
        """Return what follows states when one more request begins."""
        found = []
        for request in range(len(self.order)):
            rows = block[(states.waiting[block] >> request) & 1 == 1]
            if not len(rows):
                continue
            found.append(self._alone(states, rows, request))
            found.append(self._later(states, rows, request))
            found += [self._joining(states, rows, request, slot) for slot in range(self.shapes.columns)]
        return [part for part in found if len(part.waiting)]

    def _first(self, states: _States, rows: IntArray, request: int) -> IntArray:
        """Return the first round in which a request fits."""
        over, now = states.over[:, rows], states.now[rows]
        sizes = np.where(over > now, self.shapes.first[states.who[:, rows]] + over - 1, 0)
        room = np.full(len(rows), self.shapes.capacity - self.shapes.peaks[request])
        return earliest(now, over, sizes, room, self.shapes.slots - 1)

    def _alone(self, states: _States, rows: IntArray, request: int) -> _States:
        """Return the states in which a request begins as early as it can, in a group of its own."""
        return self._begun(states, rows, request, self._first(states, rows, request))

    def _later(self, states: _States, rows: IntArray, request: int) -> _States:
        """Return the states in which it begins later, for others to join its group."""
        sets, waiting = self.sets, states.waiting[rows]
        span = sets.joins[request, waiting & ~(1 << request)]
        first = self._first(states, rows, request)
        # All that waits begins no earlier.
        left = (self.to_beat - states.spent[rows] - sets.apart[waiting]) / self.round
        most = np.maximum(0, (left.astype(np.int64) - sets.least[waiting] - first) // span)
        most[(span >= NEVER) | (states.over[0, rows] < 0)] = 0
        place = np.repeat(np.arange(len(rows)), most)
        times = np.arange(len(place)) - np.repeat(np.cumsum(most) - most, most) + 1
        begin = first[place] + times * span[place]
        return self._begun(states, rows[place], request, begin, late=True)

    def _joining(self, states: _States, rows: IntArray, request: int, slot: int) -> _States:
        """Return the states in which a request joins the group of a slot, which it may delay."""
        shapes, sets = self.shapes, self.sets
        rounds, heads = int(shapes.rounds[request]), states.heads[slot, rows]
        group = states.group[slot, rows]
        # Those of its group begin before it, so they are no shorter.
        heads &= sets.fewest[group] >= rounds
        heads &= sets.saved(group, 1 << request) > PRECISION * sets.stages[-1]
        rows = rows[heads]
        over, who, now = states.over[:, rows], states.who[:, rows], states.now[rows]
        live = over > now
        joined = live & (states.group[:, rows] == states.group[slot, rows])
        sizes = np.where(live & ~joined, shapes.first[who] + over - 1, 0)
        held = np.where(joined, shapes.first[who] + rounds - 1, 0).sum(axis=0)
        room = shapes.capacity - shapes.peaks[request] - held
        free = shapes.slots - 1 - joined.sum(axis=0)
        begin = earliest(np.maximum(now, over[slot] - rounds), over, sizes, room, free)
        fits = begin < over[slot]
        return self._begun(states, rows[fits], request, begin[fits], joined=joined[:, fits])

    def _begun(
        self,
        states: _States,
        rows: IntArray,
        request: int,
        begin: IntArray,
        joined: BoolArray | None = None,
        late: bool = False,
    ) -> _States:
        """Return the states after a request begins in given rounds, as far as they may be of use."""
        self.tick(len(rows))
        bit, ends = 1 << request, begin + int(self.shapes.rounds[request])
        waiting = states.waiting[rows] & ~bit
        over, who = states.over[:, rows], states.who[:, rows]
        group, due = states.group[:, rows], states.due[:, rows]
        with_whom = np.zeros(len(rows), dtype=np.int64)
        if joined is not None:
            with_whom = np.where(joined, group, 0).max(axis=0, initial=0)
            group, over = np.where(joined, group | bit, group), np.where(joined, ends, over)
            due = np.where(joined, 0, due)
        live = over > begin
        left = (states.over[:, rows] > states.now[rows]) & ~live
        in_time = ~(left & (due > 0)).any(axis=0)
        heads = left & (1 << who == (group & -group))
        spent = states.spent[rows] + np.where(heads, self.sets.stages[group], 0.0).sum(axis=0)
        wanted = np.full(len(rows), int(late))
        numbers = np.full(len(rows), request)
        over, who, group, due = in_order(
            _with(over, live, -1, ends),
            _with(who, live, 0, numbers),
            _with(group, live, 0, with_whom | bit),
            _with(due, live, 0, wanted),
        )
        begun = _States(waiting, begin, spent, spent, over, who, group, due, rows, numbers, with_whom)
        begun = begun.take(np.flatnonzero(in_time))
        least, joinable = self._least(begun)
        useful = (least < self.to_beat) & ((begun.due == 0) | joinable).all(axis=0)
        return replace(begun, least=least).take(useful)

    def _least(self, states: _States) -> tuple[FloatArray, BoolArray]:
        """Return a lower bound on the seconds of any schedule, and which groups another may still join."""
        sets, waiting, now = self.sets, states.waiting, states.now
        live = states.over > now
        left, first = np.where(live, states.over - now, 0), self.shapes.first[states.who]
        rounds = -(-(left.sum(axis=0) + sets.rounds[waiting]) // self.shapes.slots)
        read = (left * first + left * (left - 1) // 2).sum(axis=0) + sets.tokens_read[waiting]
        np.maximum(rounds, -(-read // self.shapes.capacity), out=rounds)
        new = live & (left >= self.shapes.rounds[states.who])
        just_begun = np.where(new, 1 << states.who, 0).sum(axis=0)
        np.maximum(rounds, sets.least[waiting | just_begun], out=rounds)
        rounds = np.maximum(now + rounds, states.over[0])
        joinable, heads = self._joinable(states, live, first), states.heads
        under_way = np.where(heads, sets.stages[states.group], 0.0).sum(axis=0)
        shared = self.shared * (joinable & heads).sum(axis=0)
        groups = np.bitwise_or.reduce(np.where(live, states.group, 0), axis=0)
        stages = np.maximum(under_way, under_way + sets.apart[waiting] - shared)
        np.maximum(stages, sets.apart[waiting | groups], out=stages)
        return states.spent + stages + self.round * rounds, joinable

    def _joinable(self, states: _States, live: BoolArray, first: IntArray) -> BoolArray:
        """Return whose groups one that waits could join: in their last round, when most room is left."""
        joinable = np.zeros_like(live)
        for slot, over in enumerate(states.over):
            same = live & (states.group == states.group[slot])
            longer = live & ~same & (states.over >= over)
            held = np.where(longer, first + states.over - over, 0).sum(axis=0)
            held += np.where(same, first - 1, 0).sum(axis=0)
            size = same.sum(axis=0)
            room = size + longer.sum(axis=0) < self.shapes.slots
            fits = self.sets.lacks[size, states.waiting] <= self.shapes.capacity - held
            joinable[slot] = live[slot] & room & fits
        return joinable

    def _distinct(self, states: _States) -> _States:
        """Return the states that can still lead to a better schedule, of equal ones the cheapest."""
        states = states.take(states.least < self.to_beat)
        left = np.where(states.over > states.now, states.over - states.now, 0)
        columns = np.vstack((states.waiting, left, states.who, states.group, states.due))
        factors = np.random.default_rng(0).integers(1, 2**62, len(columns)) * 2 + 1
        mixed = (columns * factors[:, None]).sum(axis=0)
        order = np.lexsort((states.spent + self.round * states.now, mixed))
        columns = columns[:, order]
        new = np.ones(len(order), dtype=np.bool_)
        new[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        return states.take(order[new])

    def _end(self, states: _States) -> None:
        """Make schedules of the cheapest ends, and note the cheapest that costs more as a schedule."""
        states = states.take((states.due == 0).all(axis=0))
        stages = np.where(states.heads, self.sets.stages[states.group], 0.0).sum(axis=0)
        seconds = states.spent + stages + self.round * states.over[0]
        for number, row in enumerate(np.argsort(seconds)):
            if seconds[row] >= self.to_beat:
                break
            schedule = None if number >= TRIED else self._schedule(states, int(row))
            if schedule is not None and schedule.makespan(self.problem) - self.constant < self.to_beat:
                self.best = schedule
                self.seconds = schedule.makespan(self.problem) - self.constant
            self.relaxed = min(self.relaxed, float(seconds[row]))

    def _schedule(self, states: _States, row: int) -> Schedule | None:
        """Return the schedule of a state's order and groups, or None if it takes as long as the best."""
        order: list[int] = []
        joined: list[int] = []
        for layer in range(len(self.order), 0, -1):
            states = states if layer == len(self.order) else self.kept[layer]
            order.append(int(states.request[row]))
            joined.append(int(states.joined[row]))
            row = int(states.parent[row])
        leader: dict[int, int] = {}
        for request, group in zip(reversed(order), reversed(joined), strict=True):
            leader[request] = leader[group.bit_length() - 1] if group else request
        times = self._times(order[::-1], leader)
        if times is None:
            return None
        started: dict[int, int] = {}
        for request in order:
            at = times[leader[request]]
            started[at] = started.get(at, 0) | 1 << request
        bin_of, bursts = np.empty(len(self.order), dtype=np.int64), list[int]()
        for at, before in itertools.pairwise([*sorted(started, reverse=True), 0]):
            for stage in self.sets.split(started[at]):
                members = [request for request in range(len(self.order)) if stage >> request & 1]
                bin_of[self.order[members]] = len(bursts)
                bursts.append(0)
            bursts[-1] = at - before
        return Schedule.from_bins(self.problem, bin_of, bursts)

    def _times(self, order: list[int], leader: dict[int, int]) -> dict[int, int] | None:
        """Return the least rounds back at which groups are over, by their leaders; None if too many."""
        rounds = self.shapes.rounds.tolist()
        over, most = dict.fromkeys(order, 0), int(self.seconds / self.round) + 1
        settled = False
        while not settled:
            settled, now = True, 0
            for place, request in enumerate(order):
                mine = leader[request]
                now = max(now, over[mine] - rounds[request])
                placed = [(other, leader[other]) for other in order[:place]]
                while not self._fits(request, now, placed, over, mine):
                    now += 1
                    if now > most:
                        return None
                ends = now + rounds[request]
                if ends > over[mine]:
                    over[mine] = ends
                    if any(group == mine for _, group in placed):
                        settled = False
                        break
        return over

    def _fits(
        self, request: int, now: int, placed: list[tuple[int, int]], over: dict[int, int], mine: int
    ) -> bool:
        """Return whether a request that begins in a round fits there, its group over no earlier than it."""
        shapes, ends = self.shapes, max(over[mine], now + int(self.shapes.rounds[request]))
        until = [(other, ends if group == mine else over[group]) for other, group in placed]
        held = [int(shapes.first[other]) + end - 1 - now for other, end in until if end > now]
        return len(held) < shapes.slots and sum(held) + int(shapes.peaks[request]) <= shapes.capacity


def _with(column: IntArray, live: BoolArray, free: int, new: IntArray) -> IntArray:
    """Return a column of what is under way, what is not left out, and one more slot."""
    return np.concatenate((np.where(live, column, free), new[None]))
