"""Policies that need no length, by name, and a job whose lengths none of them can see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...data.problem import Problem
from ..queues.admission import Admission
from ..queues.ordered import Ordered, arrival_order
from ..queues.prefill_rules import PrefillFirst, PrefillRule, SkiRental
from ..queues.queue_policy import QueuedPolicy, QueuePolicy
from .learned import learned_lengths
from .lengths import NOTHING, Known
from .queues import GroupQueue, Ranking, expected_length, group_numbers, longest_seen, moving_average

CHOSEN = "learned"
"""The policy for lengths nobody knows, where the user names none."""


@dataclass(frozen=True, slots=True)
class HiddenEntry:
    """
    A policy that needs no length.

    make: Returns a fresh policy for a problem, what is known beforehand, and the seconds a token of KV cache
        takes to the host or back (None if it cannot be moved).
    takes_swap: Whether moving has an effect.
    takes_known: Whether what is known beforehand has one.
    """

    make: Callable[[Problem, Known, float | None], QueuedPolicy]
    takes_swap: bool = False
    takes_known: bool = False


def by_arrival(problem: Problem, rule: PrefillRule) -> QueuedPolicy:
    """Return the policy that serves requests as they arrive, with memory for what they hold now."""
    return QueuePolicy(Ordered(arrival_order(problem)), rule, Admission(problem, "present"))


def by_groups(problem: Problem, ranking: Ranking, *, scouts: int) -> QueuedPolicy:
    """Return the policy of some scouts of every group and then the groups by a ranking."""
    numbers, _groups = group_numbers(problem)
    if int(np.bincount(numbers).max()) <= scouts:
        # All requests are scouts, which come by arrival.
        return by_arrival(problem, SkiRental())
    queue = GroupQueue(problem, ranking, scouts=scouts)
    return QueuePolicy(queue, SkiRental(), Admission(problem, "present"))


WITHOUT_LENGTHS: Mapping[str, HiddenEntry] = {
    "fcfs": HiddenEntry(lambda problem, _known, _swap: by_arrival(problem, PrefillFirst())),
    "fcfs-ski": HiddenEntry(lambda problem, _known, _swap: by_arrival(problem, SkiRental())),
    CHOSEN: HiddenEntry(learned_lengths, takes_swap=True, takes_known=True),
    "moving-average": HiddenEntry(
        lambda problem, _known, _swap: by_groups(problem, moving_average, scouts=3)
    ),
    "scouts": HiddenEntry(lambda problem, _known, _swap: by_groups(problem, longest_seen, scouts=1)),
    "survival": HiddenEntry(lambda problem, _known, _swap: by_groups(problem, expected_length, scouts=2)),
}


def without_lengths(problem: Problem) -> Problem:
    """
    Return the problem that a policy may see where lengths are not known: every length is one token.

    What stands there is read by no policy of :data:`WITHOUT_LENGTHS`; it is in the place of the true lengths
    so that none could.
    """
    unknown = np.ones(len(problem), dtype=np.int64)
    return replace(problem, workload=problem.workload.with_output_tokens(unknown))


def without_sharing(problem: Problem) -> Problem:
    """
    Return the problem in which a policy counts on no prompt to be kept, as those of steps do.

    Kept prompts are dropped as the weights change, and of a stage's cap more is left than it counts on.
    """
    none = np.zeros(len(problem), dtype=np.int64)
    return replace(problem, workload=replace(problem.workload, shared_tokens=none), prefix_cache=0)


def hidden_policy(
    name: str, problem: Problem, known: Known = NOTHING, swap: float | None = None
) -> QueuedPolicy:
    """
    Return a fresh policy that needs no length.

    name: A key of :data:`WITHOUT_LENGTHS`.
    problem: As :func:`without_lengths` returns it.
    known: What is known of lengths before the job.
    swap: Seconds a token of KV cache takes to the host or back; None if it cannot be moved.
    Raises ValueError if there is no such policy, or one that it would need a length for.
    """
    entry = WITHOUT_LENGTHS.get(name)
    if entry is None:
        raise ValueError(
            f"the policy {name!r} goes by lengths; without them there are {', '.join(WITHOUT_LENGTHS)}"
        )
    return entry.make(problem, known, swap)
