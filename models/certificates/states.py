"""Independent check of optimality by trying every schedule."""

from __future__ import annotations

import functools
import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from ...data.problem import Problem
from .claims import RefutedError, Work
from .reads import tokens_read

STEPS = 30
"""Steps of a check per trial."""

Waiting = tuple[int, ...]
"""Requests of each kind that wait."""
UnderWay = tuple[tuple[int, int], ...]
"""Steps left and tokens held of each running request, ascending."""


def check_no_cheaper(problem: Problem, seconds: float, work: Work) -> None:
    """Refute some seconds if a schedule takes less.

    A state precedes a prefill stage: the waiting requests, steps left and tokens held of the running ones,
    and the seconds spent. From each state the search tries every stage that fits, then every number of steps
    until the next stage. Once the KV capacity no longer matters, a stage only follows the end of a request,
    since it could be earlier otherwise. Two stages with no step between them are one, unless a token cap, a
    bend or a request without steps forbids it. If only slots are scarce and every stage costs the same,
    requests differ by their steps alone. No slot then stays free while a request waits. The search drops
    states in which no waiting request has room. It also drops states that cannot become cheaper, by slots,
    KV tokens, the longest request and the cost of stages.
    """
    tries = _Tries(problem, seconds, work)
    layers: dict[int, dict[tuple[Waiting, UnderWay], float]] = {len(problem): {(tries.everyone, ()): 0.0}}
    for number in range(len(problem), 0, -1):
        for (waiting, under_way), spent in layers.pop(number, {}).items():
            for rest, busy, so_far in tries.stages(waiting, under_way, spent):
                if not any(rest):
                    raise RefutedError("states", "a schedule takes less")
                layer = layers.setdefault(sum(rest), {})
                for after, total in tries.waits(rest, busy, so_far):
                    if total < layer.get((rest, after), math.inf):
                        layer[rest, after] = total


class _Kind(NamedTuple):
    """Equal requests.

    decode_steps, prompt: Decode steps and prompt tokens of each; no tokens where only the number of stages
    matters.
    held, read, peak: Tokens that each holds in its first step, reads in all its steps, and holds at most; 0
    where the capacity never matters.
    """

    decode_steps: int
    prompt: int
    held: int = 0
    read: int = 0
    peak: int = 0


