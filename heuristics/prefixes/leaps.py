"""vLLM's iterations counted from event to event."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.iterations import EngineLimits, Predicted


class IterationPrices(Protocol):
    """Cost of iterations in seconds."""

    def decode_seconds(self, decodes: IntArray, held: IntArray) -> FloatArray:
        """Return the seconds of iterations without prompts, shape (iterations,).

        decodes: Sequences that generate a token, shape (iterations,).
        held: Tokens of KV cache that they hold together after the iteration, shape (iterations,).
        """
        ...

    def mixed_seconds(self, decodes: int, held: int, chunks: Sequence[tuple[int, int]], drawn: int) -> float:
        """Return the seconds of an iteration with prompts.

        decodes, held: Sequences that generate a token, and the tokens they hold together.
        chunks: New tokens, and tokens held before, of each prompt.
        drawn: Sequences that sample a token.
        """
        ...


@dataclass(frozen=True, slots=True)
class SentTogether:
    """Sequences of one request, which end together for their client.

    choices: Sequences of each request, in order of admission.
    weight: Sequences of it that the client counts as in flight until the last one ends.
    """

    choices: Sequence[int]
    weight: Sequence[int]


class Client(Protocol):
    """Sender of requests while others run."""

    def arrivals(self, finished: Sequence[int]) -> Sequence[int]:
        """Return the requests that arrive before the next iteration, after some finished."""
        ...

    def next_arrival(self, iteration: int) -> int:
        """Return the iteration of the next arrival that is due, or -1."""
        ...

    def passed(self, iterations: int) -> None:
        """Note that iterations passed without an event."""
        ...


class Memory(Protocol):
    """Blocks of KV cache, and what they keep of earlier prompts."""

    free: int

    def hit(self, request: int) -> tuple[int, int]:
        """Return the kept blocks of a request's prompt, and how many of them count as free."""
        ...

    def hold(self, request: int, free: int) -> None:
        """Hold what is kept of a request's prompt, of which ``free`` blocks counted as free."""
        ...

    def take(self, blocks: int) -> None:
        """Take free blocks."""
        ...

    def give_back(self, request: int, held: int) -> None:
        """Free the blocks of a request that held this many tokens."""
        ...


