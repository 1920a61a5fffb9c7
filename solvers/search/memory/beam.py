"""
Schedules of few requests or slots by beam search, requests put in the order of their ends.

Back from the end each next request is put where it first fits beside those that run there, or further back
to share the prefill stage of one of them. Of all that could be next in the schedules kept so far, those
are kept that have left least memory and slots idle for what they still have to put (beam search guided by
waste, as for packing: Libralesso et al. 2022). Schedules are kept side by side as rows of arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ....data.arrays import FloatArray, IntArray
from ....data.problem import Problem
from ....data.schedule import Schedule
from ....data.workload import numbered_rows
from ....models.bounds.least_counts import least_counts
from ..backward import schedule_backwards, slots_are_scarcer

PLACES, NARROWEST, WIDEST = 1_000_000, 4, 300
"""Places looked at for one schedule, and the fewest and most schedules kept side by side for it."""

MOST_PLACES = 2_000_000
"""Places up to which it is worth while: with more, too few schedules are made in a second."""

FIRST = ((0.3, 0.04), (0.6, 0.05), (0.8, 0.1), (1.0, 0.05), (0.6, 0.15), (1.0, 0.1), (1.0, 0.15))
"""What memory is worth and the loss expected in the first guides, in reverse where memory is scarcer."""

POWER = 0.3
"""The power in all of these."""

LOSSES = (0.02, 0.3)
"""The least and the most that are drawn."""

ANEW = 0.2
"""How often all of a guide is drawn, not changed from the best one."""

TWICE = 3
"""How many times more children than are kept are looked at: some are the same schedule."""

FAR = 1 << 40
"""A decode step that nothing reaches."""

NAMES = 1 << 62
"""Numbers of which each request draws one: schedules of the same requests have the same sum."""


def beam_pays(problem: Problem) -> bool:
    """Return whether requests and slots are so few that a schedule takes a fraction of a second."""
    count = int((problem.decode_steps > 0).sum())
    return 0 < NARROWEST * count * count * (1 + min(least_counts(problem).slots, count)) <= MOST_PLACES


@dataclass(frozen=True, slots=True, eq=False)
class _Guide:
    """
    What says which schedules are kept.

    memory: What a decode step of all memory is worth; a decode step of all slots is worth the rest to 1.
    loss: What requests that are yet to be put are expected to leave idle, as a share of what they hold.
    power: How much more of it a large one leaves, as a power of what it holds.
    noise: Added to its logarithm, shape (requests,).
    """

    memory: float
    loss: float
    power: float
    noise: FloatArray

    @classmethod
    def drawn(cls, rng: np.random.Generator, count: int) -> _Guide:
        """Return any guide."""
        loss = float(np.exp(rng.uniform(*np.log(LOSSES))))
        noise = rng.choice([0.0, 0.1, 0.3]) * rng.normal(size=count)
        return cls(min(1.0, rng.uniform(0.2, 1.3)), loss, rng.uniform(0.0, 1.2), noise)

    def changed(self, rng: np.random.Generator) -> _Guide:
        """Return the guide a little changed."""
        kind, changed = rng.random(), self
        if kind < 0.6:
            memory = float(np.clip(self.memory + 0.1 * rng.normal(), 0.2, 1.0))
            loss = self.loss * float(np.exp(0.3 * rng.normal()))
            changed = _Guide(memory, loss, self.power + 0.2 * rng.normal(), self.noise)
        if kind > 0.3:
            count = len(self.noise)
            touched = rng.random(count) < rng.choice([2 / count, 0.1, 0.3, 1.0])
            by = rng.choice([0.1, 0.3]) * rng.normal(size=count)
            changed = replace(changed, noise=np.where(touched, self.noise + by, self.noise))
        return changed


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """
    Schedules of so many requests each, in decode steps counted back from the end.

    now: The decode step at which the last one put ends, shape (nodes,).
    begin: The decode steps before which those that run there begin, rising, :data:`FAR` for free slots, shape
        (nodes, slots).
    offset: What each of them would hold at round 0, shape (nodes, slots).
    prompt: The tokens of their prompts, shape (nodes, slots).
    left: Requests to be put, the longest last, shape (nodes, left).
    idle: Decode steps of memory and slots left idle up to now, with those that prefill stages are worth.
    ahead: What the requests to be put are expected to leave idle, in times of the loss.
    name: The same for the same requests.
    far: The decode step before which the first of all begins.
    """

    now: IntArray
    begin: IntArray
    offset: IntArray
    prompt: IntArray
    left: IntArray
    idle: FloatArray
    ahead: FloatArray
    name: IntArray
    far: IntArray


class _Beside:
    """
    What runs beside the next request of each node, in the spans from one's beginning to the next one's.

    nodes: The nodes.
    capacity, slots: Tokens and requests that there is room for.
    memory: What a decode step of all memory is worth.
    """

    def __init__(self, nodes: _Nodes, capacity: int, slots: int, memory: float) -> None:
        self._nodes, self._capacity, self._slots, self._memory = nodes, capacity, slots, memory
        rows = len(nodes.now)
        ends = np.append(nodes.begin, np.full((rows, 1), FAR), axis=1)
        self._from = np.append(nodes.now[:, None], nodes.begin, axis=1)
        running = np.count_nonzero(nodes.begin < FAR, axis=1)
        self._active = np.maximum(running[:, None] - np.arange(ends.shape[1]), 0)
        self._offset = np.zeros_like(ends)
        self._offset[:, :-1] = np.cumsum(nodes.offset[:, ::-1], axis=1)[:, ::-1]
        self._last = np.where((self._active < slots) & (self._from < FAR), ends, -1)
        spans = np.arange(ends.shape[1] - 1)
        whole = self._left_idle(np.arange(rows)[:, None], spans, np.where(nodes.begin < FAR, nodes.begin, 0))
        whole[nodes.begin >= FAR] = 0.0
        self._before = np.zeros(ends.shape)
        self._before[:, 1:] = np.cumsum(whole, axis=1)

    def first_fit(self, peak: IntArray) -> IntArray:
        """Return the first step from which requests of these peaks fit, each alone, shape of ``peak``."""
        # What is held only shrinks: there is room for good once the others have shrunk by what is lacking.
        lacking = self._offset[:, None, :] + (peak - self._capacity)[:, :, None]
        fits = np.maximum(self._from[:, None, :], -(-lacking // np.maximum(self._active, 1)[:, None, :]))
        first: IntArray = np.where(fits < self._last[:, None, :], fits, FAR).min(axis=2)
        return first

    def idle(self, until: IntArray) -> FloatArray:
        """Return the decode steps left idle up to some decode steps, from now on, shape of ``until``."""
        span = np.count_nonzero(self._nodes.begin[:, None, :] <= until[:, :, None], axis=2)
        row = np.arange(len(span))[:, None]
        idle: FloatArray = self._before[row, span] + self._left_idle(row, span, until)
        return idle

    def _left_idle(self, row: IntArray, span: IntArray, until: IntArray) -> FloatArray:
        """Return the decode steps left idle from the beginning of some spans up to some decode steps."""
        since, active = self._from[row, span], self._active[row, span]
        decode_steps = until - since
        held = self._offset[row, span] - active * (since + (decode_steps - 1) / 2)
        slots = (1.0 - self._memory) * active / self._slots
        idle: FloatArray = decode_steps * (1.0 - slots - self._memory * held / self._capacity)
        return idle


class BeamSearch:
    """
    Beam searches one after another, each with a guide near the best so far.

    problem: The problem scheduled, whose decode steps cost something, some request taking one.
    rng: Draws the guides.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        # Enough for all of them never binds.
        capacity = problem.kv_capacity or int(problem.kv_peak.sum()) + len(problem)
        self._problem, self._rng, self._capacity = problem, rng, capacity
        running = np.flatnonzero(problem.decode_steps > 0)
        self._running = running[np.argsort(problem.decode_steps[running], kind="stable")]
        self._decode_steps, self._peak = problem.decode_steps[self._running], problem.kv_peak[self._running]
        self._prompt = problem.prompt_tokens[self._running]
        count = len(running)
        self._slots = min(least_counts(problem).slots, count)
        places = count * count * (self._slots + 1)
        self._width = int(np.clip(PLACES // places, NARROWEST, WIDEST))
        cost = problem.cost
        self._stage = max(cost.prefill_base, cost.prefill_floor) / cost.decode_base
        alike = numbered_rows(self._decode_steps, self._peak, self._prompt)
        self._name = np.random.default_rng(0).integers(NAMES, size=count)[alike.ravel()]
        scarcer = problem.kv_capacity is None or slots_are_scarcer(problem)
        first = FIRST if scarcer else FIRST[::-1]
        self._first = [_Guide(memory, loss, POWER, np.zeros(count)) for memory, loss in first]
        self._best, self._least = self._first[0], np.inf
        self._nodes: _Nodes | None = None
        self._begin()

    def step(self, _: float = 0.0) -> Schedule | None:
        """Put a request in each node, and return a schedule once it is whole if it is the best met so far."""
        if self._nodes is None:
            self._begin()
        assert self._nodes is not None
        self._nodes = self._next(self._nodes)
        if self._nodes is None or self._nodes.left.shape[1]:
            return None
        first, self._nodes = int(self._nodes.far.argmin()), None
        begins = self._begins(first)
        cost = float(begins.max()) + self._stage * len(np.unique(begins))
        if cost > self._least:
            return None
        self._best = self._guide
        if cost == self._least:
            return None
        self._least = cost
        return schedule_backwards(self._problem, self._running, begins)

    def _begin(self) -> None:
        """Begin a search: a guide, and one node where nothing is put yet."""
        rng, count = self._rng, len(self._decode_steps)
        if self._first:
            self._guide = self._first.pop(0)
        elif rng.random() < ANEW:
            self._guide = _Guide.drawn(rng, count)
        else:
            self._guide = self._best.changed(rng)
        if self._problem.kv_capacity is None:
            self._guide = replace(self._guide, memory=0.0)
        memory = self._guide.memory
        tokens = (self._peak - (self._decode_steps - 1) / 2) / self._capacity
        filled = self._decode_steps * (memory * tokens + (1.0 - memory) / self._slots)
        expected = filled * (filled / filled.mean()) ** self._guide.power * np.exp(self._guide.noise)
        self._filled = float(filled.sum())
        self._expected = expected * (self._filled / expected.sum())
        self._trace = list[tuple[IntArray, IntArray, IntArray]]()
        nothing, slots = np.zeros(1, dtype=np.int64), np.zeros((1, self._slots), dtype=np.int64)
        ahead = np.array([self._filled])
        left = np.arange(count)[None]
        self._nodes = _Nodes(nothing, slots + FAR, slots, slots, left, np.zeros(1), ahead, nothing, nothing)

    def _next(self, nodes: _Nodes) -> _Nodes | None:
        """Return the nodes kept of those with a request more, or None if none can become better."""
        at, idle = self._children(nodes)
        left, decode_steps = nodes.left, self._decode_steps[nodes.left]
        count = left.shape[1]
        far = np.maximum(nodes.far[:, None], at + decode_steps)
        longest = np.repeat(decode_steps[:, -1:], count, axis=1)
        longest[:, -1] = decode_steps[:, -2] if count > 1 else 0
        ahead = nodes.ahead[:, None] - self._expected[left]
        name = nodes.name[:, None] + self._name[left]
        # No schedule of them has fewer decode steps, nor one that wastes nothing more.
        fewest = np.maximum(self._filled + idle, np.maximum(far, at + longest))
        rank = np.maximum(fewest, self._filled + idle + self._guide.loss * ahead) if count > 1 else far + 0.0
        rank[(fewest >= self._least) | (at >= FAR)] = np.inf
        kept = self._kept(rank.ravel(), (name * 3 + at * 5 + far * 7).ravel())
        if not len(kept):
            return None
        row, column = np.divmod(kept, count)
        request, now = left[row, column], at.ravel()[kept]
        self._trace.append((row, request, now))
        gone = nodes.begin[row] <= now[:, None]
        begin = np.where(gone, FAR, nodes.begin[row])
        offset = np.where(gone, 0, nodes.offset[row])
        prompt = np.where(gone, 0, nodes.prompt[row])
        here = np.arange(len(kept))
        free = begin.argmax(axis=1)
        begin[here, free] = now + self._decode_steps[request]
        offset[here, free] = now + self._peak[request]
        prompt[here, free] = self._prompt[request]
        order = here[:, None], np.argsort(begin, axis=1, kind="stable")
        others = left[row][np.arange(count) != column[:, None]].reshape(len(kept), count - 1)
        return _Nodes(
            now,
            begin[order],
            offset[order],
            prompt[order],
            others,
            idle.ravel()[kept],
            ahead.ravel()[kept],
            name.ravel()[kept],
            far.ravel()[kept],
        )

    def _children(self, nodes: _Nodes) -> tuple[IntArray, FloatArray]:
        """Return where each request left would end, and what is idle up to then, shapes (nodes, left)."""
        beside = _Beside(nodes, self._capacity, self._slots, self._guide.memory)
        decode_steps, prompt = self._decode_steps[nodes.left], self._prompt[nodes.left]
        at = beside.first_fit(self._peak[nodes.left])
        at, alone = self._stage_with_room(nodes, at, decode_steps, prompt)
        begin = nodes.begin[:, None, :]
        later = np.where(begin >= (at + decode_steps)[:, :, None], begin, FAR).min(axis=2)
        shared = np.where((later < FAR) & self._has_room(nodes, later, prompt), later - decode_steps, at)
        idle = beside.idle(at) + self._stage * alone
        idle_shared = beside.idle(shared) + self._stage * (alone & (shared == at))
        better = idle_shared < idle
        return np.where(better, shared, at), nodes.idle[:, None] + np.where(better, idle_shared, idle)

    def _stage_with_room(
        self, nodes: _Nodes, at: IntArray, decode_steps: IntArray, prompt: IntArray
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return the ends moved by a step where a stage is full, and whether a stage would be a new one."""
        begin = nodes.begin[:, None, :]
        if self._problem.prefill_token_cap is not None:
            at = np.where(self._has_room(nodes, at + decode_steps, prompt), at, at + 1)
            at = np.where(self._has_room(nodes, at + decode_steps, prompt), at, FAR)
        return at, (begin != (at + decode_steps)[:, :, None]).all(axis=2)

    def _has_room(self, nodes: _Nodes, stage: IntArray, prompt: IntArray) -> npt.NDArray[np.bool_]:
        """Return which stages have room for prompts under the token cap."""
        cap = self._problem.prefill_token_cap
        if cap is None:
            return np.ones(stage.shape, dtype=np.bool_)
        taken = np.where(nodes.begin[:, None, :] == stage[:, :, None], nodes.prompt[:, None, :], 0).sum(
            axis=2
        )
        room: npt.NDArray[np.bool_] = taken + prompt <= cap
        return room

    def _kept(self, rank: FloatArray, name: IntArray) -> IntArray:
        """Return the children of least rank, of the same schedules one."""
        most = TWICE * self._width
        near = np.argpartition(rank, most)[:most] if most < len(rank) else np.arange(len(rank))
        near = near[np.isfinite(rank[near])]
        near = near[np.argsort(rank[near], kind="stable")]
        first = np.unique(name[near], return_index=True)[1]
        first.sort()
        kept: IntArray = near[first[: self._width]]
        return kept

    def _begins(self, node: int) -> IntArray:
        """Return the decode steps before which the requests of a whole schedule begin, counted back."""
        begins = np.empty_like(self._decode_steps)
        for row, request, now in reversed(self._trace):
            begins[request[node]] = now[node] + self._decode_steps[request[node]]
            node = int(row[node])
        return begins
