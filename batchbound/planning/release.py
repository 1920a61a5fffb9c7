"""The order to release requests to an engine that mixes prompts with generated tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..data.arrays import IntArray
from ..data.iterations import EngineLimits, Sequences
from ..data.plan import Plan
from ..executor.jobs.params import running_of
from ..executor.serving.leaps import SentTogether
from ..executor.serving.release import MOST_SIMULATED, Release, choose_release, shuffled_orders
from ..models.bounds.iterations import iteration_bound

LONGEST_FIRST, FILE_ORDER, PLAN = "longest first", "file order", "plan"

_NEAR = 1.003
"""Iterations over the bound below which an order is not improved further."""

PACKING_SECONDS = 1.0
"""Largest packing time of requests into slots, in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Releasable:
    """
    Requests that an engine of limits is to complete.

    prompt: Tokens of each prompt, shape (requests,).
    output: Tokens of each of its completions, shape (requests,).
    choices: Completions of each prompt, shape (requests,).
    exact: Whether the lengths are known, and not predictions.
    rows: What the engine computes, the completions of each request side by side, where those of one differ in
        length or prompts begin alike; then ``output`` is the longest of each request. None where they do not.
    """

    prompt: IntArray
    output: IntArray
    choices: IntArray
    exact: bool = False
    rows: Sequences | None = None

    @classmethod
    def of_rows(cls, rows: Sequences, request: IntArray, *, exact: bool) -> Releasable:
        """
        Return the requests of some completions.

        ``request``: a number for each one's request, equal where it is the same, shape (completions,).
        """
        starts = np.flatnonzero(np.append(True, request[1:] != request[:-1]))
        choices = np.diff(np.append(starts, len(rows)))
        return cls(rows.prompt[starts], np.maximum.reduceat(rows.output, starts), choices, exact, rows)

    def __len__(self) -> int:
        return len(self.prompt)

    def sequences(self) -> Sequences:
        """Return what the engine computes, a row per completion, in the requests' order."""
        if self.rows is not None:
            return self.rows
        prompt = np.repeat(self.prompt, self.choices)
        # A prompt's second completion may reuse the KV cache of the first.
        first = np.zeros(len(prompt), dtype=bool)
        first[self._starts()] = True
        return Sequences(prompt, np.repeat(self.output, self.choices), np.where(first, 0, prompt - 1))

    @property
    def tokens(self) -> IntArray:
        """Tokens of each prompt and its completions, shape (requests,)."""
        if self.rows is None:
            return self.prompt + self.output * self.choices
        return self.prompt + np.add.reduceat(self.rows.output, self._starts())

    def expanded(self, order: IntArray) -> IntArray:
        """Return an order of requests as one of completions."""
        starts = self._starts()
        return np.concatenate([np.arange(starts[i], starts[i] + self.choices[i]) for i in order])

    def _starts(self) -> IntArray:
        starts: IntArray = np.concatenate(([0], np.cumsum(self.choices)[:-1]))
        return starts


def plan_order(plan: Plan) -> IntArray:
    """
    Return the order in which a plan has its requests begin, shape (requests,).

    Of one machine, by its prefill stages, and the longest first among those of one stage; of a fleet, the
    longest first.
    """
    if len(plan.fleet.replicas) > 1:
        return np.argsort(-plan.fleet.decode_steps, kind="stable")
    return np.lexsort((-plan.workload.output_tokens, plan.schedule.bin_of))


def named_orders(work: Releasable, planned: IntArray | None) -> dict[str, IntArray]:
    """Return the orders that have a name; a plan's is the first, where there is one."""
    orders = {
        LONGEST_FIRST: np.argsort(-work.output, kind="stable"),
        "most tokens first": np.argsort(-work.tokens, kind="stable"),
        FILE_ORDER: np.arange(len(work)),
    }
    return orders if planned is None else {PLAN: planned, **orders}


def best_release(
    work: Releasable,
    limits: EngineLimits,
    planned: IntArray | None = None,
    seed: int = 0,
    in_flight: int | None = None,
) -> Release:
    """
    Return the order of fewest simulated iterations.

    Where the KV cache can run out, shuffled orders are tried as well; where slots are the limit and no
    named order comes close to the bound, requests whose lengths are known are packed into slots, and each
    slot's begin in turn. (Where lengths are predictions, longest first is the better one: what it has left
    for the end is short, whichever requests turn out longer.)

    ``in_flight``: completions that the client keeps in flight; None for as many as keep the queue
    from running empty.
    """
    orders, sequences = named_orders(work, planned), work.sequences()
    if sequences.may_run_short(limits):
        rng = np.random.default_rng(seed)
        shuffled = shuffled_orders(work.tokens, int(sequences.output.sum()), rng)
        return _chosen(work, limits, orders | shuffled, in_flight)
    found = _chosen(work, limits, orders, in_flight)
    least = iteration_bound(sequences, limits).iterations
    if found.predicted is None or found.predicted.iterations <= _NEAR * least:
        return found
    if not work.exact or (work.choices > 1).any() or int(sequences.output.sum()) > MOST_SIMULATED:
        return found
    packed = {found.name: found.order, "packed into slots": packed_order(sequences, limits, seed)}
    return _chosen(work, limits, packed, in_flight)


def packed_order(
    sequences: Sequences, limits: EngineLimits, seed: int = 0, seconds: float = PACKING_SECONDS
) -> IntArray:
    """
    Return sequences by the iteration in which they begin where slots are filled as evenly as is found.

    Released in that order, each takes the slot that it was packed into, or one that is free as early.
    """
    from ..models.bounds.packing.partition import solve_partition

    rows = sequences.rows(limits)
    slot = solve_partition(rows, min(limits.sequences, len(rows)), seconds, seed).assignment
    begins = np.zeros(len(rows), dtype=np.int64)
    for one in np.unique(slot):
        members = np.flatnonzero(slot == one)
        members = members[np.argsort(-rows[members], kind="stable")]
        begins[members] = np.concatenate(([0], np.cumsum(rows[members])[:-1]))
    return np.lexsort((-rows, begins))


def named_release(
    work: Releasable,
    limits: EngineLimits,
    name: str,
    planned: IntArray | None,
    in_flight: int | None = None,
) -> Release:
    """Return the order of that name with what it is predicted to take; KeyError if there is none."""
    return _chosen(work, limits, {name: named_orders(work, planned)[name]}, in_flight)


def _chosen(
    work: Releasable, limits: EngineLimits, orders: dict[str, IntArray], in_flight: int | None
) -> Release:
    rows = {name: work.expanded(order) for name, order in orders.items()}
    sent = None
    if in_flight is not None and (work.choices > 1).any():
        weight = np.array([running_of(choices) for choices in work.choices.tolist()])
        sent = {
            name: SentTogether(work.choices[order].tolist(), weight[order].tolist())
            for name, order in orders.items()
        }
    found = choose_release(work.sequences(), limits, rows, next(iter(orders)), in_flight, sent)
    return replace(found, order=orders[found.name])
