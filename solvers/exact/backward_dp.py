"""Small problems under scarce KV memory solved to a proven optimum, back from the end of the schedule."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ..result import Limits, StoppedBy
from .columns import BoolArray, Columns, total
from .end_states import (
    DUE,
    GROUP_BITS,
    OVER,
    Dominance,
    EndStates,
    due_of,
    group_of,
    heads_of,
    over_of,
    packed,
    request_of,
)
from .group_orders import GroupOrders, Groups, Order, started_at
from .least_steps import NEVER, AnyIntArray, Shapes, earliest
from .outcome import ExactOutcome, LimitedSearch, LimitReachedError
from .request_sets import PRECISION, RequestSets
from .slot_loads import SlotLoads
from .stage_states import can_list_states

MOST_REQUESTS = GROUP_BITS
"""Requests up to which all sets of them are listed."""
SECONDS_A_SET = 1e-4
"""What it takes to list a set, about."""
MOST_STATES = 600_000
"""States of a layer beyond which it gives up: some two hundred bytes each are held."""
AT_ONCE = 5_000
"""States followed together; bounds the memory."""
BEAM = 1_000
"""States that a layer keeps in the first pass, which looks for a schedule to beat."""
WIDTH, WIDENED = 20_000, 4
"""States that a layer with twice as many keeps in the second pass, and how many times that in each later."""
COMPARED_IN_BEAM = 4
"""States of a layer, for each that a beam keeps, among which those that others are ahead of are left out."""
WAITING = 0.2
"""What a beam adds to the bound of a state: this share of the least seconds of what waits and is left."""
TRIED = 30
"""Ends of a search that are made schedules."""


def can_search_backward(problem: Problem, seconds: float | None = None) -> bool:
    """
    Return whether memory can run out, decode steps cost something, each request takes one, and they are few.

    problem: The problem.
    seconds: Time that there is, in which all sets have to be listed; None for no limit.
    """
    return (
        len(problem) <= MOST_REQUESTS
        and (seconds is None or SECONDS_A_SET * 2 ** len(problem) <= seconds)
        and problem.memory_can_run_out
        and problem.cost.decode_base > 0
        and bool((problem.decode_steps > 0).all())
        and int(problem.decode_steps.sum()) + (problem.kv_capacity or 0) < NEVER // 2
        and can_list_states(problem)
    )


def best_by_backward_dp(problem: Problem, limits: Limits, start: Schedule) -> ExactOutcome:
    r"""
    Return an optimal schedule, or the best one found; ``GAVE_UP`` where a relaxation is not tight.

    Steps are counted back from the end. There a request begins with all its tokens and only shrinks, so one
    that fits in a step fits in the next ones, and what it holds in step u follows from the step in which
    it is over (where its prefill stage is): :math:`a + \tau - 1 - u`. A group is requests of one stage time.

    *Every optimum has an order and groups.* Its groups are its stages, none of which costs less split in two:
    as a stage's seconds are convex in its tokens, none of its parts does. Sort the requests by when they
    begin. Given order and groups, take for each request the first step that is not before the one before it,
    in which it fits beside those before it, and from which it is over no earlier than others of its group;
    where it is over later, its group is delayed to that. All of this is monotone, so repeating it from
    nothing ends in the least decode steps that keep all rules, and the optimum's are no less.

    *The relaxation* follows orders and groups request by request, but does not look back: a group that a
    later request delays is delayed from then on, and what began in between stays. Nothing begins later than
    in the schedule of that order and those groups, so no cost is above its cost. A state is which requests
    wait, and of those under way when each is over and its group. Of equal states the cheapest is kept, and
    none that another is ahead of (:class:`~batchbound.solvers.exact.end_states.Dominance`). Schedules are
    made of the cheapest ends; if one costs more than the relaxation says, and that is below the best, all
    orders and groups that may be better are followed, none dropped for another, and made schedules.

    *Groups joined late.* A request joins groups under way only. A group that would be over when another
    request begins is over then, or it is due: the steps of the shortest request that may join it are then
    still to come, and what begins has to fit beside it. In the optimum one that joins it begins no earlier
    than what begins now, so it is over no earlier there.

    *Bounds.* Decode steps: slots, KV tokens, what waits on its own
    (:func:`~batchbound.solvers.exact.least_steps.least_steps`) with what has just begun, and, as what is
    under way only shrinks and no request begins before it fits beside that, those that fit from some step on
    or later, on their own from then on; and no fewer than let slots share out what waits, each from when it
    is free (:class:`~batchbound.solvers.exact.slot_loads.SlotLoads`). Stages: the cheapest of what waits,
    apart or beside those under way.

    *Passes.* A beam looks for a schedule to beat. Where it misses the best, many states look better than it:
    the next passes follow those with the least bounds first, more in each, until none is left out.

    problem: One that :func:`can_search_backward` accepts.
    limits: Work is in states.
    start: A schedule to beat.
    """
    deadline = None if limits.seconds is None else time.monotonic() + limits.seconds
    try:
        search = _EndSearch(problem, start, deadline, limits.work)
    except LimitReachedError as limit:
        return ExactOutcome(start, limit.stopped_by, 0, "orders")
    try:
        every, width = search.run(BEAM), WIDTH
        while not every:
            every, width = search.run(None, width), WIDENED * width
        if not search.tight:
            search.run(None, None, every_path=True)
        stopped_by = StoppedBy.PROOF if search.tight else StoppedBy.GAVE_UP
    except LimitReachedError as limit:
        stopped_by = limit.stopped_by
    except KeyboardInterrupt:
        stopped_by = StoppedBy.INTERRUPT
    return ExactOutcome(search.best, stopped_by, search.steps, "orders")


@dataclass(frozen=True, slots=True, eq=False)
class _Begins(Columns):
    """
    Requests that may begin next, as columns.

    row, request: In which state, and which request, shape (begins,).
    slot: The slot whose group it joins, -1 for none, shape (begins,).
    kept: The slots whose groups would be over and are due instead, a bit each, shape (begins,).
    begin: The decode step in which it begins, shape (begins,).
    stages: The least seconds of all stages then, shape (begins,).
    """

    row: IntArray
    request: IntArray
    slot: IntArray
    kept: IntArray
    begin: AnyIntArray
    stages: FloatArray


class _EndSearch(LimitedSearch):
    """The best schedule so far, and the layers of states that could lead to a better one."""

    def __init__(self, problem: Problem, best: Schedule, deadline: float | None, work: int | None) -> None:
        assert problem.kv_capacity is not None
        self.problem, self.best = problem, best
        super().__init__(deadline, work)
        self.order = np.lexsort((-problem.prompt_tokens, -problem.decode_steps))
        decode_steps, first = problem.decode_steps[self.order], problem.kv_at_start[self.order]
        self.shapes = Shapes(decode_steps, first, problem.slots, problem.kv_capacity)
        # In numbers half as long what is placed takes less time.
        self.short = replace(
            self.shapes, decode_steps=decode_steps.astype(np.int32), first=first.astype(np.int32)
        )
        self.sets = RequestSets(problem, self.shapes, problem.prompt_tokens[self.order], self.tick)
        self.loads = SlotLoads(decode_steps)
        # Of requests alike, the one with the lower number begins first.
        self.twins = np.flatnonzero((np.diff(decode_steps) == 0) & (np.diff(first) == 0))
        cost = problem.cost
        self.decode_step = cost.decode_base
        self.constant = cost.decode_per_slot * int(decode_steps.sum())
        self.constant += cost.decode_per_kv_token * problem.kv_token_steps
        self.seconds = best.makespan(problem) - self.constant
        self.dominance = Dominance(self.sets, self.shapes, self.decode_step)
        self.orders = GroupOrders(self.shapes, self.sets, self.decode_step, self.tick)
        self.relaxed = self.cut = np.inf
        self.kept: list[EndStates] = []

    @property
    def to_beat(self) -> float:
        return self.seconds - PRECISION * (self.seconds + self.constant)

    @property
    def below(self) -> float:
        """Seconds from which states are not followed."""
        return min(self.to_beat, self.cut)

    @property
    def tight(self) -> bool:
        """Whether no end of the relaxation is cheaper than the best schedule."""
        return self.relaxed >= self.to_beat

    def run(self, beam: int | None, width: int | None = None, every_path: bool = False) -> bool:
        """
        Go through all layers; return whether no state that may lead to a better schedule was left out.

        A layer has a beam's states at most. Where there are twice a width, that many with the least bounds
        are followed, and from then on none with a higher one: what is found below that is the best. With
        every path, no state is dropped for another: each order and groups that may be better has an end.
        """
        every, self.relaxed, self.cut = True, np.inf, np.inf
        none, nothing = np.zeros(1, dtype=np.int64), np.zeros(1)
        free = np.zeros((self.shapes.columns, 1), dtype=np.int64)
        everyone = none + len(self.sets.sets) - 1
        soonest = np.zeros((len(self.order), 1), dtype=np.int32)
        states = EndStates(everyone, none, nothing, nothing, nothing, soonest, free, none, none, none)
        self.kept = [states]
        for _ in range(len(self.order)):
            parts = []
            for begin in range(0, len(states), AT_ONCE):
                parts += self._after(states, begin)
            if not parts:
                break
            states = EndStates.together(parts)
            self.tick(0)
            if not every_path:
                states = states.distinct(self.decode_step)
                self.tick(0)
            if beam is not None:
                every &= len(states) <= beam
                states = states.first(COMPARED_IN_BEAM * beam, self._expected(states))
            if not every_path:
                states = self.dominance.ahead(states, self.tick)
            if beam is not None:
                states = states.first(beam, self._expected(states))
            if width is not None and len(states) > 2 * width:
                self.cut = float(np.partition(states.least, width)[width]) * (1 + PRECISION)
                states = states.take(states.least < self.cut)
            if len(states) > MOST_STATES:
                raise LimitReachedError(StoppedBy.GAVE_UP)
            self.tick(0)
            self.kept.append(states)
        else:
            self._end(states, every_path)
        return every and self.to_beat <= self.cut

    def _open(self, slots: IntArray) -> FloatArray:
        """Return the seconds of the stages of what is under way, shape (states,)."""
        seconds: FloatArray = total(np.where(heads_of(slots), self.sets.stages[group_of(slots)], 0.0))
        return seconds

    def _after(self, states: EndStates, first: int) -> list[EndStates]:
        """Return what follows states from a row on when one more request begins."""
        block = _Block(states, first, self.short, self.sets)
        able = (states.waiting[block.rows, None] >> np.arange(len(self.order))) & 1
        able[:, self.twins + 1] &= 1 - able[:, self.twins]
        row, request = np.nonzero(able)
        # Alone, or in the group of a slot.
        slot, place = np.nonzero((block.joining[:, row] >> request) & 1)
        row, request = np.concatenate((row, row[place])), np.concatenate((request, request[place]))
        slot = np.concatenate((np.full(len(row) - len(slot), -1), slot))
        none, stages = np.zeros(len(row), dtype=np.int64), block.least_stages(row, request, slot)
        begins = _Begins(row, request, slot, none, block.soonest[request, row], stages)
        found = []
        while len(begins.row):
            self.tick(len(begins.row))
            begins = self._placed(block, begins)
            begun = self._begun(block, begins)
            if len(begun):
                found.append(begun)
            begins = block.kept_instead(begins)
        return found

    def _placed(self, block: _Block, begins: _Begins) -> _Begins:
        """Return when requests begin, as far as they fit and may be of use."""
        begins = begins.take(np.flatnonzero(self._useful(block, begins)))
        # One that begins alone beside nothing due begins as soon as it fits.
        hindered = (begins.slot >= 0) | (begins.kept > 0) | block.some_due[begins.row]
        alone, others = begins.take(np.flatnonzero(~hindered)), begins.take(np.flatnonzero(hindered))
        return _Begins.together([alone, self._hindered(block, others)])

    def _hindered(self, block: _Block, begins: _Begins) -> _Begins:
        """Return when requests begin that join groups or begin beside groups that are due."""
        row, request, slot = begins.row, begins.request, begins.slot
        over, sizes, decode_steps = block.over[:, row], block.sizes[:, row], self.short.decode_steps[request]
        start, room = begins.begin, self.short.capacity - self.short.peaks[request]
        number = np.zeros(len(row), dtype=np.int32)
        joins = np.flatnonzero(slot >= 0)
        joined = block.joined(begins, joins)
        ends = block.over[slot[joins], row[joins]]
        # What is fixed holds as much whenever the request begins.
        sizes[:, joins] = np.where(joined, 0, sizes[:, joins])
        room[joins] -= total(joined * (block.first[:, row[joins]] - 1 + decode_steps[joins]))
        number[joins] = total(joined)
        start[joins] = np.maximum(start[joins], ends - decode_steps[joins])
        some, due, still = block.due(begins)
        sizes[:, some] = np.where(due, 0, sizes[:, some])
        room[some] -= total(due * (block.first[:, row[some]] - 1 + still))
        number[some] += total(due)
        free = self.shapes.slots - 1 - number
        begins = replace(begins, begin=earliest(start, over, sizes, room, free))
        return begins.take(np.flatnonzero((free >= 0) & self._useful(block, begins)))

    def _useful(self, block: _Block, begins: _Begins) -> BoolArray:
        """Return whether requests that begin no sooner may be of use."""
        alone = np.maximum(
            self.sets.least[block.waiting[begins.row]], self.short.decode_steps[begins.request]
        )
        least = np.maximum(begins.begin + alone, block.over[0, begins.row])
        useful: BoolArray = begins.stages + self.decode_step * least < self.below
        return useful & (begins.begin < NEVER)

    def _begun(self, block: _Block, begins: _Begins) -> EndStates:
        """Return the states after requests begin, as far as they may be of use."""
        row, request, begin = begins.row, begins.request, begins.begin.astype(np.int64)
        slots, bit, ends = block.slots[:, row], 1 << request, begin + self.shapes.decode_steps[request]
        before, gone = slots, (slots > 0) & (block.over[:, row] <= begin)
        group = np.zeros(len(row), dtype=np.int64)
        joins = np.flatnonzero(begins.slot >= 0)
        joined = block.joined(begins, joins)
        group[joins] = block.group[begins.slot[joins], row[joins]]
        late = (slots[:, joins] & (1 << OVER) - 1 & ~DUE) | bit[joins] | ends[joins] << OVER
        slots[:, joins] = np.where(joined, late, slots[:, joins])
        gone[:, joins] &= ~joined
        some, due, still = block.due(begins)
        late = (slots[:, some] & (1 << OVER) - 1) | DUE | begin[some] + still << OVER
        slots[:, some] = np.where(due, late, slots[:, some])
        gone[:, some] &= ~due
        spent = block.spent[row] + self._open(np.where(gone, before, 0))
        new = packed(ends, request, group | bit)
        slots = -np.sort(-np.concatenate((np.where(gone, 0, slots), new[None])), axis=0)[:-1]
        waiting = block.waiting[row] & ~bit
        soonest = block.soonest[:, row]
        states = EndStates(
            waiting, begin, spent, spent, spent, soonest, slots, row + block.begin, request, group
        )
        stages = spent + self._stages(waiting, slots)
        least = stages + self.decode_step * self._decode_steps(states)
        states = replace(states, stages=stages, least=least).take(np.flatnonzero(least < self.below))
        soonest = self._soonest(states)
        least = np.maximum(states.least, states.stages + self.decode_step * self._steps_from(soonest))
        states = replace(states, soonest=soonest, least=least).take(np.flatnonzero(least < self.below))
        return states.take(np.flatnonzero(self._shared_out(states)))

    def _shared_out(self, states: EndStates) -> BoolArray:
        """Return whether slots may have room for what waits in the decode steps that are of use."""
        most = np.floor((self.below - states.stages) / self.decode_step)
        most += states.stages + self.decode_step * (most + 1) < self.below
        most -= states.stages + self.decode_step * most >= self.below
        waits = (states.waiting >> np.arange(len(self.order))[:, None]) & 1
        soonest = np.where(waits, states.soonest, NEVER).min(axis=0)
        begin = np.maximum(over_of(states.slots), soonest)
        return self.loads.fit(states.waiting, most.astype(np.int64) - begin)

    def _soonest(self, states: EndStates) -> AnyIntArray:
        """Return from which decode step on each request that waits fits beside those under way."""
        shapes, over = self.short, over_of(states.slots).astype(np.int32)
        sizes = np.where(states.slots > 0, shapes.first[request_of(states.slots)] + over - 1, 0)
        room = (shapes.capacity - shapes.peaks)[:, None]
        soonest = earliest(states.now.astype(np.int32), over, sizes, room, shapes.slots - 1)
        return np.where((states.waiting >> np.arange(len(room))[:, None]) & 1, soonest, 0)

    def _steps_from(self, soonest: AnyIntArray) -> AnyIntArray:
        """Return the steps that those that begin no sooner than each request take from then on, at least."""
        later = np.sort((soonest << 4) + np.arange(len(soonest), dtype=np.int32)[:, None], axis=0)[::-1]
        sets = np.bitwise_or.accumulate(np.where(later < 16, 0, 1 << (later & 15)), axis=0)
        decode_steps: AnyIntArray = ((later >> 4) + self.sets.least[sets]).max(axis=0, initial=0)
        return decode_steps

    def _expected(self, states: EndStates) -> FloatArray:
        """Return by what a beam ranks states: of two with one bound, the one with less to come is better."""
        to_come = self.sets.apart[states.waiting] + self.decode_step * self._area(states)
        expected: FloatArray = states.least + WAITING * to_come
        return expected

    def _area(self, states: EndStates) -> IntArray:
        """Return the steps that fill all slots or the KV capacity with what is left, shape (states,)."""
        sets, waiting, left = self.sets, states.waiting, states.left
        first = self.shapes.first[request_of(states.slots)]
        decode_steps = -(-(total(left) + sets.decode_steps[waiting]) // self.shapes.slots)
        read = total(left * (2 * first + left - 1)) // 2 + sets.tokens_read[waiting]
        area: IntArray = np.maximum(decode_steps, -(-read // self.shapes.capacity))
        return area

    def _decode_steps(self, states: EndStates) -> IntArray:
        """Return a lower bound on the decode steps of any schedule, shape (states,)."""
        sets, waiting, left, decode_steps = self.sets, states.waiting, states.left, self._area(states)
        who = request_of(states.slots)
        new = (left > 0) & (left >= self.shapes.decode_steps[who])
        np.maximum(decode_steps, sets.least[waiting | total(np.where(new, 1 << who, 0))], out=decode_steps)
        least: IntArray = np.maximum(states.now + decode_steps, over_of(states.slots[0]))
        return least

    def _stages(self, waiting: IntArray, slots: IntArray) -> FloatArray:
        """Return a lower bound on the seconds of the stages of what is under way and waits."""
        sets, heads, group = self.sets, heads_of(slots), group_of(slots)
        under_way = self._open(slots)
        joinable = heads & ((sets.joining[group] & waiting) > 0)
        apart = under_way + sets.beside[total(joinable), waiting]
        together = sets.apart[waiting | np.bitwise_or.reduce(group, axis=0)]
        least: FloatArray = np.maximum(under_way, np.maximum(apart, together))
        return least

    def _end(self, states: EndStates, every_path: bool) -> None:
        """Make schedules of the cheapest ends, or all; note the cheapest that costs more as a schedule."""
        states = states.take(total(due_of(states.slots)) == 0)
        seconds = states.spent + self._open(states.slots) + self.decode_step * over_of(states.slots[0])
        for number, row in enumerate(np.argsort(seconds)):
            if seconds[row] >= self.to_beat:
                break
            if every_path:
                self.tick(1)
                self._try(states, int(row), np.inf)
                continue
            if number < TRIED:
                self._try(states, int(row), float(seconds[row]))
            self.relaxed = min(self.relaxed, float(seconds[row]))

    def _try(self, states: EndStates, row: int, goal: float) -> None:
        """Take over the schedule of an end's order and groups, or a better order's, if it is the best."""
        order, groups = self._path(states, row)
        most = int(self.seconds / self.decode_step) + 1
        if goal == np.inf:
            # Only what is better counts, and its stages take some of the time.
            decode_steps = (self.seconds - float(self.sets.apart[-1])) / self.decode_step
            most = int(decode_steps) + 1 - int(self.shapes.decode_steps.min())
        over = self.orders.over(order, groups, most)
        if self.orders.seconds_until(over, groups) > goal * (1 + PRECISION):
            self.tick(0)
            order = self.orders.better(order, groups, most, goal * (1 + PRECISION))
            over = self.orders.over(order, groups, most)
        if over is None or self.orders.seconds_until(over, groups) >= self.to_beat:
            return
        schedule = self._schedule(started_at(over, groups))
        seconds = schedule.makespan(self.problem) - self.constant
        if seconds < self.to_beat:
            self.best, self.seconds = schedule, seconds

    def _path(self, states: EndStates, row: int) -> tuple[Order, Groups]:
        """Return the order and the groups that lead to a state in which nothing waits."""
        begun: list[tuple[int, int]] = []
        for layer in range(len(self.order), 0, -1):
            states = states if layer == len(self.order) else self.kept[layer]
            begun.append((int(states.request[row]), int(states.joined[row])))
            row = int(states.parent[row])
        groups: Groups = {}
        for request, joined in reversed(begun):
            # The first of a group has the lowest number.
            groups[request] = (joined & -joined).bit_length() - 1 if joined else request
        return list(groups), groups

    def _schedule(self, started: dict[int, int]) -> Schedule:
        """Return the schedule of stages, each with the requests that it starts, by decode steps back."""
        bin_of, bursts = np.empty(len(self.order), dtype=np.int64), list[int]()
        for at, before in itertools.pairwise([*sorted(started, reverse=True), 0]):
            for stage in self.sets.split(started[at]):
                members = [request for request in range(len(self.order)) if stage >> request & 1]
                bin_of[self.order[members]] = len(bursts)
                bursts.append(0)
            bursts[-1] = at - before
        return Schedule.from_bins(self.problem, bin_of, bursts)


class _Block:
    """States that are followed together, and what is known of each of their slots, shape (slots, states)."""

    def __init__(self, states: EndStates, begin: int, shapes: Shapes, sets: RequestSets) -> None:
        self.begin, self.rows = begin, slice(begin, begin + AT_ONCE)
        self._sets, part = sets, states.take(self.rows)
        self.waiting, self.slots = part.waiting.astype(np.int32), part.slots
        self.now = part.now.astype(np.int32)
        self.spent, self.stages = part.spent, part.stages
        self.over = over_of(part.slots).astype(np.int32)
        self.group = group_of(part.slots).astype(np.int32)
        self.first = np.where(part.slots > 0, shapes.first[request_of(part.slots)], np.int32(0))
        # What each would hold in step 0, counted back, if it held a token more in each decode step before.
        self.sizes = np.where(part.slots > 0, self.first + self.over - 1, 0)
        self.joining = np.where(heads_of(part.slots), sets.joining[self.group], 0)
        self._due = due_of(part.slots)
        self.some_due = total(self._due) > 0
        self.soonest = part.soonest
        heads = heads_of(part.slots)
        self._open = part.spent + total(np.where(heads, sets.stages[self.group], 0.0))
        self._joinable = total(heads & ((self.joining & self.waiting) > 0))

    def least_stages(self, row: IntArray, request: IntArray, slot: IntArray) -> FloatArray:
        """Return the least seconds of all stages once requests begin, alone or in the group of a slot."""
        sets, bit = self._sets, 1 << request
        rest, alone = self.waiting[row] & ~bit, slot < 0
        group = np.where(alone, 0, self.group[slot, row])
        joinable = self._joinable[row] + (alone & ((sets.joining[bit] & rest) > 0))
        np.minimum(joinable, len(self.slots), out=joinable)
        more = sets.stages[group | bit] - sets.stages[group] + sets.beside[joinable, rest]
        least: FloatArray = np.maximum(self.stages[row], self._open[row] + more)
        return least

    def joined(self, begins: _Begins, joins: IntArray) -> BoolArray:
        """Return which slots serve the groups that requests join, shape (slots, joins)."""
        row, slot = begins.row[joins], begins.slot[joins]
        joined: BoolArray = self.group[:, row] == self.group[slot, row]
        return joined

    def due(self, begins: _Begins) -> tuple[IntArray, BoolArray, IntArray]:
        """
        Return where groups are due when requests begin, and for how many steps at least they go on then.

        Returns some: The begins that have such a group, shape (some,).
        Returns due, still: Whether each slot serves one, and those decode steps, else 0, shape (slots, some).
        """
        some = np.flatnonzero(self.some_due[begins.row] | (begins.kept > 0))
        row, slot, kept = begins.row[some], begins.slot[some], begins.kept[some]
        group, due = self.group[:, row], self._due[:, row]
        for at in range(len(group)):
            due |= (group == group[at]) & (group > 0) & (kept >> at & 1 > 0)
        due &= (slot < 0) | (group != group[slot, np.arange(len(some))])
        others = self._sets.joining[group] & self.waiting[row] & ~(1 << begins.request[some])
        return some, due, np.where(due, self._sets.fewest[others], 0)

    def kept_instead(self, begins: _Begins) -> _Begins:
        """Return the same begins where one more group that is over by then is due instead."""
        row, others = begins.row, self.waiting[begins.row] & ~(1 << begins.request)
        over = (self.over[:, row] <= begins.begin) & ~self._due[:, row]
        over &= (self.joining[:, row] & others) > 0
        over &= (begins.kept >> np.arange(len(over))[:, None] & 1) == 0
        joins = np.flatnonzero(begins.slot >= 0)
        over[begins.slot[joins], joins] = False
        slot, place = np.nonzero(over)
        again = replace(begins.take(place), kept=begins.kept[place] | 1 << slot)
        # The same groups are kept in whatever order.
        _, once = np.unique(place << len(over) | again.kept, return_index=True)
        return again.take(once)
