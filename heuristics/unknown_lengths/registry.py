"""Policies that need no length, by name."""

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

CHOSEN = "learned"


@dataclass(frozen=True, slots=True)
class HiddenEntry:
    """Policy that needs no length.

    make: Returns a fresh policy for a problem, earlier knowledge, and the seconds to move a KV token to the
        host or back (None if it cannot be moved).
    takes_swap: True if it moves KV cache.
    takes_known: True if it uses earlier knowledge.
    """

    make: Callable[[Problem, Known, float | None], QueuedPolicy]
    takes_swap: bool = False
    takes_known: bool = False


def by_arrival(problem: Problem, rule: PrefillRule) -> QueuedPolicy:
    """Return the policy by arrival, with memory for present tokens."""
    return QueuePolicy(Ordered(arrival_order(problem)), rule, Admission(problem, "present"))


WITHOUT_LENGTHS: Mapping[str, HiddenEntry] = {
    "fcfs": HiddenEntry(lambda problem, _known, _swap: by_arrival(problem, PrefillFirst())),
    "fcfs-ski": HiddenEntry(lambda problem, _known, _swap: by_arrival(problem, SkiRental())),
    CHOSEN: HiddenEntry(learned_lengths, takes_swap=True, takes_known=True),
}


def without_lengths(problem: Problem) -> Problem:
    """Return the problem with every length set to one token.

    No policy of :data:`WITHOUT_LENGTHS` reads lengths; the ones make sure that none could.
    """
    unknown = np.ones(len(problem), dtype=np.int64)
    return replace(problem, workload=problem.workload.with_output_tokens(unknown))


def without_sharing(problem: Problem) -> Problem:
    """Return the problem without shared prompts.

    Kept prompts are dropped when the weights change; a policy of rollout steps must not count on them.
    """
    return replace(problem, workload=replace(problem.workload, tree=None), prefix_cache=0)


def hidden_policy(
    name: str, problem: Problem, known: Known = NOTHING, swap: float | None = None
) -> QueuedPolicy:
    """Return a fresh policy that needs no length.

    name: Key of :data:`WITHOUT_LENGTHS`.
    problem: As returned by :func:`without_lengths`.
    known: Knowledge of lengths before the job.
    swap: Seconds to move a KV token to the host or back; None if it cannot be moved.

    Raises ValueError if there is no such policy, or it needs lengths.
    """
    entry = WITHOUT_LENGTHS.get(name)
    if entry is None:
        raise ValueError(
            f"the policy {name!r} goes by lengths; without them there are {', '.join(WITHOUT_LENGTHS)}"
        )
    return entry.make(problem, known, swap)
