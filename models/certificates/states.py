"""An independent check that no schedule of a small problem is cheaper, by following all that could be."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import numpy as np

from ...data.problem import Problem
from .claims import RefutedError, Work
from .reads import tokens_read

STEPS = 30
"""Steps of a check that trying a stage or a number of rounds takes."""

Waiting = tuple[int, ...]
"""Requests of each kind that wait."""
UnderWay = tuple[tuple[int, int], ...]
"""Rounds left and tokens held of each request under way, ascending."""


def check_no_cheaper(problem: Problem, seconds: float, work: Work) -> None:
    """
    Refute a number of seconds if some schedule takes less.

    From each state right before a prefill stage (which requests wait, what those under way have left and
    hold, seconds spent) every stage that fits is tried, and after it every number of rounds until the next
    one; where the KV capacity never matters only those at which a request ends, as a stage after no end could
    be earlier. Two stages with no round between them are one, unless a token cap, a bend or a request of no
    rounds stands against it. States from which slots, KV tokens, the longest request and the cost of stages
    leave no way to be cheaper are left out.

    Parameters
    ----------
    problem
        The problem, everything there at the start.
    seconds
        What no schedule is below.
    work
        What is left of the steps of the check.

    Raises
    ------
    RefutedError
        If a schedule is cheaper, or there is more to try than there are steps.
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


class _Tries:
    """Everything that could lead to less than so many seconds."""

    def __init__(self, problem: Problem, seconds: float, work: Work) -> None:
        cost, self.work = problem.cost, work
        self.cost, self.slots = cost, problem.slots
        self.capacity, self.cap = problem.kv_capacity or math.inf, problem.prefill_token_cap or math.inf
        first = int(problem.prefill_emits_first_token)
        kinds = Counter((n, p) for n, p in np.stack([problem.rounds, problem.prompt_tokens]).T.tolist())
        self.kinds = [(n, p, p + first, tokens_read(n, p + first)) for n, p in sorted(kinds)]
        self.everyone: Waiting = tuple(kinds[n, p] for n, p, _, _ in self.kinds)
        self.facts = functools.cache(self._facts)
        rounds, read, _, _ = self.facts(self.everyone)
        # Slot-rounds and tokens read cost the same whatever the schedule, so only the rest is counted.
        self.limit = seconds - cost.decode_per_slot * rounds - cost.decode_per_kv_token * read
        peaks = sorted(max(p, held + n - 1) for n, p, held, _ in self.kinds for _ in range(kinds[n, p]))
        self.scarce = sum(peaks[-self.slots :]) > self.capacity
        bends = cost.prefill_per_token_beyond > 0
        self.at_once = self.cap < math.inf or bends or any(n == 0 for n, _, _, _ in self.kinds)

    def waits(self, waiting: Waiting, busy: UnderWay, spent: float) -> Iterator[tuple[UnderWay, float]]:
        """Yield those under way and the seconds spent after each number of rounds worth trying."""
        if self.at_once:
            yield busy, spent
        longest = busy[-1][0] if busy else 0
        for rounds in range(1, longest + 1) if self.scarce else sorted({left for left, _ in busy}):
            after = tuple((left - rounds, held + rounds) for left, held in busy if left > rounds)
            total = spent + self.cost.decode_base * rounds
            self.work.spend(STEPS)
            if self.hopeless(waiting, after, total):
                return
            if len(after) < self.slots:
                yield after, total

    def hopeless(self, waiting: Waiting, busy: UnderWay, spent: float) -> bool:
        """Return whether nothing that goes on from here is cheaper."""
        work, read, longest, prefill = self.facts(waiting)
        rounds = -(-(work + sum(left for left, _ in busy)) // self.slots)
        if busy:
            rounds = max(rounds, busy[-1][0], longest + (busy[0][0] if len(busy) == self.slots else 0))
        else:
            rounds = max(rounds, longest)
        held = read + sum(tokens_read(left, held) for left, held in busy)
        rounds = max(rounds, math.ceil(held / self.capacity))
        least: float = spent + prefill + self.cost.decode_base * rounds
        hopeless: bool = least >= self.limit
        return hopeless

    def _facts(self, waiting: Waiting) -> tuple[int, int, int, float]:
        """Return the rounds, the tokens read, the longest request and the least seconds of stages."""
        wait = [(count, *kind) for count, kind in zip(waiting, self.kinds, strict=True) if count]
        number, tokens = sum(waiting), sum(count * p for count, _, p, _, _ in wait)
        cost, bend = self.cost, self.cost.prefill_bend
        beyond = sum(count * max(0.0, p - bend) for count, _, p, _, _ in wait)
        within = sum(count * min(p, bend) for count, _, p, _, _ in wait)
        fewest = max(-(-number // self.slots), math.ceil(tokens / min(self.cap, self.capacity)))
        least = math.inf
        for stages in range(fewest, max(number, fewest) + 1):
            seconds = cost.prefill_base * stages + cost.prefill_per_token * tokens
            seconds += cost.prefill_per_token_beyond * (beyond + max(0.0, within - stages * bend))
            least = min(least, max(seconds, cost.prefill_floor * stages))
        work = sum(count * n for count, n, _, _, _ in wait)
        read = sum(count * each for count, _, _, _, each in wait)
        return work, read, max((n for _, n, _, _, _ in wait), default=0), least

    def stages(
        self, waiting: Waiting, busy: UnderWay, spent: float
    ) -> Iterator[tuple[Waiting, UnderWay, float]]:
        """Yield what waits, those under way and the seconds spent after each stage that fits and may pay."""
        room = min(self.cap, self.capacity - sum(held for _, held in busy))
        kinds = [kind for kind, count in enumerate(waiting) for _ in range(count)]
        for size in range(1, min(len(kinds), self.slots - len(busy)) + 1):
            for chosen in dict.fromkeys(combinations(kinds, size)):
                self.work.spend(STEPS)
                tokens = sum(self.kinds[kind][1] for kind in chosen)
                if tokens > room:
                    continue
                rest = list(waiting)
                for kind in chosen:
                    rest[kind] -= 1
                new = [self.kinds[kind] for kind in chosen]
                after = tuple(sorted([*busy, *((n, held) for n, _, held, _ in new if n)]))
                total = spent + self.cost.prefill_seconds(tokens)
                if not self.hopeless(tuple(rest), after, total) and self._holds(after):
                    yield tuple(rest), after, total

    def _holds(self, busy: UnderWay) -> bool:
        """Return whether those under way fit in the capacity until they end: in the last round of each."""
        return not self.scarce or all(
            sum(held + last - 1 for left, held in busy if left >= last) <= self.capacity for last, _ in busy
        )
