"""First come, first served with evictions, counted from event to event.

It makes the steps of the policy ``fcfs`` on the simulator, or of ``learned`` on a job without groups, without
arrays: thirty times as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from ...data.kept_beginnings import CountedAhead, HeldBeginnings, KeptBeginnings, path_of
from ...data.problem import Problem
from .admission import FULL_STAGE, WATERMARK
from .prefill_rules import Opportunity, PrefillRule

EVENTS = 256
"""Events between looks at the clock."""


@dataclass(frozen=True, slots=True)
class FirstCome:
    """Counts of a run."""

    seconds: float
    prefill_stages: int
    decode_steps: int
    evictions: int


def can_count(problem: Problem) -> bool:
    """Return whether runs are counted: no arrival times."""
    return not problem.workload.arrival.any()


def first_come(
    problem: Problem,
    late: Callable[[], bool] = lambda: False,
    *,
    keeps_kv: bool = False,
    rule: PrefillRule | None = None,
) -> FirstCome | None:
    """Return the counts of a run of first come, first served; None if late.

    keeps_kv: True if the engine keeps the KV cache of evicted requests, and computes nothing again.
    rule: Start of a stage while requests run; None starts it at once.
    """
    run, events = _Run(problem, keeps_kv=keeps_kv, rule=rule), 0
    while run.left:
        events += 1
        if events % EVENTS == 0 and late():
            return None
        if not run.evict() and not run.prefill():
            run.decode()
    return FirstCome(run.seconds, run.stages, run.steps, run.evictions)


class _Tree:
    """Shared beginnings of a run: kept, held once by running requests, and those of coming stages."""

    def __init__(self, problem: Problem) -> None:
        assert problem.tree is not None
        self.kept, self.held, self.ahead = (
            KeptBeginnings(problem),
            HeldBeginnings(problem),
            CountedAhead(problem),
        )
        self._parent, self._leaf = problem.tree.parent.tolist(), problem.tree.leaf.tolist()
        self.readers = [0] * len(self._parent)
        """Running requests below each node."""

    def path(self, request: int) -> list[int]:
        """Return the nodes of a request's prompt."""
        return path_of(self._parent, self._leaf[request])

    def count(self, request: int, change: int) -> None:
        """Count a running request that begins (1) or ends (-1)."""
        for node in self.path(request):
            self.readers[node] += change


