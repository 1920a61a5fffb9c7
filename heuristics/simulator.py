"""Simulated engine with the cost model as its clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..data.arrays import IntArray
from ..data.files.record import plain
from ..data.kept_beginnings import KeptBeginnings
from ..data.problem import Problem
from ..data.trace import Stage, StageKind
from .policy import FREE

KEEPS_KV = 0.0
"""Seconds to move a token of KV cache for plans of our engine, which keeps that of evicted requests."""


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """Progress of requests, shared by the simulators of a fleet.

    decoded: Decode steps each request has had, shape (requests,).
    held: Tokens of KV cache each holds while it runs, shape (requests,).
    left: Decode steps each still needs, shape (requests,).
    """

    decoded: IntArray
    held: IntArray
    left: IntArray

    @classmethod
    def none(cls, problem: Problem, output_tokens: IntArray | None = None) -> Progress:
        """Return the progress of a new job with its true lengths."""
        emitted = int(problem.prefill_emits_first_token)
        left = (problem.decode_steps if output_tokens is None else output_tokens - emitted).astype(np.int64)
        return cls(np.zeros(len(problem), dtype=np.int64), problem.kv_at_start.copy(), left)


class Simulator:
    """Engine that serves requests in the cost model's seconds.

    output_tokens: True length of each completion (tokens, shape (requests,)); the problem's own by default.
    progress: Progress of the requests, updated; by default, nothing has begun.
    swap: Seconds a token of KV cache takes to the host, and as many back; all else waits meanwhile. None for
        a device without a host: evicted requests are prefilled again.
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
        self._prompt = problem.prompt_tokens
        self._kept = None if problem.tree is None else KeptBeginnings(problem)
        self._begun = np.zeros(len(problem), dtype=np.bool_)
        self._slot_request = np.full(problem.slots, FREE, dtype=np.int64)
        self._time = 0.0

    @property
    def time(self) -> float:
        """Seconds of the cost model so far."""
        return self._time

    def prefill(self, requests: Sequence[int], slots: Sequence[int]) -> tuple[Stage, list[int]]:
        """Prefill requests together; return the stage and finished requests.

        An evicted request recomputes its tokens, or moves its KV cache back.
        """
        chosen, taken = np.asarray(requests, dtype=np.int64), np.asarray(slots, dtype=np.int64)
        self._slot_request[taken] = chosen
        begun = self._begun[chosen] | (self._decoded[chosen] > 0)
        again = chosen[begun]
        kv_tokens = int((self._prompt[again] + self._decoded[again]).sum())
        tokens = self._computed(chosen, begun)
        seconds = self._cost.prefill_seconds(tokens) if tokens else 0.0
        seconds += 0.0 if self._swap is None else self._swap * kv_tokens
        self._begun[chosen] = True
        stage = self._advance("prefill", seconds, 0, len(chosen), tokens, tokens)
        return stage, self._release(chosen, taken)

    def _computed(self, chosen: IntArray, begun: npt.NDArray[np.bool_]) -> int:
        """Return the tokens that a stage computes, and update what is kept."""
        again = chosen[begun]
        if self._kept is None:
            whole = 0 if self._swap is not None else int((self._prompt[again] + self._decoded[again]).sum())
            return int(self._prompt[chosen[~begun]].sum()) + whole
        if self._swap is None:
            return self._kept.begin(chosen.tolist(), self._decoded[chosen].tolist())
        self._kept.resume(again.tolist(), self._decoded[again].tolist())
        return self._kept.begin(chosen[~begun].tolist())

    def decode(self, decode_steps: int, until: float) -> tuple[Stage, list[int]]:
        """Decode until an end, ``decode_steps`` steps, or ``until``."""
        occupied = np.flatnonzero(self._slot_request != FREE)
        running = self._slot_request[occupied]
        active = len(running)
        burst = min(decode_steps, int(self._left[running].min()))
        kv_tokens = int(self._held[running].sum())
        if until < float("inf"):
            burst = self._steps_until(burst, active, kv_tokens, until)
        kv = burst * kv_tokens + active * (burst * (burst - 1) // 2)
        seconds = burst * self._cost.decode_seconds(active) + self._cost.decode_per_kv_token * kv
        self._left[running] -= burst
        self._held[running] += burst
        self._decoded[running] += burst
        if self._kept is not None:
            self._kept.decode(burst)
        stage = self._advance("decode", seconds, burst, active, burst * active, kv)
        return stage, self._release(running, occupied)

    def evict(self, requests: Sequence[int]) -> None:
        """Free the requests' slots, with their KV cache on the host."""
        self._slot_request[np.isin(self._slot_request, requests)] = FREE
        if self._kept is not None:
            self._kept.end(requests)
        if self._swap is not None:
            chosen = np.asarray(requests, dtype=np.int64)
            self._time += self._swap * int((self._prompt[chosen] + self._decoded[chosen]).sum())

    def forget_prompts(self) -> None:
        """Drop the shared beginnings."""
        if self._kept is not None:
            self._kept.clear()

    def recompute(self) -> None:
        """Drop all KV cache that is not on a host."""
        self.forget_prompts()

    def restart(self, requests: Sequence[int]) -> None:
        """Drop all decoded tokens of these requests."""
        chosen = np.asarray(requests, dtype=np.int64)
        begun = chosen[self._begun[chosen]]
        if self._kept is not None:
            self._kept.begin_again(begun.tolist())
        self._left[chosen] += self._decoded[chosen]
        self._held[chosen] -= self._decoded[chosen]
        self._decoded[chosen] = 0
        self._begun[chosen] = False

    def wait(self, until: float) -> None:
        """Set the clock forward to ``until``."""
        self._time = max(self._time, until)

    def describe(self) -> Mapping[str, object]:
        """Return the simulator's name and costs."""
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
        if self._kept is not None:
            self._kept.end(finished)
        return finished

    def _advance(
        self, kind: StageKind, seconds: float, decode_steps: int, active: int, tokens: int, kv_tokens: int
    ) -> Stage:
        start = self._time
        self._time += seconds
        return Stage(kind, start, self._time, decode_steps, active, tokens, kv_tokens, kv_tokens)
