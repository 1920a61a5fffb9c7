"""vLLM's iterations counted from event to event."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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


class LeapingEngine:
    """Fast engine with the rule of chunked prefill.

    All requests are there at the start, and decisions are the same: running requests first, then new ones
    while sequences, token budget and blocks allow. If blocks run out, the request admitted last is preempted.
    Between two events (a prompt's begin or end, a completion's end, a shortage) iterations are only counted.
    A test compares the two engines.

    prompt, output: Tokens of each sequence, in order of admission.
    in_flight, lag, sent: As for :func:`~.release.predict`.
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
        self._prompt, self._output = prompt, output
        self._slots = min(limits.sequences, limits.batched_tokens)
        self._budget, self._size = limits.batched_tokens, limits.block_tokens
        whole = sum(prompt) + sum(output) + len(prompt) * self._size
        self._free = whole // self._size if limits.blocks is None else limits.blocks
        self._client = _Client(len(prompt), in_flight, lag, sent)
        self._waiting: deque[int] = deque()
        self._running: list[int] = []
        self._generated = [0] * len(prompt)
        # Per decoding request: tokens held before iteration t, minus t; and the iteration that ends it.
        self._base = [0] * len(prompt)
        self._last = [-1] * len(prompt)
        self._ends: dict[int, list[int]] = {}
        # Decoding requests by that base's remainder: the same remainder fills its blocks at the same time.
        self._phases = [0] * self._size
        self._decoding, self._bases = 0, 0
        self._partial: int | None = None
        self._partial_held = 0
        self._done = self._t = 0
        self.preemptions = self.tokens = 0
        self.ended = [0] * len(prompt)
        """Iterations up to the end of each sequence, in order of admission."""
        self._priced = False
        self._leaps: list[tuple[int, int, int]] = []
        self._mixed: list[tuple[int, int, list[tuple[int, int]], int]] = []

    def run(self, prices: IterationPrices | None = None) -> Predicted:
        """Return the prediction for all requests."""
        finished: list[int] = []
        self._priced = prices is not None
        while self._done < len(self._prompt):
            self._waiting += self._client.arrivals(finished)
            finished = self._iterate()
            for request in finished:
                self.ended[request] = self._t
        return Predicted(self._t, self.preemptions, self.tokens, self._seconds(prices))

    def _iterate(self) -> list[int]:
        """Run an iteration and its repetitions; return finished requests."""
        dropped = self._make_room()
        budget = self._budget - len(self._running)
        chunks: list[tuple[int, int, int]] = []
        if self._partial is not None:
            budget = self._go_on(budget + 1, chunks, dropped)
        if not dropped:
            self._admit(budget, chunks)
        self._waiting.extendleft(dropped)
        if chunks:
            return self._mix(chunks)
        return self._leap()

    def _make_room(self) -> list[int]:
        """Give decoding requests their blocks; return the preempted."""
        needed = self._phases[-self._t % self._size]
        if needed <= self._free:
            self._free -= needed
            return []
        dropped: list[int] = []
        full = [i for i in self._running if i != self._partial and not (self._base[i] + self._t) % self._size]
        for request in full:
            while request not in dropped and self._free < 1:
                self._drop(dropped)
            if request not in dropped:
                self._free -= 1
        return dropped

    def _drop(self, dropped: list[int]) -> None:
        victim = self._running.pop()
        if victim == self._partial:
            tokens, self._partial = self._partial_held, None
        else:
            tokens = self._base[victim] + self._t
            # Not served in this iteration: it comes after those that were.
            self._leave(victim)
            self._generated[victim] = self._output[victim] - (self._last[victim] - self._t + 1)
            self._ends[self._last[victim]].remove(victim)
        self._free += -(-tokens // self._size)
        dropped.append(victim)
        self.preemptions += 1

    def _leave(self, request: int) -> None:
        self._phases[self._base[request] % self._size] -= 1
        self._decoding -= 1
        self._bases -= self._base[request]

    def _go_on(self, budget: int, chunks: list[tuple[int, int, int]], dropped: list[int]) -> int:
        """Continue the partial prompt; return the budget left."""
        request, past = self._partial, self._partial_held
        assert request is not None
        lacks = self._prompt[request] + self._generated[request] - past
        new = min(lacks, budget)
        blocks = -(-(past + new) // self._size) - -(-past // self._size)
        if blocks > self._free:
            self._drop(dropped)
            return budget
        self._free -= blocks
        self._partial_held += new
        chunks.append((request, new, past))
        if new == lacks:
            self._partial = None
        return budget - new

    def _admit(self, budget: int, chunks: list[tuple[int, int, int]]) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._slots:
            request = self._waiting[0]
            known = self._prompt[request] + self._generated[request]
            if -(-known // self._size) > self._free:
                return
            new = min(known, budget)
            self._running.append(self._waiting.popleft())
            self._free -= -(-new // self._size)
            chunks.append((request, new, 0))
            if new < known:
                self._partial, self._partial_held = request, new
            budget -= new

    def _mix(self, chunks: list[tuple[int, int, int]]) -> list[int]:
        """Run an iteration with prompts; return finished requests."""
        now, drawing = self._t, [request for request, _, _ in chunks if request != self._partial]
        kv_tokens = self._bases + self._decoding * (now + 1)
        self.tokens += self._decoding + sum(new for _, new, _ in chunks)
        if self._priced:
            chunk_sizes = [(new, before) for _, new, before in chunks]
            self._mixed.append((self._decoding, kv_tokens, chunk_sizes, self._decoding + len(drawing)))
        self._t += 1
        over = self._end(now)
        for request in drawing:
            known = self._prompt[request] + self._generated[request]
            self._generated[request] += 1
            tokens_left = self._output[request] - self._generated[request]
            if not tokens_left:
                self._running.remove(request)
                self._free += -(-known // self._size)
                over.append(request)
                continue
            self._base[request], self._last[request] = known - self._t, now + tokens_left
            self._ends.setdefault(now + tokens_left, []).append(request)
            self._phases[self._base[request] % self._size] += 1
            self._decoding += 1
            self._bases += self._base[request]
        self._done += len(over)
        if self._partial is not None and not over:
            self._chunk_on(self._partial)
        return over

    def _chunk_on(self, request: int) -> None:
        """Run the full chunks of one prompt."""
        past, new = self._partial_held, self._budget - len(self._running) + 1
        count = (self._prompt[request] + self._generated[request] - past - 1) // new
        if self._ends:
            count = min(count, min(self._ends) - self._t)
        until = self._client.next_arrival(self._t - 1)
        if until >= 0:
            count = min(count, until - self._t)
        # Blocks are only taken: all chunks fit if their total fits.
        while count > 0 and (needed := self._chunks_need(count, new)) > self._free:
            count //= 2
        if count <= 0:
            return
        if self._priced:
            for k in range(count):
                decoding = self._bases + self._decoding * (self._t + k + 1)
                self._mixed.append((self._decoding, decoding, [(new, past + k * new)], self._decoding))
        self._free -= needed
        self._partial_held += count * new
        self.tokens += count * (self._decoding + new)
        self._t += count
        self._client.passed(count)

    def _chunks_need(self, count: int, new: int) -> int:
        """Return the blocks of ``count`` chunks of ``new`` tokens."""
        past, (cycles, rest) = self._partial_held, divmod(count, self._size)
        decoding = cycles * self._decoding + sum(
            self._phases[-(self._t + k) % self._size] for k in range(rest)
        )
        return decoding + -(-(past + count * new) // self._size) - -(-past // self._size)

    def _leap(self) -> list[int]:
        """Run iterations up to the next event; return finished requests."""
        begun, size, phases = self._t, self._size, self._phases
        last, until = min(self._ends), self._client.next_arrival(self._t)
        while self._t != last:
            self._t += 1
            # The first iteration of a leap may already hold its blocks; each later one takes its own.
            needed = phases[-self._t % size]
            if needed > self._free or self._t == until:
                break
            self._free -= needed
        else:
            self._t += 1
        count = self._t - begun
        self.tokens += count * self._decoding
        self._leaps.append((self._decoding, self._bases + self._decoding * (begun + 1), count))
        over = self._end(last) if self._t > last else []
        self._client.passed(count - 1)
        self._done += len(over)
        return over

    def _end(self, iteration: int) -> list[int]:
        """Free the blocks of ended requests, and return these."""
        over = self._ends.pop(iteration, [])
        for request in over:
            self._running.remove(request)
            self._leave(request)
            self._free += -(-(self._base[request] + iteration + 1) // self._size)
        return over

    def _seconds(self, prices: IterationPrices | None) -> float | None:
        if prices is None:
            return None
        seconds = sum(prices.mixed_seconds(*mix) for mix in self._mixed)
        if self._leaps:
            decodes, kv_tokens, count = np.array(self._leaps, dtype=np.int64).T
            which = np.repeat(np.arange(len(count)), count)
            nth = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
            seconds += float(
                prices.decode_seconds(decodes[which], kv_tokens[which] + nth * decodes[which]).sum()
            )
        return seconds


class _Client:
    """Client that keeps requests in flight, each sent late."""

    def __init__(self, count: int, in_flight: int | None, lag: int, sent: SentTogether | None) -> None:
        self._next, self._requests, self._lag = 0, count, lag
        self._sent = sent
        self._left = [] if sent is None else list(sent.choices)
        self._of = [] if sent is None else np.repeat(np.arange(len(sent.choices)), sent.choices).tolist()
        self._room = count if in_flight is None else in_flight
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