@dataclass(slots=True)
class _Blocks:
    """Blocks that keep nothing."""

    free: int
    size: int

    def hit(self, request: int) -> tuple[int, int]:
        return 0, 0

    def hold(self, request: int, free: int) -> None:
        """Hold nothing."""

    def take(self, blocks: int) -> None:
        self.free -= blocks

    def give_back(self, request: int, held: int) -> None:
        self.free += -(-held // self.size)


class EventEngine:
    """Fast engine with the rule of chunked prefill.

    Decisions are vLLM's: running requests first, then new ones in order while sequences, token budget and
    blocks allow. If blocks run out, the request admitted last is preempted. Between two events (a prompt's
    begin or end, a completion's end, a shortage) iterations are only counted.

    prompt, output: Tokens of each request; each completion has at least one.
    order: Requests that wait at the start, in order of admission.
    memory: Blocks; None for those of the limits, without a prefix cache.
    client: Sender of further requests; None without any.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        limits: EngineLimits,
        order: Iterable[int],
        memory: Memory | None = None,
        client: Client | None = None,
    ) -> None:
        self._prompt, self._output = prompt, output
        self._slots = min(limits.sequences, limits.batched_tokens)
        self._budget, self._size = limits.batched_tokens, limits.block_tokens
        self._memory = memory or _Blocks(blocks_of(prompt, output, limits), self._size)
        self._client = client
        self._waiting: deque[int] = deque(order)
        self._running: dict[int, None] = {}
        self._generated = [0] * len(prompt)
        # Per decoding request: tokens held before iteration t, minus t; and the iteration that ends it.
        self._base, self._last = [0] * len(prompt), [-1] * len(prompt)
        self._admitted, self._admissions = [0] * len(prompt), 0
        self._ends: dict[int, list[int]] = {}
        # Decoding requests by that base's remainder: the same remainder fills its blocks at the same time.
        self._phases = [0] * self._size
        self._decoding, self._bases = 0, 0
        self._partial: int | None = None
        self._partial_held = 0
        self._done = self._t = 0
        self._prompt_tokens = self._decodes = self._kv_tokens = self.preemptions = 0
        self.ends: list[tuple[int, int, int, int, int]] = []
        """Request, and iterations, decodes, prompt tokens and KV tokens up to its end, in order of ends."""
        self._priced = False
        self._leaps: list[tuple[int, int, int]] = []
        self._chunks: list[tuple[int, int]] = []
        self._mixed: list[tuple[int, int, list[tuple[int, int]], int]] = []

    def events(self) -> Iterator[int]:
        """Run all requests; yield the iterations so far after each event."""
        seen = 0
        while self._done < len(self._prompt):
            if self._client is not None:
                self._waiting += self._client.arrivals([end[0] for end in self.ends[seen:]])
                seen = len(self.ends)
            self._iterate()
            yield self._t

    def _iterate(self) -> None:
        """Run an iteration and its repetitions."""
        dropped = self._make_room()
        budget = self._budget - len(self._running)
        drawing: list[int] = []
        before = self._prompt_tokens
        if self._partial is not None:
            budget = self._go_on(budget + 1, drawing, dropped)
        if not dropped:
            self._admit(budget, drawing)
        self._waiting.extendleft(dropped)
        if self._prompt_tokens > before:
            self._mix(drawing)
        elif self._decoding:
            self._leap()
        else:
            raise ValueError("a request alone exceeds the KV cache")

    def _make_room(self) -> list[int]:
        """Give decoding requests their blocks; return the preempted."""
        needed = self._phases[-self._t % self._size]
        memory = self._memory
        if needed <= memory.free:
            if needed:
                memory.take(needed)
            return []
        dropped: list[int] = []
        full = [i for i in self._running if i != self._partial and not (self._base[i] + self._t) % self._size]
        for request in full:
            while request in self._running and memory.free < 1:
                self._drop(dropped)
            if request in self._running:
                memory.take(1)
        return dropped

    def _drop(self, dropped: list[int]) -> None:
        victim, _ = self._running.popitem()
        if victim == self._partial:
            held, self._partial = self._partial_held, None
        else:
            held = self._base[victim] + self._t
            self._leave(victim)
            self._generated[victim] = self._output[victim] - (self._last[victim] - self._t + 1)
            self._ends[self._last[victim]].remove(victim)
        self._memory.give_back(victim, held)
        dropped.append(victim)
        self.preemptions += 1

    def _leave(self, request: int) -> None:
        self._phases[self._base[request] % self._size] -= 1
        self._decoding -= 1
        self._bases -= self._base[request]

    def _go_on(self, budget: int, drawing: list[int], dropped: list[int]) -> int:
        """Continue the partial prompt; return the budget left."""
        request, held = self._partial, self._partial_held
        assert request is not None
        lacks = self._prompt[request] + self._generated[request] - held
        new = min(lacks, budget)
        blocks = -(-(held + new) // self._size) - -(-held // self._size)
        if blocks > self._memory.free:
            self._drop(dropped)
            return budget
        self._memory.take(blocks)
        self._partial_held += new
        self._prompt_tokens += new
        if self._priced:
            self._chunks.append((new, held))
        if new == lacks:
            self._partial = None
            drawing.append(request)
        return budget - new

    def _admit(self, budget: int, drawing: list[int]) -> None:
        memory = self._memory
        while self._waiting and budget > 0 and len(self._running) < self._slots:
            request = self._waiting[0]
            known = self._prompt[request] + self._generated[request]
            hit, free = memory.hit(request)
            # vLLM admits a request once its whole prompt would fit.
            if -(-known // self._size) - hit + free > memory.free:
                return
            held = hit * self._size
            new = min(known - held, budget)
            self._running[self._waiting.popleft()] = None
            self._admitted[request] = self._admissions = self._admissions + 1
            memory.hold(request, free)
            memory.take(-(-(held + new) // self._size) - hit)
            self._prompt_tokens += new
            if self._priced:
                self._chunks.append((new, held))
            if held + new < known:
                self._partial, self._partial_held = request, held + new
            else:
                drawing.append(request)
            budget -= new

    def _mix(self, drawing: list[int]) -> None:
        """Run an iteration with prompts."""
        now, kv_tokens = self._t, self._bases + self._decoding * (self._t + 1)
        if self._priced:
            self._mixed.append((self._decoding, kv_tokens, self._chunks, self._decoding + len(drawing)))
            self._chunks = []
        self._kv_tokens += kv_tokens
        self._decodes += self._decoding
        self._t += 1
        over = [(request, self._base[request] + now + 1) for request in self._ends.pop(now, ())]
        for request, _ in over:
            self._leave(request)
        for request in drawing:
            known = self._prompt[request] + self._generated[request]
            self._generated[request] += 1
            left = self._output[request] - self._generated[request]
            if not left:
                over.append((request, known))
                continue
            self._base[request], self._last[request] = known - self._t, now + left
            self._ends.setdefault(now + left, []).append(request)
            self._phases[self._base[request] % self._size] += 1
            self._decoding += 1
            self._bases += self._base[request]
        self._end(over)
        if self._partial is not None and not over:
            self._chunk_on(self._partial)

    def _end(self, over: list[tuple[int, int]]) -> None:
        """Free the blocks of requests that ended, in order of admission."""
        for request, held in sorted(over, key=lambda end: self._admitted[end[0]]) if len(over) > 1 else over:
            del self._running[request]
            self._memory.give_back(request, held)
            self.ends.append((request, self._t, self._decodes, self._prompt_tokens, self._kv_tokens))
        self._done += len(over)

    def _chunk_on(self, request: int) -> None:
        """Run the full chunks of one prompt."""
        held, new = self._partial_held, self._budget - len(self._running) + 1
        count = (self._prompt[request] + self._generated[request] - held - 1) // new
        if self._ends:
            count = min(count, min(self._ends) - self._t)
        if self._client is not None and (until := self._client.next_arrival(self._t - 1)) >= 0:
            count = min(count, until - self._t)
        # Blocks are only taken: all chunks fit if their total fits.
        while count > 0 and (needed := self._chunks_need(count, new)) > self._memory.free:
            count //= 2
        if count <= 0:
            return
        if self._priced:
            for k in range(count):
                kv_tokens = self._bases + self._decoding * (self._t + k + 1)
                self._mixed.append((self._decoding, kv_tokens, [(new, held + k * new)], self._decoding))
        self._kv_tokens += count * self._bases + self._decoding * _sum(self._t + 1, count)
        self._decodes += count * self._decoding
        self._memory.take(needed)
        self._partial_held += count * new
        self._prompt_tokens += count * new
        self._t += count
        if self._client is not None:
            self._client.passed(count)

    def _chunks_need(self, count: int, new: int) -> int:
        """Return the blocks of ``count`` chunks of ``new`` tokens."""
        held, (cycles, rest) = self._partial_held, divmod(count, self._size)
        decoding = cycles * self._decoding
        decoding += sum(self._phases[-(self._t + k) % self._size] for k in range(rest))
        return decoding + -(-(held + count * new) // self._size) - -(-held // self._size)

    def _leap(self) -> None:
        """Run iterations up to the next event."""
        begun, size, phases = self._t, self._size, self._phases
        last, free, taken, t = min(self._ends), self._memory.free, 0, self._t
        until = -1 if self._client is None else self._client.next_arrival(t)
        while t != last:
            # The first iteration of a leap already holds its blocks; each later one takes its own.
            needed = phases[-(t + 1) % size]
            t += 1
            if taken + needed > free or t == until:
                break
            taken += needed
        else:
            t += 1
        count = t - begun
        self._memory.take(taken)
        if self._priced:
            self._leaps.append((self._decoding, self._bases + self._decoding * (begun + 1), count))
        if self._client is not None:
            self._client.passed(count - 1)
        self._kv_tokens += count * self._bases + self._decoding * _sum(begun + 1, count)
        self._decodes += count * self._decoding
        self._t = t
        if t > last:
            over = [(request, self._base[request] + last + 1) for request in self._ends.pop(last)]
            for request, _ in over:
                self._leave(request)
            self._end(over)

    def _seconds(self, prices: IterationPrices) -> float:
        seconds = sum(prices.mixed_seconds(*mix) for mix in self._mixed)
        if self._leaps:
            decodes, kv_tokens, count = np.array(self._leaps, dtype=np.int64).T
            which = np.repeat(np.arange(len(count)), count)
            nth = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
            seconds += float(
                prices.decode_seconds(decodes[which], kv_tokens[which] + nth * decodes[which]).sum()
            )
        return seconds


class LeapingEngine(EventEngine):
    """Fast engine without a prefix cache, whose client keeps a number of requests in flight.

    in_flight, lag, sent: As for :func:`~batchbound.heuristics.serving.release.predict`.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        limits: EngineLimits,
        in_flight: int | None = None,
        lag: int = 0,
        sent: SentTogether | None = None,
    ) -> None:
        client = None if in_flight is None else _Client(len(prompt), in_flight, lag, sent)
        super().__init__(prompt, output, limits, range(len(prompt)) if client is None else (), client=client)

    def run(self, prices: IterationPrices | None = None) -> Predicted:
        """Return the prediction for all requests."""
        self._priced = prices is not None
        for _ in self.events():
            pass
        seconds = None if prices is None else self._seconds(prices)
        return Predicted(self._t, self.preemptions, self._prompt_tokens + self._decodes, seconds)

    @property
    def ended(self) -> list[int]:
        """Iterations up to the end of each sequence, in order of admission."""
        return [iterations for _, iterations in sorted(end[:2] for end in self.ends)]


