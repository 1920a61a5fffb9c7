"""An independent check that items do not fit machines, by trying every packing."""

from __future__ import annotations

from .claims import Work

STEPS = 10
"""Steps of a check that putting an item on a machine takes."""


def packs(weights: list[int], machines: int, capacity: int, work: Work) -> bool:
    """
    Return whether items can be put on machines so that none holds more than a capacity.

    Parameters
    ----------
    weights
        Weight of each item.
    machines, capacity
        Machines, and the most that each holds.
    work
        What is left of the steps of the check.

    Raises
    ------
    RefutedError
        If there is more to try than there are steps.
    """
    if sum(weights) > machines * capacity:
        return False
    machines = min(machines, len(weights))
    spare, least = machines * capacity - sum(weights), min(weights)
    work.spend(machines)
    rooms = {(capacity,) * machines}
    for weight in sorted(weights, reverse=True):
        after = set()
        for room in rooms:
            work.spend(STEPS * machines)
            for free in set(room):
                if free >= weight:
                    left = list(room)
                    left.remove(free)
                    left.append(free - weight)
                    # Room that nothing fits in any more is lost.
                    if sum(each for each in left if each < least) <= spare:
                        after.add(tuple(sorted(left)))
        rooms = after
    return bool(rooms)
