"""Order of sending to a mixing engine, chosen by simulation."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...data.arrays import IntArray
from ...data.iterations import EngineLimits, Predicted, Sequences
from ...data.objective import Goal
from ...data.workload import Workload
from ..prefixes.leaps import IterationPrices, LeapingEngine, SentTogether
from .chunked_prefill import ChunkedPrefill
from .device import DeviceBatch, ServingDevice
from .kv_ledger import KvLedger
from .policy import ServingPolicy, ServingState, ServingStep
from .simulation import serve_on_device

MOST_SIMULATED = 3_000_000
"""Most completion tokens that are simulated iteration by iteration."""

MOST_ITERATIONS = 200_000
"""Most iterations of such a job."""


MOST_SHUFFLED = 64
"""Most shuffled orders to try when KV memory binds."""

MOST_TRIED = 20_000_000
"""Most completion tokens over all shuffled orders."""

MOST_COUNTED, MOST_PASSED = 30_000_000, 2_000_000
"""Most completion tokens, and iterations, counted from event to event."""

_SPREADS = (0.3, 0.5, 0.7, 0.9)
"""Deviations of the log-normal noise in shuffled orders."""


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """Order in which requests are sent.

    order: Positions of the requests, shape (requests,).
    predicted: Simulated run of the engine, or None for a job too large.
    after: Completions after which each request of the order is sent, shape (requests,); None sends it as soon
        as the number in flight allows.
    """

    name: str
    order: IntArray
    predicted: Predicted | None
    after: IntArray | None = None


def predict(
    sequences: Sequences,
    limits: EngineLimits,
    order: Sequence[int] | IntArray,
    in_flight: int | None = None,
    lag: int = 0,
    prices: IterationPrices | None = None,
    sent: SentTogether | None = None,
    goal: Goal | None = None,
) -> Predicted | None:
    """Predict an engine's iterations for an order.

    Iterations are counted as vLLM schedules them, from event to event. In a job beyond :data:`MOST_COUNTED`
    or :data:`MOST_PASSED` with ample KV memory, each sequence takes the first free slot, and seconds are not
    predicted. Returns None for such a job if KV memory may run out, and if one request alone exceeds it.

    order: Positions of the sequences in order of admission, shape (sequences,).
    in_flight: Sequences that the client keeps in flight; None if all are there at the start.
    lag: Iterations between the end of one sequence and the arrival of the next.
    prices: Seconds of iterations; None predicts none.
    sent: Requests of several sequences, in that order; None if each sequence is a request of its own.
    goal: Objective other than the makespan; its value is predicted of jobs within these limits alone.
    """
    order = np.asarray(order, dtype=np.int64)
    if not fits(sequences, limits):
        return None
    if not _countable(sequences, limits):
        if sequences.may_run_short(limits) or goal is not None:
            return None
        return Predicted(_slots_only(sequences, limits, order, in_flight, lag))
    prompt, output = sequences.prompt[order].tolist(), sequences.output[order].tolist()
    engine = LeapingEngine(prompt, output, limits, in_flight, lag, sent)
    predicted = engine.run(prices)
    if goal is None:
        return predicted
    ended = np.empty(len(order), dtype=np.int64)
    ended[order] = engine.ended
    return replace(predicted, value=int(goal.value(ended)))


def simulated(
    sequences: Sequences,
    limits: EngineLimits,
    in_flight: int | None = None,
    lag: int = 0,
    device: ServingDevice | None = None,
    goal: Goal | None = None,
) -> Predicted:
    """Simulate sequences in their order, with a referee.

    device: Seconds of each iteration; None predicts none.
    goal: Objective other than the makespan, for iterations without seconds.

    Raises ServingError if a sequence alone exceeds the KV capacity.
    """
    work = Workload.from_lengths(sequences.prompt, sequences.output)
    policy, ledger = engine_of(work, limits)
    client: ServingPolicy = policy if in_flight is None else _Client(policy, in_flight, lag)
    run = serve_on_device(work, client, _OneSecond() if device is None else device, ledger)
    tokens = int(run.decodes.sum() + run.prompt_tokens.sum())
    seconds = None if device is None else float(run.finished.max())
    # Iterations of one second each.
    value = None if goal is None else round(goal.value(run.finished))
    return Predicted(len(run.start), policy.preemptions, tokens, seconds, value)


def engine_of(work: Workload, limits: EngineLimits) -> tuple[ChunkedPrefill, KvLedger]:
    """Return an engine's rule and memory."""
    reserved = work.input_tokens + work.output_tokens + limits.block_tokens
    capacity = int(reserved.sum()) if limits.kv_tokens is None else limits.kv_tokens
    policy = ChunkedPrefill(limits.batched_tokens, min(limits.sequences, limits.batched_tokens))
    return policy, KvLedger(capacity, len(work), limits.block_tokens)


