"""All the ways to pack requests into slots that stay within a number of rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...data.costs.cost import IntArray

Slot = tuple[int, ...]
"""Rounds of the requests that share a slot, longest first."""


def packings(
    rounds: IntArray, slots: int, capacity: int, tick: Callable[[], None]
) -> Iterator[tuple[Slot, ...]]:
    """
    Yield every way to pack requests into slots, none of which is left empty, within a capacity.

    Requests of equal rounds are not told apart, nor are slots. The next slot always takes the longest request
    that is left, and may waste no more of the capacity than the slots before it have left over.

    Parameters
    ----------
    rounds
        Decode steps of each request, at least 1, shape (requests,).
    capacity
        Most rounds of the requests of a slot.
    tick
        Called at every step of the enumeration; what it raises ends the enumeration.

    Yields
    ------
    tuple of tuple of int
        The rounds packed into each slot.
    """
    lengths = sorted(set(rounds.tolist()), reverse=True)
    have = [rounds.tolist().count(length) for length in lengths]

    def pack(left: list[int], waste: int, chosen: list[list[int]]) -> Iterator[tuple[Slot, ...]]:
        if len(chosen) == slots or not any(left):
            if len(chosen) == slots and not any(left):
                yield tuple(_slot(lengths, taken) for taken in chosen)
            return
        first = next(kind for kind, count in enumerate(left) if count)
        before = chosen[-1] if chosen else None
        for unused, taken in _fillings(lengths, left, (first, capacity, waste), tick):
            # Slots with an equal longest request could trade places: only one order of them counts.
            if before is not None and taken[first] > 0 and before[:first] == taken[:first] and taken > before:
                continue
            rest = [have_left - count for have_left, count in zip(left, taken, strict=True)]
            yield from pack(rest, waste - unused, [*chosen, taken])

    waste = slots * capacity - int(rounds.sum())
    if waste >= 0:
        yield from pack(have, waste, [])


def _slot(lengths: list[int], taken: list[int]) -> Slot:
    return tuple(length for length, count in zip(lengths, taken, strict=True) for _ in range(count))


def _fillings(
    lengths: list[int], left: list[int], slot: tuple[int, int, int], tick: Callable[[], None]
) -> Iterator[tuple[int, list[int]]]:
    """
    Yield what a slot can hold with the longest request left: rounds unused, requests of each kind.

    ``slot`` has the kind of that request, the slot's rounds, and how many of them may be wasted.
    """
    first, capacity, waste = slot
    kinds = len(lengths)
    most_from = [0] * (kinds + 1)
    for kind in range(kinds - 1, -1, -1):
        most_from[kind] = most_from[kind + 1] + left[kind] * lengths[kind]
    taken = [0] * kinds

    def fill(kind: int, room: int) -> Iterator[tuple[int, list[int]]]:
        tick()
        if room - most_from[kind] > waste:
            return
        if kind == kinds:
            yield room, taken[:]
            return
        for count in range(min(left[kind], room // lengths[kind]), (kind == first) - 1, -1):
            taken[kind] = count
            yield from fill(kind + 1, room - count * lengths[kind])
        taken[kind] = 0

    yield from fill(first, capacity)
