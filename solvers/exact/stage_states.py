"""Small problems of every kind solved to a proven optimum: dynamic programming over what is under way."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ..result import Limits, StoppedBy
from .columns import BoolArray, Columns, all_of, first_of_equal, total
from .outcome import ExactOutcome, LimitedSearch, LimitReachedError

MOST_REQUESTS = 24
"""Requests beyond which states are too many; each is a bit of a number, too."""
MOST_CHOICES = 60_000
"""Sets of requests that a stage can start beyond which each state has too many successors."""
MOST_STATES = 3_000_000
"""States of a layer beyond which it gives up: some hundred bytes each are held."""
TABLED = 14
"""Requests up to which what is known of each set of them is worked out in advance."""
AT_ONCE = 500_000
"""Pairs of a state and a stage looked at together; bounds the memory."""
WAITS_AT_ONCE = 20_000
"""Pairs of a state and the steps until its next stage looked at together: more are looked at in vain."""
BEAMS = (300, 3_000)
"""States that a layer keeps in the first passes, which look for a schedule to beat."""
EVEN = 0.2
"""Weight, in what a beam keeps, of the decode steps that slots and KV tokens need each on their own."""
MANY = 2**40
"""More decode steps and tokens than anything has."""
PRECISION = 1e-10
"""Relative difference below which two costs are the same."""


def can_list_states(problem: Problem) -> bool:
    """Return whether a problem is small enough to try, and free of arrival times and shared prompts."""
    slots = min(problem.slots, len(problem))
    return (
        len(problem) <= MOST_REQUESTS
        and not problem.workload.arrival.any()
        and not len(problem.prefix_tokens)
        and sum(math.comb(len(problem), size) for size in range(1, slots + 1)) <= MOST_CHOICES
    )


def best_by_states(problem: Problem, limits: Limits, start: Schedule) -> ExactOutcome:
    r"""
    Return an optimal schedule, or the best one found within the limits.

    A state, right before a prefill stage, is which requests wait, the steps left and the tokens held of each
    that is under way, and the seconds spent. From each one every stage is tried that the slots, the token cap
    and the KV capacity have room for to the end of those under way, and then every number of steps until the
    next stage. Of equal states one is kept; none is whose lower bound is no better than the best schedule
    (slots, longest request and KV tokens for the decode steps left; for the stages as
    :func:`~batchbound.models.bounds.least_counts.cost_terms`). A layer has all states with equally many
    requests waiting, so each state is met once. First passes keep few states a layer, to have a good schedule
    to beat.

    What need not be tried:

    - A stage that follows no end of a request, as long as what is held can never exceed the capacity. It
      could be a decode step earlier, with the same slots free.
    - Two stages with no step between them, but under a token cap, where the cost bends, or with requests
      that take no decode step: one stage costs no more.
    - Of requests alike, a later one before an earlier one.
    - A stage that leaves a slot free while a request waits, if stages cost the same however full they are and
      nothing but slots is scarce: a request that waits could start then instead of later.

    problem: One that :func:`can_list_states` accepts.
    limits: Work is in states.
    start: A schedule to beat.
    """
    begun = time.monotonic()
    deadline = None if limits.seconds is None else begun + limits.seconds
    search = _StateSearch(problem, start, deadline, limits.work)
    stopped_by = StoppedBy.PROOF
    try:
        any(search.run(beam) for beam in (*BEAMS, None))
    except LimitReachedError as limit:
        stopped_by = limit.stopped_by
    except KeyboardInterrupt:
        stopped_by = StoppedBy.INTERRUPT
    return ExactOutcome(search.best, stopped_by, search.steps, "states")


@dataclass(frozen=True, slots=True, eq=False)
class _States(Columns):
    """
    States right before a prefill stage, as columns.

    waiting: The requests that wait, a bit each, shape (states,).
    left, held: Decode steps left of what each slot serves, and its tokens of keys and values in the next one;
        those with the most decode steps left first, 0 for a free slot. Shape (slots, states).
    spent, least: Seconds so far, with those that every schedule takes, and the least to the end, shape
        (states,).
    layer, parent, stage, decode_steps: The state it came from (layer and row), the requests of the stage in
        between and the steps after it, shape (states,).
    """

    waiting: IntArray
    left: IntArray
    held: IntArray
    spent: FloatArray
    least: FloatArray
    layer: IntArray
    parent: IntArray
    stage: IntArray
    decode_steps: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """
    All sets of some size that a stage can start.

    members: The requests, shape (size, sets).
    bits: The same, a bit each, shape (sets,).
    tokens, seconds: Prompt tokens and seconds of the stage, shape (sets,).
    """

    members: IntArray
    bits: IntArray
    tokens: IntArray
    seconds: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Facts:
    """
    What is known of sets of waiting requests.

    decode_steps, tokens_read: Their decode steps, and the tokens of keys and values read in them.
    longest, shortest, smallest: The most and the fewest decode steps of one, and the fewest prompt tokens.
    prefill: The least seconds of their prefill stages.
    peaks: The most tokens that so many of them can hold together, shape (slots + 1, sets).
    """

    decode_steps: IntArray
    tokens_read: IntArray
    longest: IntArray
    shortest: IntArray
    smallest: IntArray
    prefill: FloatArray
    peaks: IntArray


class _Sets:
    """Sets of requests, a bit each, and what is known of them."""

    def __init__(self, problem: Problem, order: IntArray) -> None:
        self.problem, self.slots = problem, min(problem.slots, len(problem))
        self.decode_steps, self.prompts = problem.decode_steps[order], problem.prompt_tokens[order]
        self.at_start, self.peaks = problem.kv_at_start[order], problem.kv_peak[order]
        self.read = self.decode_steps * self.at_start + self.decode_steps * (self.decode_steps - 1) // 2
        tabled = len(problem) <= TABLED
        self._table = self._facts(np.arange(1 << len(problem))) if tabled else None

    def facts(self, sets: IntArray) -> tuple[_Facts, IntArray]:
        """Return what is known of sets, and where each of them stands in it."""
        if self._table is not None:
            return self._table, sets
        distinct, at = np.unique(sets, return_inverse=True)
        return self._facts(distinct), at.ravel()

    def _facts(self, sets: IntArray) -> _Facts:
        member = (sets >> np.arange(len(self.decode_steps))[:, None]) & 1
        peaks = np.sort(member * self.peaks[:, None], axis=0)[: -self.slots - 1 : -1]
        return _Facts(
            self.decode_steps @ member,
            self.read @ member,
            (self.decode_steps[:, None] * member).max(axis=0),
            np.where(member, self.decode_steps[:, None], MANY).min(axis=0),
            np.where(member, self.prompts[:, None], MANY).min(axis=0),
            self._prefill(member),
            np.concatenate((np.zeros((1, len(sets)), dtype=np.int64), np.cumsum(peaks, axis=0))),
        )

    def _prefill(self, member: IntArray) -> FloatArray:
        """Return the least seconds of prefill over all numbers of stages that are enough."""
        cost, number = self.problem.cost, member.sum(axis=0)
        tokens = self.prompts @ member
        within = np.minimum(self.prompts, cost.prefill_bend) @ member
        caps = [cap for cap in (self.problem.prefill_token_cap, self.problem.kv_capacity) if cap is not None]
        fewest = -(-number // self.slots)
        if caps:
            fewest = np.maximum(fewest, -(-tokens // min(caps)))
        bends = self.problem.reaches_bend
        most = len(self.prompts) if bends else int(fewest.max(initial=0))
        least = np.full(len(number), np.inf)
        for stages in range(most + 1):
            seconds = cost.prefill_base * stages + cost.prefill_per_token * tokens
            if bends:
                together = np.maximum(0.0, within - stages * cost.prefill_bend)
                seconds = seconds + cost.prefill_per_token_beyond * (tokens - within + together)
            seconds = np.maximum(seconds, cost.prefill_floor * stages)
            enough = (stages >= fewest) & (stages <= np.maximum(number, fewest))
            least = np.where(enough, np.minimum(least, seconds), least)
        return least


class _StateSearch(LimitedSearch):
    """The best schedule so far, and the layers of states that could lead to a better one."""

    def __init__(self, problem: Problem, best: Schedule, deadline: float | None, work: int | None) -> None:
        self.problem, self.best, self.seconds = problem, best, best.makespan(problem)
        super().__init__(deadline, work)
        cost = problem.cost
        self.capacity = problem.kv_capacity
        self.order = np.lexsort((-problem.prompt_tokens, -problem.decode_steps))
        self.sets = _Sets(problem, self.order)
        self.slots = self.sets.slots
        scarce = (
            self.capacity is not None and int(np.sort(problem.kv_peak)[-self.slots :].sum()) > self.capacity
        )
        # Where what is held never matters, states that differ in nothing else are the same.
        self.scarce = scarce
        no_steps, bends = bool((problem.decode_steps == 0).any()), problem.reaches_bend
        capped = problem.prefill_token_cap is not None
        self.at_once = capped or bends or no_steps
        alike = not (scarce or capped or bends or cost.prefill_floor > 0)
        self.fills_slots = alike and not no_steps
        same = np.diff(self.sets.decode_steps) == 0
        if not alike:
            same &= np.diff(self.sets.prompts) == 0
        self.twins = int(sum(1 << at for at in np.flatnonzero(same).tolist()))
        self.constant = cost.decode_per_slot * int(problem.decode_steps.sum())
        self.constant += cost.decode_per_kv_token * problem.kv_token_steps
        self.choices = [self._choice(size) for size in range(1, self.slots + 1)]

    def _choice(self, size: int) -> _Choice:
        combinations = list(itertools.combinations(range(len(self.problem)), size))
        members = np.array(combinations, dtype=np.int64).T
        tokens = self.sets.prompts[members].sum(axis=0)
        caps = [cap for cap in (self.problem.prefill_token_cap, self.capacity) if cap is not None]
        fits = np.flatnonzero(tokens <= min(caps, default=int(tokens.max())))
        members, tokens = members[:, fits], tokens[fits]
        bits = (1 << members).sum(axis=0)
        return _Choice(members, bits, tokens, self.problem.cost.prefill_seconds(tokens))

    @property
    def to_beat(self) -> float:
        return self.seconds * (1 - PRECISION)

    def run(self, beam: int | None) -> bool:
        """Go through all layers, with a beam's states at most in each; return whether these were all."""
        every = True
        count, none = len(self.problem), np.zeros(1, dtype=np.int64)
        everyone, empty = none + (1 << count) - 1, np.zeros((self.slots, 1), dtype=np.int64)
        spent = np.array([self.constant], dtype=np.float64)
        first = _States(everyone, empty, empty, spent, spent, none - 1, none, none, none)
        layers: list[list[_States]] = [[] for _ in range(count)]
        kept: dict[int, _States] = {}
        layers.append([first])
        for waiting in range(count, 0, -1):
            if not layers[waiting]:
                continue
            self.tick(0)
            states = _States.together(layers[waiting])
            layers[waiting] = []
            self.tick(0)
            states = self._distinct(states)
            if beam is not None and len(states.waiting) > beam:
                states, every = states.take(np.argpartition(self._expected(states), beam)[:beam]), False
            if len(states.waiting) > MOST_STATES:
                raise LimitReachedError(StoppedBy.GAVE_UP)
            kept[waiting] = states
            for size in range(1, min(self.slots, waiting) + 1):
                for successors in self._after(states, waiting, size, kept):
                    layers[waiting - size].append(successors)
        return every

    def _least(self, waiting: IntArray, left: IntArray, held: IntArray) -> FloatArray:
        """Return a lower bound on the seconds still to come."""
        facts, at = self.sets.facts(waiting)
        decode_steps = -(-(total(left) + facts.decode_steps[at]) // self.slots)
        np.maximum(decode_steps, left[0], out=decode_steps)
        np.maximum(decode_steps, facts.longest[at] + left[-1], out=decode_steps)
        if self.scarce and self.capacity is not None:
            read = total(left * held + left * (left - 1) // 2) + facts.tokens_read[at]
            np.maximum(decode_steps, -(-read // self.capacity), out=decode_steps)
        least: FloatArray = facts.prefill[at] + self.problem.cost.decode_base * decode_steps
        return least

    def _expected(self, states: _States) -> FloatArray:
        """Return about how many seconds schedules from states take, to rank them."""
        facts, at = self.sets.facts(states.waiting)
        left = states.left
        decode_steps = (total(left) + facts.decode_steps[at]) / self.slots
        if self.scarce and self.capacity is not None:
            read = total(left * states.held + left * (left - 1) // 2) + facts.tokens_read[at]
            by_memory = read / self.capacity
            decode_steps = np.maximum(decode_steps, by_memory) + EVEN * (decode_steps + by_memory)
        expected: FloatArray = states.spent + facts.prefill[at] + self.problem.cost.decode_base * decode_steps
        return expected

    def _distinct(self, states: _States) -> _States:
        """Return the states that can still lead to a better schedule, of equal ones the cheapest."""
        # Of large layers each pass takes a tenth of a second.
        states = states.take(states.least < self.to_beat)
        self.tick(0)
        columns = [states.waiting, *states.left, *(states.held if self.scarce else [])]
        distinct = first_of_equal(columns, states.spent)
        self.tick(0)
        return states.take(distinct)

    def _after(self, states: _States, waiting: int, size: int, kept: dict[int, _States]) -> Iterator[_States]:
        """Yield what follows states with a stage of so many requests, right before the next stage."""
        choice = self.choices[size - 1]
        free = self.slots - np.count_nonzero(states.left, axis=0)
        open_to = np.minimum(free, waiting) == size if self.fills_slots else free >= size
        rows, block = np.flatnonzero(open_to), max(1, AT_ONCE // max(1, len(choice.bits)))
        for begin in range(0, len(rows), block):
            part = rows[begin : begin + block]
            among = (states.waiting[part][:, None] & choice.bits) == choice.bits
            row, chosen = np.nonzero(among)
            begun = self._begun(states, part[row], choice, chosen)
            self.tick(len(begun.waiting))
            if not len(begun.waiting):
                continue
            if size == waiting:
                self._end(begun, kept)
            else:
                yield from self._later(begun)

    def _begun(self, states: _States, parent: IntArray, choice: _Choice, chosen: IntArray) -> _States:
        """Return the states right after stages, as far as these fit and may lead to a better schedule."""
        waiting = states.waiting[parent] & ~choice.bits[chosen]
        spent = states.spent[parent] + choice.seconds[chosen]
        facts, at = self.sets.facts(waiting)
        fits = spent + facts.prefill[at] < self.to_beat
        fits &= (((waiting & self.twins) << 1) & ~waiting) == 0
        if self.capacity is not None:
            fits &= total(states.held)[parent] + choice.tokens[chosen] <= self.capacity
        parent, chosen, waiting, spent = parent[fits], chosen[fits], waiting[fits], spent[fits]
        members = choice.members[:, chosen]
        left = np.concatenate((states.left[:, parent], self.sets.decode_steps[members]))
        held = np.concatenate((states.held[:, parent], self.sets.at_start[members]))
        keys = np.sort(-((left << 32) + np.where(left > 0, held, 0)), axis=0)[: self.slots]
        left, held = -keys >> 32, -keys & 0xFFFFFFFF
        layer = np.full(len(parent), int(states.waiting[0]).bit_count())
        least, bits = spent + self._least(waiting, left, held), choice.bits[chosen]
        begun = _States(waiting, left, held, spent, least, layer, parent, bits, np.zeros_like(parent))
        promising = least < self.to_beat
        if self.scarce and self.capacity is not None:
            # What is held is most in the last step of a request: by those with no fewer decode steps left.
            under_way = np.arange(1, self.slots + 1)[:, None]
            last = np.cumsum(held, axis=0) + under_way * (left - 1)
            promising &= all_of((last <= self.capacity) | (left == 0))
        return begun.take(promising)

    def _later(self, begun: _States) -> Iterator[_States]:
        """Yield the states after each number of decode steps that the next stage may wait for."""
        if self.at_once:
            yield begun
        at_ends = begun
        if self.scarce and self.capacity is not None:
            binds = self._can_bind(begun)
            at_ends = begun.take(~binds)
            yield from self._at_any_time(begun.take(binds))
        for slot in range(self.slots):
            left = at_ends.left
            ends = left[slot] > 0
            if slot:
                ends &= left[slot] != left[slot - 1]
            row = np.flatnonzero(ends)
            yield self._waited(at_ends, row, left[slot, row])[1]

    def _at_any_time(self, begun: _States) -> Iterator[_States]:
        """Yield the states after each number of decode steps in which a request could start."""
        passed = 0
        while len(begun.waiting):
            self.tick(0)
            several = max(1, WAITS_AT_ONCE // len(begun.waiting))
            several = min(several, int(begun.left[0].max()) - passed)
            waits = np.arange(passed + 1, passed + several + 1)
            row, at = np.nonzero(self._may_have_room(begun, waits))
            promising, later = self._waited(begun, row, waits[at])
            yield later.take(self._has_room(later))
            passed += several
            # The longer the wait the worse, so what is out stays out.
            out = waits[at] == passed
            out[promising] = False
            still = begun.left[0] > passed
            still[row[out]] = False
            begun = begun.take(still)

    def _may_have_room(self, begun: _States, waits: IntArray) -> BoolArray:
        """Return whether a request could start after some steps, shape (states, waits); a no is certain."""
        assert self.capacity is not None
        facts, at = self.sets.facts(begun.waiting)
        left, active = begun.left, np.count_nonzero(begun.left, axis=0)
        first_end = np.where(left > 0, left, MANY).min(axis=0)
        # Until a request ends what is held grows.
        room = self.capacity - facts.smallest[at] - total(begun.held)
        until = np.where(left[-1] == 0, room // np.maximum(active, 1), 0)
        may: BoolArray = (waits >= first_end[:, None]) | (waits <= until[:, None])
        may &= waits <= left[0][:, None]
        return may

    def _can_bind(self, begun: _States) -> BoolArray:
        """Return whether those under way and waiting could hold more than the capacity."""
        facts, at = self.sets.facts(begun.waiting)
        peaks = -np.sort(-np.where(begun.left > 0, begun.held + begun.left - 1, 0), axis=0)
        of_these = np.concatenate((np.zeros((1, peaks.shape[1]), dtype=np.int64), np.cumsum(peaks, axis=0)))
        binds: BoolArray = (of_these + facts.peaks[::-1, at]).max(axis=0) > self.capacity
        return binds

    def _has_room(self, states: _States) -> BoolArray:
        """Return whether a request could start: one with the fewest prompt tokens and the fewest steps."""
        assert self.capacity is not None
        facts, at = self.sets.facts(states.waiting)
        smallest, shortest = facts.smallest[at], facts.shortest[at]
        under_way = np.arange(2, self.slots + 2)[:, None]
        last = np.cumsum(states.held, axis=0) + smallest + under_way * (states.left - 1)
        fits = all_of((last <= self.capacity) | (states.left == 0) | (states.left > shortest))
        fits &= states.left[-1] == 0
        fits &= total(states.held) + smallest <= self.capacity
        return fits

    def _waited(self, begun: _States, row: IntArray, decode_steps: IntArray) -> tuple[IntArray, _States]:
        """Return which of these rows may lead to a better schedule after so many steps, and the states."""
        left = np.maximum(0, begun.left[:, row] - decode_steps)
        held = np.where(left > 0, begun.held[:, row] + decode_steps, 0)
        spent = begun.spent[row] + self.problem.cost.decode_base * decode_steps
        least = spent + self._least(begun.waiting[row], left, held)
        promising = np.flatnonzero(least < self.to_beat)
        later = replace(
            begun.take(row[promising]),
            left=left[:, promising],
            held=held[:, promising],
            spent=spent[promising],
            least=least[promising],
        )
        return promising, replace(later, decode_steps=later.decode_steps + decode_steps[promising])

    def _end(self, begun: _States, kept: dict[int, _States]) -> None:
        """Take over the best schedule of those whose requests are all under way, if it is better."""
        seconds = begun.spent + self.problem.cost.decode_base * begun.left[0]
        best = int(seconds.argmin())
        if seconds[best] >= self.to_beat:
            return
        stages, decode_steps = [int(begun.stage[best])], [int(begun.left[0, best])]
        layer, row = int(begun.layer[best]), int(begun.parent[best])
        while kept[layer].layer[row] >= 0:
            states = kept[layer]
            stages.append(int(states.stage[row]))
            decode_steps.append(int(states.decode_steps[row]))
            layer, row = int(states.layer[row]), int(states.parent[row])
        bin_of = np.empty(len(self.problem), dtype=np.int64)
        for number, stage in enumerate(reversed(stages)):
            members = [at for at in range(len(self.problem)) if stage >> at & 1]
            bin_of[self.order[members]] = number
        self.best = Schedule.from_bins(self.problem, bin_of, decode_steps[::-1])
        self.seconds = self.best.makespan(self.problem)
