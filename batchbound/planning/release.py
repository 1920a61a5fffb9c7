"""Orders of release for an engine that mixes prompts with generated tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..data.arrays import IntArray
from ..data.iterations import EngineLimits, Sequences
from ..data.plan import Plan
from ..heuristics.prefixes.leaps import SentTogether
from ..heuristics.serving.in_flight import running_of
from ..heuristics.serving.release import MOST_SIMULATED, Release, choose_release, shuffled_orders
from ..models.bounds.iterations import iteration_bound

LONGEST_FIRST, FILE_ORDER, PLAN = "longest first", "file order", "plan"

_NEAR = 1.003
"""Iterations over the bound below which an order is good enough."""

PACKING_SECONDS = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Releasable:
    """Requests that an engine is to complete.

    prompt: Tokens of each prompt, shape (requests,).
    output: Tokens of the longest completion of each request, shape (requests,).
    choices: Completions of each request, shape (requests,).
    exact: True if the lengths are known, False if predicted.
    rows: Sequences of all completions, if a request's differ in length or share a beginning; else None.
    """

    prompt: IntArray
    output: IntArray
    choices: IntArray
    exact: bool = False
    rows: Sequences | None = None

    @classmethod
    def of_rows(cls, rows: Sequences, request: IntArray, *, exact: bool) -> Releasable:
        """Gather completions into requests.

        request: Number of each completion's request, shape (completions,).
        """
        starts = np.flatnonzero(np.append(True, request[1:] != request[:-1]))
        choices = np.diff(np.append(starts, len(rows)))
        return cls(rows.prompt[starts], np.maximum.reduceat(rows.output, starts), choices, exact, rows)

    def __len__(self) -> int:
        return len(self.prompt)

    def sequences(self) -> Sequences:
        """Return a sequence per completion, in the order of requests."""
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
        """Return the order of completions for an order of requests."""
        choices = self.choices[order]
        nth = np.arange(choices.sum()) - np.repeat(np.cumsum(choices) - choices, choices)
        rows: IntArray = np.repeat(self._starts()[order], choices) + nth
        return rows

    def _starts(self) -> IntArray:
        starts: IntArray = np.concatenate(([0], np.cumsum(self.choices)[:-1]))
        return starts


def plan_order(plan: Plan) -> IntArray:
    """Return the order in which a plan's requests begin, shape (requests,).

    One replica: by prefill stage, longest first within a stage. A fleet: longest first.
    """
    if len(plan.fleet.replicas) > 1:
        return np.argsort(-plan.fleet.decode_steps, kind="stable")
    return np.lexsort((-plan.workload.output_tokens, plan.schedule.bin_of))


def named_orders(work: Releasable, planned: IntArray | None) -> dict[str, IntArray]:
    """Return the simple orders by name, the plan's first."""
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
    """Return the order of fewest simulated iterations.

    If the KV cache can run out, shuffled orders are tried as well. If slots are the limit and no simple order
    is close to the bound, requests of known lengths are packed into slots. Predicted lengths are not packed:
    longest first leaves short requests for the end, whichever turn out longer.

    in_flight: Completions that the client keeps in flight; None for enough to keep the queue full.
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
    """Return the order in which sequences begin when packed into slots.

    In that order, each takes the slot that it was packed into, or one that is free as early.
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
    """Return a named order and its prediction; raise KeyError if unknown."""
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
