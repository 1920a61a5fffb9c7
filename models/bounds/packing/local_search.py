"""Local search for packing: pairs of machines split by exact subset sums."""

from __future__ import annotations

import math
import random
import time

import numpy as np

from .heuristics import IntArray

MOST_PARTNERS = 16
"""Light machines to try with an overloaded one before shuffling."""
SHUFFLED_SHARE = 8
"""Part of the machines to shuffle: one in this number."""


def subset_sums(weights: list[int]) -> int:
    """Return all subset sums of weights as bits of an integer."""
    sums = 1
    for weight in weights:
        sums |= sums << weight
    return sums


def subset_of_sum(items: list[int], values: list[int], total: int) -> list[int]:
    """Return items of exactly the wanted total value."""
    reachable = [1]
    for item in items:
        reachable.append(reachable[-1] | (reachable[-1] << values[item]))
    if not (reachable[-1] >> total) & 1:
        raise ValueError(f"no subset of {len(items)} items sums to {total}")
    chosen = []
    for item, before in zip(reversed(items), reversed(reachable[:-1]), strict=True):
        if not (before >> total) & 1:
            chosen.append(item)
            total -= values[item]
    return chosen


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class Resplit:
    """Local search that exchanges the items of two machines.

    The sums of a machine's subsets are the bits of an integer, those of a pair a few shifts of it. A pair's
    subsets of sum x are a subset of sum a of the first and x - a of the second; the sums of a machine are
    symmetric, as a subset's complement is a subset. So the possible a are one shift and one AND of two
    integers.

    weights: Weight of each item, shape (n,).
    assignment: Machine of each item to start from, shape (n,).
    target: Makespan asked for.
    rng: Source of every random choice.
    """

    def __init__(
        self, weights: IntArray, assignment: IntArray, machines: int, target: int, rng: np.random.Generator
    ) -> None:
        self.values: list[int] = weights.tolist()
        self.machines = machines
        self.target = target
        # Python's own draws single numbers ten times as fast as NumPy's.
        self.draw = random.Random(int(rng.integers(2**63)))
        self.members: list[list[int]] = [[] for _ in range(machines)]
        for item, machine in enumerate(assignment.tolist()):
            self.members[machine].append(item)
        self.loads = [sum(self.values[item] for item in items) for items in self.members]
        self.sums = [subset_sums([self.values[item] for item in items]) for items in self.members]

    def run(self, seconds: float, tries: float = math.inf) -> bool:
        """Return whether no machine exceeds the target any more."""
        deadline = time.perf_counter() + seconds
        while (worst := max(self.loads)) > self.target:
            tries -= 1
            if tries < 0 or time.perf_counter() > deadline:
                return False
            over = self.loads.index(worst)
            if not self._relieve(over):
                # After a single shuffle most machines are as stuck as before; many are cheaper than a vain
                # look.
                for _ in range(self.machines // SHUFFLED_SHARE + 1):
                    self._shuffle(over)
        return True

    def assignment(self) -> IntArray:
        """Return the machine of each item."""
        result = np.zeros(len(self.values), dtype=np.int64)
        for machine, items in enumerate(self.members):
            result[items] = machine
        return result

    def _relieve(self, over: int) -> bool:
        """Return whether a split took excess off an overloaded machine."""
        load = self.loads[over]
        partners = [machine for machine, partner in enumerate(self.loads) if partner < self.target]
        for partner in self.draw.sample(partners, min(MOST_PARTNERS, len(partners))):
            # From here up the excess of the pair grows with the sum, one machine standing for its mirror
            # image.
            lightest = max(0, min(self.target, load + self.loads[partner] - self.target))
            better = (self._sums_of_pair(over, partner) >> lightest) & ((1 << (load - lightest)) - 1)
            if better:
                self._resplit(over, partner, lightest + _lowest_bit(better))
                return True
        return False

    def _shuffle(self, over: int) -> None:
        """Split a random pair differently, with no more excess."""
        if self.machines == 1:
            return
        first = over if self.draw.random() < 0.5 else self.draw.randrange(self.machines)
        second = self.draw.randrange(self.machines - 1)
        second += second >= first
        both = self.loads[first] + self.loads[second]
        high = max(self.target, self.loads[first], self.loads[second])
        low = max(0, both - high)
        start = self.draw.randint(low, high)
        above = (self._sums_of_pair(first, second) >> start) & ((1 << (high - start + 1)) - 1)
        if above:
            self._resplit(first, second, start + _lowest_bit(above))

    def _sums_of_pair(self, first: int, second: int) -> int:
        """Return all subset sums of two machines' items, as bits."""
        sums = self.sums[first]
        for item in self.members[second]:
            sums |= sums << self.values[item]
        return sums

    def _resplit(self, first: int, second: int, total: int) -> None:
        """Split the pair so that the first machine has some total."""
        shift = self.loads[second] - total
        mirrored = self.sums[second] >> shift if shift >= 0 else self.sums[second] << -shift
        meeting = self.sums[first] & mirrored
        above = meeting >> (start := self.draw.randrange(meeting.bit_length()))
        part = start + _lowest_bit(above)
        from_first = set(subset_of_sum(self.members[first], self.values, part))
        from_second = set(subset_of_sum(self.members[second], self.values, total - part))
        stay = [item for item in self.members[first] if item in from_first] + list(from_second)
        leave = [item for item in self.members[first] if item not in from_first]
        leave += [item for item in self.members[second] if item not in from_second]
        both = self.loads[first] + self.loads[second]
        for machine, items, load in ((first, stay, total), (second, leave, both - total)):
            self.members[machine] = items
            self.loads[machine] = load
            self.sums[machine] = subset_sums([self.values[item] for item in items])
