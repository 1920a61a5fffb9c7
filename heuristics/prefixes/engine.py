"""vLLM's iterations with its prefix cache, counted from event to event over a tree of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...data.arrays import IntArray
from ...data.costs.iteration_rates import IterationRates
from ...data.iterations import EngineLimits
from .vllm_cache import BlockTree, VllmCache


@dataclass(frozen=True, slots=True)
class CachedRun:
    """Work of a simulated run.

    The fields are what seconds are priced by, as in :class:`~.iteration_minorant.Work`.

    iterations: Iterations until the last token.
    prompt_tokens: Tokens computed in chunks, with those computed again.
    decodes: Tokens computed one at a time.
    kv_tokens: Tokens held by the decoding sequences in each iteration, the new one included, summed.
    drawn: Tokens of all completions.
    preemptions: Preemptions for lack of KV cache.
    """

    iterations: int
    prompt_tokens: int
    decodes: int
    kv_tokens: int
    drawn: int
    preemptions: int

    def seconds(self, rates: IterationRates) -> float:
        """Return the seconds at some rates; pairs of tokens are left out, as no fit has them."""
        work = ("iterations", "prompt_tokens", "decodes", "kv_tokens", "drawn")
        return float(sum(getattr(rates, name) * getattr(self, name) for name in work))


class TreeEngine:
    """Fast engine with chunked prefill and a prefix cache.

    All requests wait at the start. Decisions are vLLM's: running requests first, then new ones in order while
    sequences, token budget and blocks allow. If blocks run out, the request admitted last is preempted.
    Between two events (a prompt's begin or end, a completion's end, a shortage) iterations are only counted.

    output: Tokens of each completion, at least one, shape (requests,).
    order: Positions of the requests in order of admission.
    """

    def __init__(
        self, tree: BlockTree, output: Sequence[int] | IntArray, limits: EngineLimits, order: Sequence[int]
    ) -> None:
        self._prompt: list[int] = tree.prompt.tolist()
        self._output = list(map(int, output))
        self._slots = min(limits.sequences, limits.batched_tokens)
        self._budget, self._size = limits.batched_tokens, limits.block_tokens
        whole = sum(self._prompt) + sum(self._output) + len(self._prompt) * self._size
        blocks = whole // self._size if limits.blocks is None else limits.blocks
        self.cache = VllmCache(tree, blocks, self._size)
        self._waiting: deque[int] = deque(order)
        self._running: dict[int, None] = {}
        self._generated = [0] * len(self._prompt)
        # Per decoding request: tokens held before iteration t, minus t; and the iteration that ends it.
        self._base, self._last = [0] * len(self._prompt), [-1] * len(self._prompt)
        self._admitted, self._admissions = [0] * len(self._prompt), 0
        self._ends: dict[int, list[int]] = {}
        # Decoding requests by that base's remainder: the same remainder fills its blocks at the same time.
        self._phases = [0] * self._size
        self._decoding, self._bases = 0, 0
        self._partial: int | None = None
        self._partial_held = 0
        self._done = self._t = 0
        self._prompt_tokens = self._decodes = self._kv_tokens = self._preemptions = 0
        self.ends: list[tuple[int, int, int, int, int]] = []
        """Request, and iterations, decodes, prompt tokens and KV tokens up to its end, in order of ends."""

    def run(self) -> CachedRun:
        """Return the work of all requests; raise ValueError if one alone exceeds the memory."""
        for _ in self.events():
            pass
        return self.result

    def events(self) -> Iterator[int]:
        """Run all requests; yield the iterations so far after each event."""
        while self._done < len(self._prompt):
            self._iterate()
            yield self._t

    @property
    def result(self) -> CachedRun:
        """The work so far."""
        return CachedRun(
            self._t,
            self._prompt_tokens,
            self._decodes,
            self._kv_tokens,
            sum(self._output),
            self._preemptions,
        )

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
        cache = self.cache
        if needed <= cache.free:
            if needed:
                cache.take(needed)
            return []
        dropped: list[int] = []
        full = [i for i in self._running if i != self._partial and not (self._base[i] + self._t) % self._size]
        for request in full:
            while request in self._running and cache.free < 1:
                self._drop(dropped)
            if request in self._running:
                cache.take(1)
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
        self.cache.give_back(victim, held)
        dropped.append(victim)
        self._preemptions += 1

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
        if blocks > self.cache.free:
            self._drop(dropped)
            return budget
        self.cache.take(blocks)
        self._partial_held += new
        self._prompt_tokens += new
        if new == lacks:
            self._partial = None
            drawing.append(request)
        return budget - new

    def _admit(self, budget: int, drawing: list[int]) -> None:
        cache = self.cache
        while self._waiting and budget > 0 and len(self._running) < self._slots:
            request = self._waiting[0]
            known = self._prompt[request] + self._generated[request]
            hit, free = cache.hit(request)
            # vLLM admits a request once its whole prompt would fit.
            if -(-known // self._size) - hit + free > cache.free:
                return
            held = hit * self._size
            new = min(known - held, budget)
            self._running[self._waiting.popleft()] = None
            self._admitted[request] = self._admissions = self._admissions + 1
            cache.hold(request, free)
            cache.take(-(-(held + new) // self._size) - hit)
            self._prompt_tokens += new
            if held + new < known:
                self._partial, self._partial_held = request, held + new
            else:
                drawing.append(request)
            budget -= new

    def _mix(self, drawing: list[int]) -> None:
        """Run an iteration with prompts."""
        now = self._t
        self._kv_tokens += self._bases + self._decoding * (now + 1)
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
            self.cache.give_back(request, held)
            self.ends.append((request, self._t, self._decodes, self._prompt_tokens, self._kv_tokens))
        self._done += len(over)

    def _chunk_on(self, request: int) -> None:
        """Run the full chunks of one prompt."""
        held, new = self._partial_held, self._budget - len(self._running) + 1
        count = (self._prompt[request] + self._generated[request] - held - 1) // new
        if self._ends:
            count = min(count, min(self._ends) - self._t)
        # Blocks are only taken: all chunks fit if their total fits.
        while count > 0 and (needed := self._chunks_need(count, new)) > self.cache.free:
            count //= 2
        if count <= 0:
            return
        self._kv_tokens += count * self._bases + self._decoding * _sum(self._t + 1, count)
        self._decodes += count * self._decoding
        self.cache.take(needed)
        self._partial_held += count * new
        self._prompt_tokens += count * new
        self._t += count

    def _chunks_need(self, count: int, new: int) -> int:
        """Return the blocks of ``count`` chunks of ``new`` tokens."""
        held, (cycles, rest) = self._partial_held, divmod(count, self._size)
        decoding = cycles * self._decoding
        decoding += sum(self._phases[-(self._t + k) % self._size] for k in range(rest))
        return decoding + -(-(held + count * new) // self._size) - -(-held // self._size)

    def _leap(self) -> None:
        """Run iterations up to the next event."""
        begun, size, phases = self._t, self._size, self._phases
        last, free, taken, t = min(self._ends), self.cache.free, 0, self._t
        while t != last:
            # The first iteration of a leap already holds its blocks; each later one takes its own.
            needed = phases[-(t + 1) % size]
            if taken + needed > free:
                t += 1
                break
            taken += needed
            t += 1
        else:
            t += 1
        count = t - begun
        self.cache.take(taken)
        self._kv_tokens += count * self._bases + self._decoding * _sum(begun + 1, count)
        self._decodes += count * self._decoding
        self._t = t
        if t > last:
            over = [(request, self._base[request] + last + 1) for request in self._ends.pop(last)]
            for request, _ in over:
                self._leave(request)
            self._end(over)


def _sum(first: int, count: int) -> int:
    """Return the sum of ``count`` numbers from ``first`` on."""
    return count * first + count * (count - 1) // 2