class _Tries:
    """States that could lead to fewer seconds."""

    def __init__(self, problem: Problem, seconds: float, work: Work) -> None:
        cost, self.work = problem.cost, work
        self.cost, self.slots = cost, problem.slots
        self.capacity, self.cap = problem.kv_capacity or math.inf, problem.prefill_token_cap or math.inf
        first = int(problem.prefill_emits_first_token)
        requests = [
            _Kind(n, p, p + first, tokens_read(n, p + first), max(p, p + first + n - 1))
            for n, p in zip(problem.decode_steps.tolist(), problem.prompt_tokens.tolist(), strict=True)
        ]
        # Slot-steps and tokens read cost the same whatever the schedule, so only the rest is counted.
        decode_steps, tokens, _, read, _ = map(sum, zip(*requests, strict=True))
        self.limit = seconds - cost.decode_per_slot * decode_steps - cost.decode_per_kv_token * read
        self.scarce = sum(sorted(request.peak for request in requests)[-self.slots :]) > self.capacity
        bends = cost.prefill_per_token_beyond > 0 and min(self.cap, tokens) > cost.prefill_bend
        no_steps = any(request.decode_steps == 0 for request in requests)
        self.at_once = self.cap < math.inf or bends or no_steps
        alike = not (self.scarce or self.cap < math.inf or bends or cost.prefill_floor > 0)
        self.fills = alike and not no_steps
        if alike:
            # All stages together have the tokens of all prompts.
            self.limit -= cost.prefill_per_token * tokens
        if not self.scarce:
            requests = [_Kind(request.decode_steps, 0 if alike else request.prompt) for request in requests]
        self.grows = int(self.scarce)
        kinds = Counter(requests)
        self.kinds = sorted(kinds)
        self.everyone: Waiting = tuple(kinds[kind] for kind in self.kinds)
        self.facts = functools.cache(self._facts)
        self.least_room = functools.cache(self._least_room)

    def waits(self, waiting: Waiting, busy: UnderWay, spent: float) -> Iterator[tuple[UnderWay, float]]:
        """Yield running requests and seconds after numbers of steps."""
        if self.at_once:
            yield busy, spent
        tried: Sequence[int] = sorted({steps for steps, _ in busy})
        if busy and self._may_be_full(waiting, busy):
            tried = range(tried[0] if len(busy) == self.slots else 1, tried[-1] + 1)
        for decode_steps in tried:
            after = tuple(
                (steps - decode_steps, tokens + self.grows * decode_steps)
                for steps, tokens in busy
                if steps > decode_steps
            )
            total = spent + self.cost.decode_base * decode_steps
            self.work.spend(STEPS)
            if self.hopeless(waiting, after, total):
                return
            if len(after) < self.slots and self._has_room(waiting, after):
                yield after, total

    def _may_be_full(self, waiting: Waiting, busy: UnderWay) -> bool:
        """Return whether all requests could exceed the capacity."""
        if not self.scarce:
            return False
        peaks = [tokens + steps - 1 for steps, tokens in busy]
        for count, kind in zip(waiting, self.kinds, strict=True):
            peaks += [kind.peak] * count
        return sum(heapq.nlargest(self.slots, peaks)) > self.capacity

    def _has_room(self, waiting: Waiting, busy: UnderWay) -> bool:
        decode_steps, held = self.least_room(waiting)
        return decode_steps == 0 or self._holds(tuple(sorted((*busy, (decode_steps, held)))))

    def _least_room(self, waiting: Waiting) -> tuple[int, int]:
        """Return the fewest steps and tokens of a waiting request."""
        wait = [kind for count, kind in zip(waiting, self.kinds, strict=True) if count]
        return min(kind.decode_steps for kind in wait), min(kind.held for kind in wait)

    def hopeless(self, waiting: Waiting, busy: UnderWay, spent: float) -> bool:
        """Return whether no schedule from here is cheaper."""
        work, read, longest, prefill = self.facts(waiting)
        decode_steps = -(-(work + sum(steps for steps, _ in busy)) // self.slots)
        if busy:
            decode_steps = max(
                decode_steps, busy[-1][0], longest + (busy[0][0] if len(busy) == self.slots else 0)
            )
        else:
            decode_steps = max(decode_steps, longest)
        held = read + sum(tokens_read(steps, held) for steps, held in busy)
        decode_steps = max(decode_steps, math.ceil(held / self.capacity))
        bound: float = spent + prefill + self.cost.decode_base * decode_steps
        hopeless: bool = bound >= self.limit
        return hopeless

    def _facts(self, waiting: Waiting) -> tuple[int, int, int, float]:
        """Return steps, tokens read, longest request and least stage seconds."""
        wait = [(count, kind) for count, kind in zip(waiting, self.kinds, strict=True) if count]
        number, tokens = sum(waiting), sum(count * kind.prompt for count, kind in wait)
        cost, bend = self.cost, self.cost.prefill_bend
        beyond = sum(count * max(0.0, kind.prompt - bend) for count, kind in wait)
        within = sum(count * min(kind.prompt, bend) for count, kind in wait)
        fewest = max(-(-number // self.slots), math.ceil(tokens / min(self.cap, self.capacity)))
        smallest = math.inf
        for stages in range(fewest, max(number, fewest) + 1):
            seconds = cost.prefill_base * stages + cost.prefill_per_token * tokens
            seconds += cost.prefill_per_token_beyond * (beyond + max(0.0, within - stages * bend))
            smallest = min(smallest, max(seconds, cost.prefill_floor * stages))
        work = sum(count * kind.decode_steps for count, kind in wait)
        read = sum(count * kind.read for count, kind in wait)
        return work, read, max((kind.decode_steps for _, kind in wait), default=0), smallest

    def stages(
        self, waiting: Waiting, busy: UnderWay, spent: float
    ) -> Iterator[tuple[Waiting, UnderWay, float]]:
        """Yield waiting, running and seconds after each possible stage."""
        room = min(self.cap, self.capacity - sum(kv_tokens for _, kv_tokens in busy))
        kinds = [kind for kind, count in enumerate(waiting) for _ in range(count)]
        largest = min(len(kinds), self.slots - len(busy))
        for size in range(largest if self.fills else 1, largest + 1):
            for chosen in dict.fromkeys(combinations(kinds, size)):
                self.work.spend(STEPS)
                tokens = sum(self.kinds[kind].prompt for kind in chosen)
                if tokens > room:
                    continue
                rest = list(waiting)
                for kind in chosen:
                    rest[kind] -= 1
                new = [self.kinds[kind] for kind in chosen]
                after = tuple(
                    sorted([*busy, *((kind.decode_steps, kind.held) for kind in new if kind.decode_steps)])
                )
                total = spent + self.cost.prefill_seconds(tokens)
                if not self.hopeless(tuple(rest), after, total) and self._holds(after):
                    yield tuple(rest), after, total

    def _holds(self, busy: UnderWay) -> bool:
        """Return whether running requests fit until they end."""
        return not self.scarce or all(
            sum(tokens + last - 1 for steps, tokens in busy if steps >= last) <= self.capacity
            for last, _ in busy
        )
