"""An independent check that no schedule of a small problem is cheaper, by trying them all."""

from __future__ import annotations

from collections.abc import Iterator

from .claims import Work

MOST_REQUESTS = 40
"""Requests up to which every schedule is tried: of more, only few and equal ones could be."""

_BITS = 8192
"""Bits of a whole number that are shifted in about the time of a step."""

Windows = list[tuple[int, int]]
"""Last and first round in which a request can start."""


def fits(lengths: list[int], slots: int, stages: int, rounds: int, work: Work) -> bool:
    """
    Return whether requests can be served with so many prefill stages and decode steps.

    Packs the requests into slots in every way, and orders each slot in every way. A slot's later requests
    start within the rounds it may idle after those before them; so many stages must stab all these windows.
    Slots start at once, and a later stage waits only for requests that end.

    Parameters
    ----------
    lengths
        Decode steps of each request, positive.
    slots
        Number of slots.
    stages, rounds
        At most so many.
    work
        What is left of the steps of the check.

    Raises
    ------
    RefutedError
        If there is more to try than there are steps.
    """
    slots, rounds = min(slots, len(lengths)), min(rounds, sum(lengths))
    if max(lengths) > rounds:
        return False
    empty: list[list[int]] = [[] for _ in range(slots)]
    seen = set()
    for packing in _packings(sorted(lengths, reverse=True), empty, 0, stages, rounds, work):
        if packing not in seen:
            seen.add(packing)
            if _ordered(packing, 0, [], [], stages, rounds, work):
                return True
    return False


def _packings(
    left: list[int], packed: list[list[int]], first: int, stages: int, rounds: int, work: Work
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """
    Yield the packings into slots that are all used, each at least once: the longest request goes first.

    Of equal requests none goes to a slot before that of the last one, which is ``first``.
    """
    if not left:
        if all(packed):
            yield tuple(sorted(map(tuple, packed)))
        return
    work.spend(1 + len(packed) + len(left) * (1 + sum(left) // _BITS))
    sums = 1
    for length in left:
        sums |= sums << length
    wasted = 0
    for slot in packed:
        room = rounds - sum(slot)
        wasted += room - ((sums & ((2 << room) - 1)).bit_length() - 1)
    if wasted > len(packed) * rounds - sum(map(sum, packed)) - sum(left):
        return
    tried = set()
    for at, slot in enumerate(packed[first:], start=first):
        # Slots that hold the same could trade places, and each request of a slot needs a stage of its own.
        fitting = sum(slot) + left[0] <= rounds and len(slot) < stages
        if fitting and tuple(slot) not in tried:
            tried.add(tuple(slot))
            slot.append(left[0])
            again = at if left[1:2] == left[:1] else 0
            yield from _packings(left[1:], packed, again, stages, rounds, work)
            slot.pop()


def _ordered(
    packing: tuple[tuple[int, ...], ...],
    slot: int,
    chosen: list[tuple[int, ...]],
    windows: Windows,
    stages: int,
    rounds: int,
    work: Work,
) -> bool:
    """Return whether orders of the slots from this one on complete those chosen to a schedule."""
    if slot == len(packing):
        idle = [rounds - sum(order) for order in chosen]
        return _served([list(order) for order in chosen], [0] * len(chosen), idle, stages, work)
    spare = rounds - sum(packing[slot])
    for order in _orders(packing[slot]):
        work.spend(1 + len(windows))
        added, at = windows.copy(), 0
        for length in order[:-1]:
            at += length
            added.append((at + spare, at))
        chosen_too = [*chosen, order]
        if _stabs(added) < stages and _ordered(packing, slot + 1, chosen_too, added, stages, rounds, work):
            return True
    return False


def _orders(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the distinct orders of lengths."""
    if not lengths:
        yield ()
    for length in set(lengths):
        at = lengths.index(length)
        for rest in _orders(lengths[:at] + lengths[at + 1 :]):
            yield (length, *rest)


def _stabs(windows: Windows) -> int:
    points, last = 0, -1
    for end, begin in sorted(windows):
        if begin > last:
            points, last = points + 1, end
    return points


def _served(left: list[list[int]], ready: list[int], idle: list[int], stages: int, work: Work) -> bool:
    """Return whether so many stages serve what is left of every slot, which is ready in some round."""
    waiting = [j for j, sequence in enumerate(left) if sequence]
    if not waiting:
        return True
    if stages == 0:
        return False
    work.spend(1 + len(left))
    for stage in {ready[j] for j in waiting}:
        if all(ready[j] + idle[j] >= stage for j in waiting):
            taken = [j for j in waiting if ready[j] <= stage]
            left_then, ready_then, idle_then = (
                [sequence.copy() for sequence in left],
                ready.copy(),
                idle.copy(),
            )
            for j in taken:
                idle_then[j] -= stage - ready[j]
                ready_then[j] = stage + left_then[j].pop(0)
            if _served(left_then, ready_then, idle_then, stages - 1, work):
                return True
    return False
