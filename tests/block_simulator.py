"""vLLM's scheduler and block pool, block by block and iteration by iteration: the judge."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Block:
    name: Hashable = None
    holders: int = 0


class _Pool:
    """Free blocks in a queue, full ones by name."""

    def __init__(self, blocks: int) -> None:
        self.queue: deque[_Block] = deque(_Block() for _ in range(blocks))
        self.named: dict[Hashable, _Block] = {}

    def take(self) -> _Block:
        block = self.queue.popleft()
        if block.name is not None and self.named.get(block.name) is block:
            del self.named[block.name]
        block.name, block.holders = None, 1
        return block

    def touch(self, block: _Block) -> None:
        if not block.holders:
            self.queue.remove(block)
        block.holders += 1

    def give_back(self, blocks: Sequence[_Block]) -> None:
        full: list[_Block] = []
        part: list[_Block] = []
        for block in reversed(blocks):
            block.holders -= 1
            if not block.holders:
                (part if block.name is None else full).append(block)
        self.queue.extendleft(part)
        self.queue.extend(full)


@dataclass(eq=False)
class _Request:
    number: int
    tokens: list[Hashable]
    output: int
    generated: int = 0
    computed: int = 0
    preempted: bool = False
    blocks: list[_Block] = field(default_factory=list)

    def name(self, block: int, size: int) -> Hashable:
        return tuple(self.tokens[: (block + 1) * size])


class BlockEngine:
    """Engine to which requests are added; counts its iterations, prompt tokens, hits and preemptions."""

    def __init__(self, slots: int, budget: int, blocks: int, size: int) -> None:
        self.slots, self.budget, self.size, self.pool = slots, budget, size, _Pool(blocks)
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.iterations = self.prompt_tokens = self.preemptions = self.decodes = self.kv_tokens = 0
        self.hits = 0
        """Prompt tokens found in the cache when a request first began, as vLLM counts them."""

    def add(self, number: int, prompt: Sequence[Hashable], output: int) -> None:
        """Let a request wait."""
        self.waiting.append(_Request(number, list(prompt), output))

    def step(self) -> list[int]:
        """Run an iteration; return the numbers of requests that ended."""
        scheduled, ended = self._schedule(self.waiting, self.running), []
        assert scheduled, "a request alone exceeds the memory"
        self.iterations += 1
        for request, new in scheduled:
            decodes = request.generated > 0 and request.computed == len(request.tokens) - 1
            if decodes and not request.preempted:
                self.decodes += 1
                self.kv_tokens += request.computed + 1
            else:
                self.prompt_tokens += new
            request.computed += new
            if request.computed == len(request.tokens):
                request.preempted = False
                request.generated += 1
                request.tokens.append((request.number, request.generated))
                if request.generated == request.output:
                    self.running.remove(request)
                    self.pool.give_back(request.blocks)
                    ended.append(request.number)
        return ended

    def _schedule(self, waiting: deque[_Request], running: list[_Request]) -> list[tuple[_Request, int]]:
        budget, scheduled, preempted = self.budget, [], False
        at = 0
        while at < len(running) and budget > 0:
            request = running[at]
            new = min(len(request.tokens) - request.computed, budget)
            there = True
            while self._lacks(request, new) > len(self.pool.queue):
                victim = running.pop()
                preempted = True
                self.preemptions += 1
                self.pool.give_back(victim.blocks)
                victim.blocks, victim.computed, victim.preempted = [], 0, True
                waiting.appendleft(victim)
                if victim is request:
                    there = False
                    break
            if not there:
                break
            self._allocate(request, new)
            scheduled.append((request, new))
            budget -= new
            at += 1
        while not preempted and waiting and budget > 0 and len(running) < self.slots:
            request = waiting[0]
            hit: list[_Block] = []
            while (len(hit) + 1) * self.size < len(request.tokens):
                block = self.pool.named.get(request.name(len(hit), self.size))
                if block is None:
                    break
                hit.append(block)
            whole = -(-len(request.tokens) // self.size) - len(hit)
            if whole + sum(not block.holders for block in hit) > len(self.pool.queue):
                break
            waiting.popleft()
            running.append(request)
            for block in hit:
                self.pool.touch(block)
            request.blocks, request.computed = hit, len(hit) * self.size
            self.hits += 0 if request.preempted else request.computed
            new = min(len(request.tokens) - request.computed, budget)
            self._allocate(request, new)
            scheduled.append((request, new))
            budget -= new
        return scheduled

    def _lacks(self, request: _Request, new: int) -> int:
        return -(-(request.computed + new) // self.size) - len(request.blocks)

    def _allocate(self, request: _Request, new: int) -> None:
        for _ in range(self._lacks(request, new)):
            request.blocks.append(self.pool.take())
        for k in range(request.computed // self.size, (request.computed + new) // self.size):
            block = request.blocks[k]
            block.name = request.name(k, self.size)
            self.pool.named.setdefault(block.name, block)


class BlockSimulator(BlockEngine):
    """All requests wait at the start."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        output: Sequence[int],
        slots: int,
        budget: int,
        blocks: int,
        size: int,
    ) -> None:
        super().__init__(slots, budget, blocks, size)
        self.requests = list(zip(prompts, output, strict=True))

    def run(self, order: Sequence[int]) -> BlockSimulator:
        for number in order:
            self.add(number, *self.requests[number])
        while self.waiting or self.running:
            self.step()
        return self
