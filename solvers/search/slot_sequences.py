"""
Schedules of few or long requests: which of them follow one another in each slot, packed full.

Where a prefill stage costs little beside the decode steps of a request, slots are packed as full as they go,
whatever stages that takes, and then requests are exchanged and reordered until many start together.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from random import Random

import numpy as np

from ...data.problem import Problem
from ...data.schedule import Schedule
from ...models.bounds.packing.heuristics import machine_loads
from ...models.bounds.packing.partition import packed_full

MOST_PACKED = 10_000
"""Requests up to which slots are packed: of more, that takes a tenth of a second, and rules pack as well."""

MOST_TRIED = 5000
"""Requests, in times of those a slot serves, up to which a walk is worth it: beyond, changes are too few."""

MOST_STAGES = 0.03
"""What a stage for each request costs at most for that, as a share of the decode steps."""

TRIES = 100
"""Times that a packing of fewer decode steps is tried before it counts as not found."""

LONGER = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)
"""Decode steps tried beyond those of the packing, as shares of these."""

PHASES = 3
"""Parts of the walk: all of these numbers of steps in turn, the best and those beside it, the best one."""

HOT, COLD = 1.0, 0.08
"""Temperatures at the start and the end of each walk, in stages."""

REORDERED = 0.4
"""Share of the changes that move requests within a slot."""

CHANGES = 200
"""Changes tried in a step."""

NEVER = 2**62
"""A decode step that no job comes to."""


def packing_pays(problem: Problem) -> bool:
    """
    Return whether a prefill stage for each request costs little beside the decode steps of all.

    Requests of no decode step take a slot in their stage, which packings know nothing of.
    """
    steps = problem.cost.decode_base * float(problem.decode_steps.sum()) / problem.slots
    if not problem.decode_steps.all() or len(problem) > MOST_PACKED:
        return False
    return steps > 0 and len(problem) * _stage_seconds(problem) <= MOST_STAGES * steps


def requests_are_few(problem: Problem) -> bool:
    """Return whether enough changes can be tried for each request."""
    return len(problem) ** 2 <= MOST_TRIED * problem.slots


def _stage_seconds(problem: Problem) -> float:
    return max(problem.cost.prefill_base, problem.cost.prefill_floor)


class SlotSequences:
    """
    An annealing walk over which requests follow one another in each slot, for few stages and decode steps.

    problem: A problem for which :func:`packing_pays`. A token cap and a KV capacity are left out of account:
        the caller checks that a schedule keeps them.
    rng: Draws the changes.
    seconds: Seconds that packing the slots may take.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator, seconds: float) -> None:
        self._problem = problem
        self._random = Random(int(rng.integers(2**62)))
        self._decode_steps: list[int] = problem.decode_steps.tolist()
        slot_of = packed_full(problem.decode_steps, problem.slots, TRIES, rng, seconds)
        self._slot_of = slot_of.tolist()
        fewest = int(machine_loads(problem.decode_steps, slot_of, problem.slots).max())
        self._stage = _stage_seconds(problem) / problem.cost.decode_base
        self._limits = sorted({fewest + round(share * fewest) for share in LONGER})
        self._found: dict[int, float] = {}
        self._phase, self._turn = 0, -1
        self._chains = self._packing(fewest)
        self._least = math.inf

    def step(self, done: float) -> Schedule | None:
        """
        Try some changes, and return the schedule they lead to if it is the best one met so far.

        done: The share of the walk that is over, 0 to 1.
        """
        phase = min(int(PHASES * done), PHASES - 1)
        if phase > self._phase and self._found:
            self._phase, self._turn = phase, -1
            self._limits = self._beside_best() if phase < PHASES - 1 else [self._best]
        within = PHASES * done - phase
        turn = min(int(len(self._limits) * within), len(self._limits) - 1)
        if turn != self._turn:
            self._turn, self._chains = turn, self._packing(self._limits[turn])
        cooled = min(1.0, len(self._limits) * within - turn)
        for _ in range(CHANGES):
            self._chains.change(HOT * (COLD / HOT) ** cooled)
        limit = self._limits[turn]
        costs = limit + self._stage * self._chains.stages
        self._found[limit] = min(costs, self._found.get(limit, math.inf))
        if costs >= self._least:
            return None
        self._least = costs
        return self.schedule()

    @property
    def _best(self) -> int:
        """The decode steps at which least was found."""
        return min(self._found, key=lambda limit: self._found[limit])

    def _beside_best(self) -> list[int]:
        """Return the decode steps that came to least, and those halfway to the ones tried beside them."""
        tried, best = sorted(self._found), self._best
        at = tried.index(best)
        near = tried[max(0, at - 1) : at + 2]
        return sorted({(best + other) // 2 for other in near})

    def _packing(self, limit: int) -> _Chains:
        """Return the packed slots, the longest request first, with so many decode steps."""
        chains: list[list[int]] = [[] for _ in range(self._problem.slots)]
        for request in np.argsort(-np.array(self._decode_steps), kind="stable").tolist():
            chains[self._slot_of[request]].append(request)
        return _Chains(self._decode_steps, chains, limit, self._random)

    def schedule(self) -> Schedule:
        """Return the schedule of the chains as they are."""
        start = np.zeros(len(self._problem), dtype=np.int64)
        requests, starts = self._chains.starts()
        start[requests] = starts
        times, bin_of = np.unique(start, return_inverse=True)
        end = int((start + self._problem.decode_steps).max())
        return Schedule.from_bins(self._problem, bin_of, np.diff(np.append(times, end)))


class _Chains:
    """
    The requests of each slot one after the other, and the stages that they start at.

    decode_steps: Decode steps of each request, positive.
    chains: The requests of each slot, in order.
    limit: Decode steps within which all end.
    random: Draws the changes.
    """

    def __init__(self, decode_steps: list[int], chains: list[list[int]], limit: int, random: Random) -> None:
        self._decode_steps, self._limit, self._random = decode_steps, limit, random
        self._chains = chains
        self._load = [sum(decode_steps[request] for request in chain) for chain in chains]
        self._times = [0]
        # The first stage is there whatever happens.
        self._used = {0: 1}
        self._starts: list[list[int]] = [[] for _ in chains]
        for slot, chain in enumerate(chains):
            starts = self._placed(chain)
            assert starts is not None, "a packing of no more decode steps"
            self._put(slot, starts)

    @property
    def stages(self) -> int:
        """Prefill stages."""
        return len(self._times)

    def starts(self) -> tuple[list[int], list[int]]:
        """Return the requests, slot by slot, and the decode step that each starts at."""
        requests = [request for chain in self._chains for request in chain]
        return requests, [start for starts in self._starts for start in starts]

    def change(self, temperature: float) -> None:
        """Move a request within its slot or exchange it for another's, if what that costs is accepted."""
        draw, slots = self._random.random, len(self._chains)
        one = int(draw() * slots)
        chain = self._chains[one]
        if len(chain) > 1 and draw() < REORDERED:
            self._try({one: self._reordered(chain)}, temperature)
            return
        other = int(draw() * slots)
        if one == other or not chain or not self._chains[other]:
            return
        mine, its = list(chain), list(self._chains[other])
        here, there = int(draw() * len(mine)), int(draw() * len(its))
        longer = self._decode_steps[its[there]] - self._decode_steps[mine[here]]
        if self._load[one] + longer > self._limit or self._load[other] - longer > self._limit:
            return
        mine[here], its[there] = its[there], mine[here]
        if self._try({one: mine, other: its}, temperature):
            self._load[one] += longer
            self._load[other] -= longer

    def _reordered(self, chain: list[int]) -> list[int]:
        """Return a slot's requests with two of them exchanged, or one moved elsewhere."""
        changed, draw = list(chain), self._random.random
        here, there = int(draw() * len(chain)), int(draw() * len(chain))
        if draw() < 0.5:
            changed[here], changed[there] = changed[there], changed[here]
        else:
            changed.insert(there, changed.pop(here))
        return changed

    def _try(self, changed: dict[int, list[int]], temperature: float) -> bool:
        """Give slots other requests if that is accepted, and return whether it was."""
        before, old = len(self._times), {slot: self._starts[slot] for slot in changed}
        for slot in changed:
            self._take(slot)
        put: list[int] = []
        for slot, chain in changed.items():
            starts = self._placed(chain)
            if starts is None:
                break
            self._put(slot, starts)
            put.append(slot)
        else:
            more = len(self._times) - before
            if more <= 0 or self._random.random() < math.exp(-more / temperature):
                for slot, chain in changed.items():
                    self._chains[slot] = chain
                return True
        for slot in put:
            self._take(slot)
        for slot, starts in old.items():
            self._put(slot, starts)
        return False

    def _placed(self, chain: list[int]) -> list[int] | None:
        """
        Return where the requests of a slot start with the fewest stages of their own, or None if too late.

        Each waits for a stage that there is, or starts a new one at once: of as many new ones, the earliest
        end of each request is all that matters to the next ones.
        """
        if not chain:
            return []
        times, decode_steps = self._times, self._decode_steps
        last, ends = len(times), [decode_steps[chain[0]]]
        began: list[list[tuple[int, int]]] = []
        for request in chain[1:]:
            need = decode_steps[request]
            nexts, begins = [NEVER] * (len(ends) + 1), [(0, 0)] * (len(ends) + 1)
            for new, free in enumerate(ends):
                if free >= NEVER:
                    continue
                at = bisect_left(times, free)
                if at < last and times[at] + need < nexts[new]:
                    nexts[new], begins[new] = times[at] + need, (times[at], new)
                if free + need < nexts[new + 1]:
                    nexts[new + 1], begins[new + 1] = free + need, (free, new)
            began.append(begins)
            ends = nexts
        fewest = next((new for new, end in enumerate(ends) if end <= self._limit), None)
        if fewest is None:
            return None
        starts = []
        for begins in reversed(began):
            start, fewest = begins[fewest]
            starts.append(start)
        return [0, *reversed(starts)]

    def _put(self, slot: int, starts: list[int]) -> None:
        """Let a slot's requests start at these decode steps."""
        self._starts[slot] = starts
        for time in starts:
            if time in self._used:
                self._used[time] += 1
            else:
                self._used[time] = 1
                insort(self._times, time)

    def _take(self, slot: int) -> None:
        """Take a slot's requests out."""
        for time in self._starts[slot]:
            self._used[time] -= 1
            if not self._used[time]:
                del self._used[time]
                del self._times[bisect_left(self._times, time)]
