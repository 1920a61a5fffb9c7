"""Estimate of a run's remaining work from its completions so far."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...data.trace import Stage

UNKNOWN = -1
"""Value for an unknown number of tokens."""

GOLDEN = (5**0.5 - 1) / 2
"""Inverse golden ratio, which spreads fractional parts evenly."""

AS_PLANNED = 0.02
"""Largest relative difference from a planned length."""


class Stretch:
    """Kaplan-Meier distribution of lengths over planned lengths.

    Running completions are censored at their current length. The
    probability of still longer ones lies at the planned length. If some length exceeds its plan, it lies
    beyond the longest: at twice that if none ended, nearer the more ended.

    ended: Length over planned length of each ended completion.
    reached: Length so far over planned length of each running completion.
    unknown: True if planned lengths are caps: still longer ones then lie at twice the longest length so far.
    """

    def __init__(self, ended: FloatArray, reached: FloatArray, *, unknown: bool = False) -> None:
        lengths = np.concatenate((ended, reached))
        last = np.concatenate((np.ones(len(ended), dtype=bool), np.zeros(len(reached), dtype=bool)))
        order = np.lexsort((~last, lengths))
        at_risk = np.arange(len(lengths), 0, -1)
        surviving = np.cumprod(1 - last[order] / at_risk)
        before = np.concatenate(([1.0], surviving[:-1]))
        furthest = float(lengths.max(initial=0.0))
        tail = 1.0 if furthest <= 1 else furthest * (1 + 1 / (1 + len(ended)))
        tail = min(tail, 2 * furthest) if unknown and furthest > 0 else tail
        self._at = np.append(lengths[order], max(tail, furthest))
        self._mass = np.append(before - surviving, surviving[-1] if len(lengths) else 1.0)
        self._below = np.concatenate(([0.0], np.cumsum(self._mass)))

    def quantile(self, share: FloatArray, reached: FloatArray) -> FloatArray:
        """Return a quantile beyond each reached length; 0 before it begins."""
        first = np.searchsorted(self._at, reached, side="right")
        first = np.minimum(first, len(self._at) - 1)
        wanted = self._below[first] + share * (self._below[-1] - self._below[first])
        position = np.searchsorted(self._below[1:], wanted, side="right")
        lengths: FloatArray = np.maximum(self._at[np.minimum(position, len(self._at) - 1)], reached)
        return lengths


class LengthEstimator:
    """Estimate of a plan's remaining work, from the lengths seen.

    Requests are assumed to begin in the schedule's order.
    """

    def __init__(self, problem: Problem, schedule: Schedule, *, unknown: bool = False) -> None:
        count, self._unknown = len(problem), unknown
        self._problem = problem
        self._order = np.lexsort((np.arange(count), schedule.bin_of))
        self._first = int(problem.prefill_emits_first_token)
        self._planned = problem.workload.output_tokens.astype(np.float64)
        self._begin = np.full(count, UNKNOWN, dtype=np.int64)
        self._ended = np.zeros(count, dtype=np.bool_)
        self._tokens = np.full(count, UNKNOWN, dtype=np.int64)
        self._decode_steps = 0
        self._prefill = 0.0
        self._decoded = 0

    def begun(self, requests: npt.ArrayLike) -> None:
        """Note requests that are prefilled next."""
        self._begin[np.asarray(requests, dtype=np.int64)] = self._decode_steps

    def ran(self, stage: Stage) -> None:
        """Add a stage's seconds, tokens and decode steps."""
        if stage.kind == "prefill":
            self._prefill += stage.model_seconds(self._problem.cost)
        else:
            self._decoded += stage.tokens
        self._decode_steps += stage.decode_steps

    def ended(self, request: int, tokens: int) -> None:
        """Note a completion and its tokens, or UNKNOWN."""
        self._ended[request] = True
        self._tokens[request] = tokens

    @property
    def longer(self) -> int:
        """Number of running completions beyond their planned lengths."""
        running = self._running
        return int(np.count_nonzero(self._reached(running) > self._planned[running] * (1 + AS_PLANNED)))

    def passing(self, tokens: int) -> list[int]:
        """Return the positions of running completions with so many tokens or more."""
        running = self._running
        passed: list[int] = running[self._reached(running) >= tokens].tolist()
        return passed

    @property
    def as_planned(self) -> bool:
        """True if every length so far is as planned."""
        known = np.flatnonzero(self._tokens > 0)
        off = np.abs(self._tokens[known] - self._planned[known])
        return bool((off <= AS_PLANNED * self._planned[known]).all()) and not self.longer

    def seconds_left(self) -> float:
        """Estimate the model seconds of the remaining work."""
        known, running = np.flatnonzero(self._tokens > 0), self._running
        reached = np.zeros(len(self._planned))
        reached[running] = self._reached(running) / self._planned[running]
        ended = self._tokens[known] / self._planned[known]
        stretch = Stretch(ended, reached[running], unknown=self._unknown)
        # Quantiles, not means: the longest remaining completion decides the end.
        share: FloatArray = np.mod(0.5 + GOLDEN * np.arange(len(reached)), 1.0)
        lengths: FloatArray = self._planned * stretch.quantile(share, reached)
        return self._seconds(lengths)

    @property
    def _waiting(self) -> IntArray:
        waiting: IntArray = self._order[(self._begin[self._order] == UNKNOWN) & ~self._ended[self._order]]
        return waiting

    @property
    def _running(self) -> IntArray:
        return np.flatnonzero((self._begin != UNKNOWN) & ~self._ended)

    def _reached(self, requests: IntArray) -> FloatArray:
        reached: FloatArray = (self._decode_steps - self._begin[requests] + self._first).astype(np.float64)
        return reached

    def _seconds(self, lengths: FloatArray) -> float:
        cost, running, waiting = self._problem.cost, self._running, self._waiting
        kv_at_start = self._problem.kv_at_start.astype(np.float64)
        decoded = np.zeros(len(kv_at_start))
        decoded[running] = self._decode_steps - self._begin[running]
        steps_left = np.maximum(lengths - self._first - decoded, 0.0)
        decode_steps = _decode_steps(steps_left[running], steps_left[waiting], self._problem.slots)
        chosen = np.concatenate((running, waiting))
        steps = steps_left[chosen]
        kv_token_steps = (
            steps * (kv_at_start[chosen] + decoded[chosen]) + steps * np.maximum(steps - 1, 0) / 2
        )
        # A run off its plan has other stages and idle slots than planned: use those so far.
        # Once none waits, the last to end decides, however many slots are idle.
        idles = self._decode_steps > 0 and len(waiting) > 0
        busy = float(self._decoded) / (self._decode_steps * self._problem.slots) if idles else 1.0
        prefill = self._prefill * len(waiting) / max(int(np.count_nonzero(self._begin != UNKNOWN)), 1)
        slots = cost.decode_per_slot * steps.sum() + cost.decode_per_kv_token * kv_token_steps.sum()
        return float(prefill + cost.decode_base * decode_steps / max(0.1, busy) + slots)


def _decode_steps(running: FloatArray, waiting: FloatArray, slots: int) -> float:
    """Return the decode steps until all requests end.

    Each waiting one takes the next free slot.
    """
    ends = sorted(running.tolist())
    last = ends[-1] if ends else 0.0
    ends = [0.0] * max(0, slots - len(ends)) + ends
    heapq.heapify(ends)
    for decode_steps in waiting.tolist():
        end = ends[0] + decode_steps
        heapq.heapreplace(ends, end)
        last = max(last, end)
    return last
