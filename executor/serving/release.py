"""The order to release requests to a mixing engine in, chosen by simulating its iterations."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...data.arrays import IntArray
from ...data.iterations import EngineLimits, Predicted, Sequences
from ...data.workload import Workload
from ...heuristics.serving.chunked_prefill import ChunkedPrefill
from ...heuristics.serving.device import DeviceBatch, ServingDevice
from ...heuristics.serving.kv_ledger import KvLedger
from ...heuristics.serving.policy import ServingPolicy, ServingState, ServingStep
from .leaps import IterationPrices, LeapingEngine
from .simulation import serve_on_device

MOST_SIMULATED = 3_000_000
"""Tokens of completions of a job up to which its iterations are simulated, seconds of work; none beyond."""

MOST_ITERATIONS = 200_000
"""Iterations up to which they are: at least the tokens of its longest completion, and chunks of prompts."""


MOST_SHUFFLED = 64
"""Most orders drawn where keys and values run out."""

MOST_TRIED = 20_000_000
"""Tokens of completions that are simulated over all of them, seconds of work."""

MOST_COUNTED, MOST_PASSED = 30_000_000, 2_000_000
"""Tokens of completions, and iterations, up to which they are counted from event to event, seconds' work."""

_SPREADS = (0.3, 0.5, 0.7, 0.9)
"""Standard deviations of the logarithm of what a request's tokens are taken for in an order that is drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """
    An order to release requests in.

    name: How it came to be.
    order: Positions of the requests, first to be sent first, shape (requests,).
    predicted: What the engine makes of it, or None for a job too large to simulate.
    """

    name: str
    order: IntArray
    predicted: Predicted | None


def predict(
    sequences: Sequences,
    limits: EngineLimits,
    order: Sequence[int] | IntArray,
    in_flight: int | None = None,
    lag: int = 0,
    prices: IterationPrices | None = None,
) -> Predicted | None:
    """
    Return the iterations a mixing engine takes for sequences that come to it in an order.

    Its iterations are counted as vLLM schedules them, from event to event; of a job beyond
    :data:`MOST_COUNTED` tokens or :data:`MOST_PASSED` iterations, whose keys and values do not run out, each
    sequence is only given the slot that is free first, without seconds. None for such a job where they may
    run out, and for one with a request that needs more of them than there are.

    order: Positions of the sequences, first to be admitted first, shape (sequences,).
    in_flight: Sequences that the client has under way at a time; None if all are there at the start.
    lag: Iterations from the end of one until the next that the client sends is there.
    prices: Tell the seconds of iterations; without them there are none.
    """
    order = np.asarray(order, dtype=np.int64)
    if not fits(sequences, limits):
        return None
    if not _countable(sequences, limits):
        if sequences.may_run_short(limits):
            return None
        return Predicted(_slots_only(sequences, limits, order, in_flight, lag))
    prompt, output = sequences.prompt[order].tolist(), sequences.output[order].tolist()
    return LeapingEngine(prompt, output, limits, in_flight, lag).run(prices)


def simulated(
    sequences: Sequences,
    limits: EngineLimits,
    in_flight: int | None = None,
    lag: int = 0,
    device: ServingDevice | None = None,
) -> Predicted:
    """
    Return the same for sequences in their own order, each iteration carried out and seen by the referee.

    sequences, limits, in_flight, lag: As of :func:`predict`.
    device: Tells the seconds of each iteration; without one there are none.
    Raises ServingError if a sequence alone needs more keys and values than there are.
    """
    work = Workload.from_lengths(sequences.prompt, sequences.output)
    policy, ledger = engine_of(work, limits)
    client: ServingPolicy = policy if in_flight is None else _Client(policy, in_flight, lag)
    run = serve_on_device(work, client, _OneSecond() if device is None else device, ledger)
    tokens = int(run.decodes.sum() + run.prompt_tokens.sum())
    seconds = None if device is None else float(run.finished.max())
    return Predicted(len(run.start), policy.preemptions, tokens, seconds)


def engine_of(work: Workload, limits: EngineLimits) -> tuple[ChunkedPrefill, KvLedger]:
    """Return the rule and the memory of an engine of some limits; without one, memory for all requests."""
    each = work.input_tokens + work.output_tokens + limits.block_tokens
    capacity = int(each.sum()) if limits.kv_tokens is None else limits.kv_tokens
    policy = ChunkedPrefill(limits.batched_tokens, min(limits.sequences, limits.batched_tokens))
    return policy, KvLedger(capacity, len(work), limits.block_tokens)


def simulable(sequences: Sequences, limits: EngineLimits) -> bool:
    """Return whether a job is small enough for its iterations to be simulated one by one, in seconds."""
    few = _iterations(sequences, limits) <= MOST_ITERATIONS
    return few and int(sequences.output.sum()) <= MOST_SIMULATED


def _countable(sequences: Sequences, limits: EngineLimits) -> bool:
    few = _iterations(sequences, limits) <= MOST_PASSED
    return few and int(sequences.output.sum()) <= MOST_COUNTED


def _iterations(sequences: Sequences, limits: EngineLimits) -> int:
    """Return iterations that a job takes at least, by its longest completion and its prompts."""
    chunks = int(sequences.prompt.sum()) // limits.batched_tokens
    return max(int(sequences.output.max()), chunks)


def fits(sequences: Sequences, limits: EngineLimits) -> bool:
    """Return whether each request has room for its keys and values while it is alone."""
    blocks = limits.blocks
    return blocks is None or int((sequences.prompt + sequences.output).max()) <= blocks * limits.block_tokens


def choose_release(
    sequences: Sequences,
    limits: EngineLimits,
    orders: Mapping[str, IntArray],
    preferred: str,
    in_flight: int | None = None,
) -> Release:
    """
    Return the order of least predicted work: iterations, and tokens computed again after a preemption.

    orders: To choose from, by name, each of shape (sequences,).
    preferred: The one to take where several are equal, or nothing can be predicted.
    in_flight: Sequences that the client has under way at a time, each sent an iteration after another ended;
        None for so many that the engine's queue never runs empty.
    """
    names = [preferred, *(name for name in orders if name != preferred)]
    best: Release | None = None
    for name in names:
        found = Release(name, orders[name], predict(sequences, limits, orders[name], in_flight, lag=1))
        if found.predicted is None:
            return found
        if best is None or best.predicted is None or found.predicted.work < best.predicted.work:
            best = found
    assert best is not None
    return best


def shuffled_orders(tokens: IntArray, completions: int, rng: np.random.Generator) -> dict[str, IntArray]:
    """
    Return orders by decreasing tokens, each shuffled a little or a lot, by name.

    Where keys and values run out, requests that are all long together put each other back. An order between
    longest first and none lets short ones run beside long ones; which one is best, only simulation tells.

    tokens: Of each request, prompt and completions, shape (requests,).
    completions: Tokens of all completions: there are fewer orders of a larger job, whose simulation takes
        longer.
    """
    orders = {}
    for k in range(min(MOST_SHUFFLED, MOST_TRIED // max(1, completions))):
        spread = _SPREADS[k % len(_SPREADS)]
        keys = tokens * np.exp(spread * rng.normal(size=len(tokens)))
        orders[f"most tokens first, shuffled {k + 1}"] = np.argsort(-keys, kind="stable")
    return orders


class _OneSecond:
    """A device whose every iteration takes a second."""

    def run(self, work: DeviceBatch) -> float:
        """Return the second."""
        return 1.0


class _Client:
    """An engine's policy that hears of a request only when the client has sent it."""

    def __init__(self, policy: ServingPolicy, in_flight: int, lag: int) -> None:
        self._policy, self._lag = policy, lag
        self._unsent: deque[int] = deque()
        self._room = in_flight
        self._flying = self._iteration = 0
        self._ended: deque[tuple[int, int]] = deque()
        """Iterations at whose end room came to be, each with the requests there was room for."""

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        self._unsent += state.arrived
        self._iteration += 1
        if state.finished:
            self._ended.append((self._iteration, len(state.finished)))
            self._flying -= len(state.finished)
        # With nothing under way there is no iteration to wait for.
        while self._ended and (self._ended[0][0] + self._lag <= self._iteration or not self._flying):
            self._room += self._ended.popleft()[1]
        state.arrived = [self._unsent.popleft() for _ in range(min(self._room, len(self._unsent)))]
        self._room -= len(state.arrived)
        self._flying += len(state.arrived)
        return self._policy(state)


def _slots_only(
    sequences: Sequences, limits: EngineLimits, order: IntArray, in_flight: int | None = None, lag: int = 0
) -> int:
    """Return the iterations where a sequence waits for nothing but a slot, and for being sent."""
    ends = [0] * min(limits.sequences, len(order))
    flying: list[int] = []
    for rows in sequences.rows(limits)[order].tolist():
        sent = 0 if in_flight is None or len(flying) < in_flight else heapq.heappop(flying) + lag
        end = max(ends[0], sent) + rows
        heapq.heapreplace(ends, end)
        heapq.heappush(flying, end)
    return max(ends)