class _Run:
    """State of a run: requests wait by position, and the newest is evicted first.

    running: Entry, first step less the tokens held then, and position of each; ended ones stay until they
        are met.
    ends: Last step, entry and position of each, a heap.
    """

    def __init__(self, problem: Problem, *, keeps_kv: bool, rule: PrefillRule | None) -> None:
        self._problem, self._keeps_kv, self._rule = problem, keeps_kv, rule
        self._idle = self._idling = self._asked = self._wait = 0
        self._cost, self._slots = problem.cost, problem.slots
        self._prompts: list[int] = problem.prompt_tokens.tolist()
        self._lengths: list[int] = problem.decode_steps.tolist()
        self._whole, self._held_at_start = problem.kv_at_start.tolist(), problem.held_at_start.tolist()
        # Tokens that requests share with none once they were evicted, though others begin alike.
        self._apart = [0] * len(problem)
        self._tree = None if problem.tree is None else _Tree(problem)
        self._context = 0
        self._cap, self._capacity = problem.prefill_token_cap, problem.kv_capacity
        self._room = 0 if self._capacity is None else int(self._capacity * (1 - WATERMARK))
        self._decoded = [0] * len(problem)
        self._entered = [0] * len(problem)
        self._returned: list[int] = []
        self._next = self._entries = self._held = self._active = 0
        self._running: list[tuple[int, int, int]] = []
        self._ends: list[tuple[int, int, int]] = []
        self.left, self.seconds = len(problem), 0.0
        self.stages = self.steps = self.evictions = 0

    def evict(self) -> bool:
        """Evict the newest requests if memory is short; return whether any was."""
        if self._capacity is None or self._held <= self._capacity or self._active <= 1:
            return False
        over, evicted = self._held - self._capacity, list[int]()
        while over > 0 and self._active > 1:
            entry, since, request = self._running.pop()
            if self._entered[request] != entry:
                continue
            held = self.steps - since
            over -= held
            self._decoded[request] = held - self._held_at_start[request] - self._apart[request]
            # Known as entered before, but not running.
            self._entered[request] = -entry
            self._leave(request, self._decoded[request])
            self._apart[request] = self._whole[request] - self._held_at_start[request]
            self.evictions += 1
            evicted.append(request)
            heappush(self._returned, request)
        if self._tree is not None:
            self._tree.kept.end(evicted)
        return True

    def _enter(self, request: int, decoded: int) -> int:
        """Count what a request holds; return the tokens that it holds for itself."""
        alone: int = self._held_at_start[request] + self._apart[request] + decoded
        self._held += alone + self._share(request, 1)
        self._context += self._whole[request] + decoded
        self._active += 1
        if self._tree is not None:
            self._tree.count(request, 1)
        return alone

    def _leave(self, request: int, decoded: int) -> None:
        """Count what a request holds no more."""
        self._held -= self._held_at_start[request] + self._apart[request] + decoded
        self._held += self._share(request, -1)
        self._context -= self._whole[request] + decoded
        self._active -= 1
        if self._tree is not None:
            self._tree.count(request, -1)

    def _share(self, request: int, change: int) -> int:
        """Count a request that begins (1) or ends (-1); return the change of shared tokens held."""
        if self._tree is None or self._apart[request]:
            return 0
        before = self._tree.held.tokens
        self._tree.held.count([request], change)
        return self._tree.held.tokens - before

    def prefill(self) -> bool:
        """Start what fits; return whether anything did."""
        self._idle += self._idling * (self.steps - self._asked)
        self._asked, self._idling, self._wait = self.steps, 0, 0
        chosen, full = self._fitting()
        if not chosen or self._waits(chosen, full):
            return False
        self._idle = 0
        for _ in chosen:
            self._take()
        tokens, ended = self._computed(chosen), list[int]()
        self.seconds += self._cost.prefill_seconds(tokens) if tokens else 0.0
        self.stages += 1
        for request in chosen:
            self._entries += 1
            steps_left = self._lengths[request] - self._decoded[request]
            self._entered[request] = self._entries
            if steps_left <= 0:
                self._entered[request] = 0
                self.left -= 1
                ended.append(request)
                continue
            alone = self._enter(request, self._decoded[request])
            self._running.append((self._entries, self.steps - alone, request))
            heappush(self._ends, (self.steps + steps_left, self._entries, request))
        if self._tree is not None:
            self._tree.kept.end(ended)
        return True

    def _computed(self, chosen: list[int]) -> int:
        """Return the tokens that a stage computes."""
        again = [request for request in chosen if self._entered[request]] if self._keeps_kv else []
        fresh = [request for request in chosen if request not in again] if again else chosen
        drawn = [self._decoded[request] for request in fresh]
        if self._tree is None:
            return sum(self._prompts[request] for request in fresh) + sum(drawn)
        self._tree.ahead.begin(chosen)
        self._tree.kept.resume(again, [self._decoded[request] for request in again])
        return self._tree.kept.begin(fresh, drawn)

    def _waits(self, chosen: list[int], full: bool) -> bool:
        """Return whether the rule lets a stage wait, and note for how many steps."""
        if self._rule is None or not self._active:
            return False
        tokens = sum(self._prompts[request] + self._decoded[request] for request in chosen)
        unstarted = len(self._returned) + len(self._lengths) - self._next
        opportunity = Opportunity(len(chosen), tokens, unstarted, self._idle, full)
        self._wait = self._rule(self._problem, opportunity)
        self._idling = len(chosen) if self._wait > 0 else 0
        return self._wait > 0

    def _fitting(self) -> tuple[list[int], bool]:
        """Return the first waiting requests that fit a stage, and whether it is full."""
        tried = list[int]()
        fitting = self._first(tried)
        for request in tried:
            self._share(request, -1)
        return fitting

    def _first(self, tried: list[int]) -> tuple[list[int], bool]:
        """Return the same, with the requests whose shared tokens were counted as held."""
        taken = set[int]()
        free, chosen, tokens, held = self._slots - self._active, list[int](), 0, self._held
        returned = sorted(self._returned)[:free] if self._returned else []
        place, fresh = 0, self._next
        while len(chosen) < free:
            if place < len(returned) and (fresh >= len(self._lengths) or returned[place] < fresh):
                request, place = returned[place], place + 1
            elif fresh < len(self._lengths):
                request, fresh = fresh, fresh + 1
            else:
                break
            decoded = self._decoded[request]
            tokens += self._tokens(request, taken) + decoded
            if self._cap is not None and tokens > self._cap and chosen:
                return chosen, True
            held += self._held_at_start[request] + self._apart[request] + decoded + self._share(request, 1)
            tried.append(request)
            short = self._capacity is not None and held > self._room
            if short and (chosen or self._active):
                return chosen, False
            chosen.append(request)
            if short:
                # Alone, though memory is short.
                return chosen, False
        return chosen, self._cap is not None and bool(chosen) and tokens >= FULL_STAGE * self._cap

    def _tokens(self, request: int, taken: set[int]) -> int:
        """Return the prompt tokens that a request adds to a stage beside nodes that it has taken."""
        if self._tree is None or self._cap is None:
            return self._prompts[request]
        taken.update(node for node in self._tree.path(request) if self._tree.readers[node])
        return self._tree.ahead.more(request, taken)

    def _take(self) -> None:
        """Take the first waiting request out of the queue."""
        if self._returned and (self._next >= len(self._lengths) or self._returned[0] < self._next):
            heappop(self._returned)
        else:
            self._next += 1

    def decode(self) -> None:
        """Decode until a request ends or memory is short."""
        while self._entered[self._ends[0][2]] != self._ends[0][1]:
            heappop(self._ends)
        active, held, context = self._active, self._held, self._context
        burst = self._ends[0][0] - self.steps
        if self._capacity is not None and active > 1:
            burst = min(burst, max(1, (self._capacity - held) // active + 1))
        burst = min(burst, self._wait) if self._wait else burst
        read = burst * context + active * (burst * (burst - 1) // 2)
        seconds = burst * self._cost.decode_seconds(active) + self._cost.decode_per_kv_token * read
        self.seconds += seconds
        self.steps += burst
        self._held += burst * active
        self._context += burst * active
        if self._tree is not None:
            self._tree.kept.decode(burst)
        while self._ends and self._ends[0][0] <= self.steps:
            _, entry, request = heappop(self._ends)
            if self._entered[request] != entry:
                continue
            self._entered[request] = 0
            self._leave(request, self._lengths[request])
            if self._tree is not None:
                self._tree.kept.end([request])
            self.left -= 1