def simulable(sequences: Sequences, limits: EngineLimits) -> bool:
    """Return whether a job can be simulated within seconds."""
    few = _iterations(sequences, limits) <= MOST_ITERATIONS
    return few and int(sequences.output.sum()) <= MOST_SIMULATED


def _countable(sequences: Sequences, limits: EngineLimits) -> bool:
    few = _iterations(sequences, limits) <= MOST_PASSED
    return few and int(sequences.output.sum()) <= MOST_COUNTED


def _iterations(sequences: Sequences, limits: EngineLimits) -> int:
    chunks = int(sequences.prompt.sum()) // limits.batched_tokens
    return max(int(sequences.output.max()), chunks)


def fits(sequences: Sequences, limits: EngineLimits) -> bool:
    """Return whether each request alone fits the memory."""
    blocks = limits.blocks
    return blocks is None or int((sequences.prompt + sequences.output).max()) <= blocks * limits.block_tokens


def choose_release(
    sequences: Sequences,
    limits: EngineLimits,
    orders: Mapping[str, IntArray],
    preferred: str,
    in_flight: int | None = None,
    sent: Mapping[str, SentTogether] | None = None,
) -> Release:
    """Return the order of least predicted work.

    Work is iterations and recomputed tokens.

    orders: Candidates by name, each of shape (sequences,).
    preferred: Candidate to take on a tie or without predictions.
    in_flight: Sequences that the client keeps in flight; None if the engine's queue never runs empty.
    sent: Requests of several sequences in each order, by its name.
    """
    names = [preferred, *(name for name in orders if name != preferred)]
    best: Release | None = None
    for name in names:
        together = None if sent is None else sent[name]
        predicted = predict(sequences, limits, orders[name], in_flight, lag=1, sent=together)
        release = Release(name, orders[name], predicted)
        if release.predicted is None:
            return release
        if best is None or best.predicted is None or release.predicted.work < best.predicted.work:
            best = release
    assert best is not None
    return best


def shuffled_orders(tokens: IntArray, completions: int, rng: np.random.Generator) -> dict[str, IntArray]:
    """Return orders by decreasing tokens, each shuffled differently.

    When KV memory binds, requests that are all long preempt each other. A partly shuffled order mixes short
    with long ones, and only simulation tells the best amount.

    tokens: Prompt and completions of each request, shape (requests,).
    completions: Tokens of all completions; larger jobs get fewer orders, as they simulate slowly.
    """
    orders = {}
    for k in range(min(MOST_SHUFFLED, MOST_TRIED // max(1, completions))):
        spread = _SPREADS[k % len(_SPREADS)]
        keys = tokens * np.exp(spread * rng.normal(size=len(tokens)))
        orders[f"most tokens first, shuffled {k + 1}"] = np.argsort(-keys, kind="stable")
    return orders


class _OneSecond:
    """Device with iterations of one second."""

    def run(self, work: DeviceBatch) -> float:
        return 1.0


class _Client:
    """Policy that sees requests only once the client has sent them."""

    def __init__(self, policy: ServingPolicy, in_flight: int, lag: int) -> None:
        self._policy, self._lag = policy, lag
        self._unsent: deque[int] = deque()
        self._room = in_flight
        self._flying = self._iteration = 0
        self._ended: deque[tuple[int, int]] = deque()
        """Iterations that freed room, each with the number of requests there was room for."""

    def __call__(self, state: ServingState) -> ServingStep:
        self._unsent += state.arrived
        self._iteration += 1
        if state.finished:
            self._ended.append((self._iteration, len(state.finished)))
            self._flying -= len(state.finished)
        # If nothing runs, no iteration can be waited for.
        while self._ended and (self._ended[0][0] + self._lag <= self._iteration or not self._flying):
            self._room += self._ended.popleft()[1]
        state.arrived = [self._unsent.popleft() for _ in range(min(self._room, len(self._unsent)))]
        self._room -= len(state.arrived)
        self._flying += len(state.arrived)
        return self._policy(state)


def _slots_only(
    sequences: Sequences, limits: EngineLimits, order: IntArray, in_flight: int | None = None, lag: int = 0
) -> int:
    """Return the iterations if only slots and the client limit."""
    ends = [0] * min(limits.sequences, len(order))
    flying: list[int] = []
    for rows in sequences.rows(limits)[order].data:
        sent = 0 if in_flight is None or len(flying) < in_flight else heapq.heappop(flying) + lag
        end = max(ends[0], sent) + rows
        heapq.heapreplace(ends, end)
        if in_flight is not None:
            heapq.heappush(flying, end)
    return max(ends)
