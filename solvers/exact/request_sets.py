"""What is known of each set of few requests under scarce memory: its stages, steps, and who may join it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from .least_steps import NEVER, Shapes, least_steps
from .outcome import no_limit

PRECISION = 1e-10
"""Relative difference below which two costs are the same."""


class RequestSets:
    """
    What is known of each set of requests, a bit for each of them.

    Parameters
    ----------
    problem
        The problem.
    shapes
        Its requests, the longest first.
    prompts
        Their prompt tokens, shape (requests,).
    tick
        Called again and again with no steps; raises LimitReachedError where there is no time left.

    Attributes
    ----------
    stages
        The least seconds of prefill stages of a set all started at one time, shape (sets,).
    apart
        The least seconds of its prefill stages at whatever times, shape (sets,).
    shared
        The most seconds that two sets save in one stage.
    beside
        The least seconds that a set adds to those of so many stages under way, each of which some of it may
        join, shape (stages, sets).
    decode_steps, least, tokens_read
        Decode steps, the fewest decode steps, and tokens of keys and values read in them, shape (sets,).
    fewest
        Steps of its shortest request, :data:`~batchbound.solvers.exact.least_steps.NEVER` of none, shape
        (sets,).
    joining
        The requests that may join a set that shares a stage, a bit each, shape (sets,).
    """

    def __init__(
        self, problem: Problem, shapes: Shapes, prompts: IntArray, tick: Callable[[int], None] = no_limit
    ) -> None:
        self._cost, self._tick = problem.cost, tick
        limits = (problem.prefill_token_cap, shapes.capacity)
        self._most = min(limit for limit in limits if limit is not None)
        self._prompts, self._shapes = prompts.tolist(), shapes
        count = len(prompts)
        self.sets = np.arange(1 << count)
        member = (self.sets[:, None] >> np.arange(count)) & 1
        stages = self._stages()
        self.single = dict(stages)
        self.stages = self._split(stages)
        together = [(bits, cost) for bits, cost in stages if self._starts_together(bits)]
        self.apart = self._split(together)
        # Seconds are convex in tokens: two sets in one stage take no less than this below two stages.
        self.shared = float(self._cost.prefill_seconds(0))
        self.beside = self._beside([bits for bits, _ in together if bits.bit_count() < shapes.columns])
        self.decode_steps = member @ shapes.decode_steps
        read = shapes.decode_steps * shapes.first + shapes.decode_steps * (shapes.decode_steps - 1) // 2
        self.tokens_read = member @ read
        self.least = least_steps(shapes, tick)
        self.fewest = np.where(member, shapes.decode_steps, NEVER).min(axis=1)
        self.joining = self._joining(member)

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
        """Return whether requests that start together fit in the last decode step of each."""
        decode_steps, first = self._shapes.decode_steps.tolist(), self._shapes.first.tolist()
        chosen = [request for request in range(len(decode_steps)) if bits >> request & 1]
        return all(
            sum(first[i] + decode_steps[j] - 1 for i in chosen if decode_steps[i] >= decode_steps[j])
            <= self._shapes.capacity
            for j in chosen
        )

    def _split(self, stages: list[tuple[int, float]]) -> FloatArray:
        """Return the least seconds of stages that make up each set."""
        least = np.full(len(self.sets), np.inf)
        least[0] = 0.0
        # The lowest request of a set is in some stage, and what is left has only higher ones.
        for request in reversed(range(len(self._prompts))):
            self._tick(0)
            having = self.sets[(self.sets & ((2 << request) - 1)) == 1 << request]
            for bits, seconds in stages:
                if bits & -bits == 1 << request:
                    rows = having[(having & bits) == bits]
                    least[rows] = np.minimum(least[rows], seconds + least[rows ^ bits])
        return least

    def _beside(self, together: list[int]) -> FloatArray:
        """Return the least seconds that each set adds to stages, of which each is joined by a set or none."""
        beside = [self.apart]
        having = [(bits, np.flatnonzero((self.sets & bits) == bits)) for bits in together]
        for _ in range(self._shapes.columns):
            self._tick(0)
            least = beside[-1].copy()
            for bits, rows in having:
                joined = beside[-1][rows ^ bits] + self.stages[bits] - self.shared
                least[rows] = np.minimum(least[rows], joined)
            beside.append(least)
        return np.stack(beside)

    def _joining(self, member: IntArray) -> IntArray:
        """Return which requests, none longer than its own, may share the stage of a set, and save time."""
        shapes, size = self._shapes, member.sum(axis=1)
        single = np.full(len(self.sets), np.inf)
        single[list(self.single)] = list(self.single.values())
        # Where two stages take less than one, no optimum has that one, nor any larger.
        whole = single <= self.stages * (1 + PRECISION)
        held = member @ (shapes.first - 1)
        joining = np.zeros(len(self.sets), dtype=np.int64)
        for request in range(member.shape[1]):
            bit = 1 << request
            # The longest come first, so all before it are no shorter; of equals the order is free.
            may = (self.sets < bit) & (size > 0) & (size < shapes.columns) & whole & whole[self.sets | bit]
            may &= (
                held + size * int(shapes.decode_steps[request]) + int(shapes.peaks[request])
                <= shapes.capacity
            )
            saved = self.stages + self.stages[bit] - self.stages[self.sets | bit]
            joining |= np.where(may & (saved > PRECISION * self.stages[-1]), bit, 0)
        return joining
