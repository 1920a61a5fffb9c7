"""The engine whose clock is the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..data.arrays import IntArray
from ..data.files.record import plain
from ..data.prefix_cache import PrefixCache
from ..data.problem import Problem
from ..data.trace import Stage, StageKind
from .policy import FREE


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """
    How far requests have come, wherever they run; the simulators of a fleet share it.

    decoded: Decode steps each request has taken part in, shape (requests,).
    held: Tokens of KV cache each holds while it runs, shape (requests,).
    left: Decode steps each has yet to take part in, shape (requests,).
    """

    decoded: IntArray
    held: IntArray
    left: IntArray

    @classmethod
    def none(cls, problem: Problem, output_tokens: IntArray | None = None) -> Progress:
        """Return that of a job not begun, with completions' true lengths (by default the problem's)."""
        emitted = int(problem.prefill_emits_first_token)
        left = (problem.decode_steps if output_tokens is None else output_tokens - emitted).astype(np.int64)
        return cls(np.zeros(len(problem), dtype=np.int64), problem.kv_at_start.copy(), left)


class Simulator:
    """
    Serves requests in no time but the cost model's.

    problem: The problem, for its costs and slots.
    output_tokens: The true length of each completion (tokens, shape (requests,)); the problem's own by
        default.
    progress: How far the requests have come, changed as they go on; by default, nothing has begun.
    swap: Seconds a token that keys and values take to the host, and as many back: everything else waits
        meanwhile. None for a device without a host: what is evicted is prefilled again.
    """

    def __init__(
        self,
        problem: Problem,
        output_tokens: IntArray | None = None,
        *,
        progress: Progress | None = None,
        swap: float | None = None,
    ) -> None:
        self._cost, self._swap = problem.cost, swap
        progress = Progress.none(problem, output_tokens) if progress is None else progress
        self._decoded, self._held, self._left = progress.decoded, progress.held, progress.left
        self._prompt, self._cache = problem.prompt_tokens, PrefixCache(problem)
        self._begun = np.zeros(len(problem), dtype=np.bool_)
        self._slot_request = np.full(problem.slots, FREE, dtype=np.int64)
        self._time = 0.0

    @property
    def time(self) -> float:
        """Seconds of the cost model so far."""
        return self._time

    def prefill(self, requests: Sequence[int], slots: Sequence[int]) -> tuple[Stage, list[int]]:
        """Prefill requests together; an evicted one again, with the tokens it had, or its KV cache moved."""
        chosen, taken = np.asarray(requests, dtype=np.int64), np.asarray(slots, dtype=np.int64)
        self._slot_request[taken] = chosen
        begun = self._begun[chosen] | (self._decoded[chosen] > 0)
        again, tokens = chosen[begun], self._cache.begin(chosen[~begun])
        held = int((self._prompt[again] + self._decoded[again]).sum())
        tokens += held if self._swap is None else 0
        seconds = self._cost.prefill_seconds(tokens) if tokens else 0.0
        seconds += 0.0 if self._swap is None else self._swap * held
        self._begun[chosen] = True
        stage = self._advance("prefill", seconds, 0, len(chosen), tokens, tokens)
        return stage, self._release(chosen, taken)

    def decode(self, decode_steps: int, until: float) -> tuple[Stage, list[int]]:
        """Decode until the first request is done, ``decode_steps`` steps are run, or ``until`` is reached."""
        occupied = np.flatnonzero(self._slot_request != FREE)
        running = self._slot_request[occupied]
        active = len(running)
        burst = min(decode_steps, int(self._left[running].min()))
        held = int(self._held[running].sum())
        if until < float("inf"):
            burst = self._steps_until(burst, active, held, until)
        kv = burst * held + active * (burst * (burst - 1) // 2)
        seconds = burst * self._cost.decode_seconds(active) + self._cost.decode_per_kv_token * kv
        self._left[running] -= burst
        self._held[running] += burst
        self._decoded[running] += burst
        stage = self._advance("decode", seconds, burst, active, burst * active, kv)
        return stage, self._release(running, occupied)

    def evict(self, requests: Sequence[int]) -> None:
        """Free the requests' slots, once their KV cache is on the host."""
        self._slot_request[np.isin(self._slot_request, requests)] = FREE
        if self._swap is not None:
            chosen = np.asarray(requests, dtype=np.int64)
            self._time += self._swap * int((self._prompt[chosen] + self._decoded[chosen]).sum())

    def forget_prompts(self) -> None:
        """Let go of shared prompts that are kept."""
        self._cache.clear()

    def recompute(self) -> None:
        """Let go of shared prompts that are kept; without a host nothing else is."""
        self._cache.clear()

    def restart(self, requests: Sequence[int]) -> None:
        """Let go of all that requests have decoded: they begin anew."""
        chosen = np.asarray(requests, dtype=np.int64)
        self._cache.begin_again(chosen[self._begun[chosen]])
        self._left[chosen] += self._decoded[chosen]
        self._held[chosen] -= self._decoded[chosen]
        self._decoded[chosen] = 0
        self._begun[chosen] = False

    def wait(self, until: float) -> None:
        """Set the clock forward to ``until``."""
        self._time = max(self._time, until)

    def describe(self) -> Mapping[str, object]:
        """Return that this was the simulator, and its costs."""
        return {"name": "simulator", "cost": plain(self._cost)}

    def _steps_until(self, burst: int, active: int, held: int, until: float) -> int:
        time = self._time
        for done in range(1, burst):
            time += self._cost.decode_seconds(active, held + active * (done - 1))
            if time >= until:
                return done
        return burst

    def _release(self, requests: IntArray, slots: IntArray) -> list[int]:
        done = self._left[requests] <= 0
        self._slot_request[slots[done]] = FREE
        finished: list[int] = requests[done].tolist()
        return finished

    def _advance(
        self, kind: StageKind, seconds: float, decode_steps: int, active: int, tokens: int, kv_tokens: int
    ) -> Stage:
        start = self._time
        self._time += seconds
        return Stage(kind, start, self._time, decode_steps, active, tokens, kv_tokens, kv_tokens)