def blocks_of(prompt: Sequence[int], output: Sequence[int], limits: EngineLimits) -> int:
    """Return the blocks of an engine; without a limit as many as all requests fill."""
    whole = sum(prompt) + sum(output) + len(prompt) * limits.block_tokens
    return whole // limits.block_tokens if limits.blocks is None else limits.blocks


def _sum(first: int, count: int) -> int:
    """Return the sum of ``count`` numbers from ``first`` on."""
    return count * first + count * (count - 1) // 2


class _Client:
    """Client that keeps requests in flight, each sent late."""

    def __init__(self, count: int, in_flight: int, lag: int, sent: SentTogether | None) -> None:
        self._next, self._requests, self._lag = 0, count, lag
        self._sent = sent
        self._left = [] if sent is None else list(sent.choices)
        self._of = [] if sent is None else np.repeat(np.arange(len(sent.choices)), sent.choices).tolist()
        self._room = in_flight
        self._flying = self._iteration = 0
        self._ended: deque[tuple[int, int]] = deque()

    def arrivals(self, finished: Sequence[int]) -> range:
        """Return the sequences that arrive next."""
        self._iteration += 1
        if finished:
            freed = self._freed(finished)
            self._ended.append((self._iteration, freed))
            self._flying -= freed
        while self._ended and (self._ended[0][0] + self._lag <= self._iteration or not self._flying):
            self._room += self._ended.popleft()[1]
        first = self._next
        while self._next < self._requests:
            count, weight = self._due()
            if weight > self._room and (self._flying or weight == 1):
                break
            self._next += count
            self._room -= weight
            self._flying += weight
        return range(first, self._next)

    def _due(self) -> tuple[int, int]:
        """Return the next request's sequences, and its weight in flight."""
        if self._sent is None:
            return 1, 1
        request = self._of[self._next]
        return self._sent.choices[request], self._sent.weight[request]

    def _freed(self, finished: Sequence[int]) -> int:
        """Return the weight in flight of the requests that ended."""
        if self._sent is None:
            return len(finished)
        freed = 0
        for sequence in finished:
            request = self._of[sequence]
            self._left[request] -= 1
            freed += 0 if self._left[request] else self._sent.weight[request]
        return freed

    def next_arrival(self, iteration: int) -> int:
        if not self._ended or self._next == self._requests:
            return -1
        return iteration + self._ended[0][0] + self._lag - self._iteration

    def passed(self, iterations: int) -> None:
        self._iteration += iterations
