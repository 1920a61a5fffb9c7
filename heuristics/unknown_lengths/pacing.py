"""Prefill stages that wait only while sampled completions show that it saves seconds."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from ..policy import State, Step
from ..queues.admission import Admission
from ..queues.prefill_rules import Opportunity, PacedSkiRental, PrefillFirst
from ..queues.queue_policy import Queue, QueuePolicy
from .seen_lengths import SeenLengths


@dataclass(frozen=True, slots=True)
class PaceParams:
    """Parameters of the test that lets prefill stages wait.

    fewest: Completions ended before the first test; more begin to wait later and know the costs better.
    samples: Sampled sets of lengths; more decide better and take longer.
    most: Most waiting requests in a sample for each slot; more see the end of larger jobs and take longer.
    margin: Least share of the decode steps that waiting must save.
    sure: Standard errors by which its saving must exceed zero.
    growth: Share of new completions that triggers a new test.
    """

    fewest: int = 32
    samples: int = 6
    most: int = 10
    margin: float = 0.01
    sure: float = 3.0
    growth: float = 0.5


class PacedPolicy(QueuePolicy):
    """Queue policy that prefills at once until waiting is shown to save seconds.

    The rest of the job is simulated with and without waiting, on lengths sampled from the completions so far.

    seed: Seed of the sampled lengths.
    """

    def __init__(
        self, queue: Queue, admission: Admission, *, params: PaceParams | None = None, seed: int = 0
    ) -> None:
        super().__init__(queue, PrefillFirst(), admission)
        self._params, self._rng, self._due = params or PaceParams(), np.random.default_rng(seed), 0

    def __call__(self, state: State) -> Step:
        """Return the next step."""
        waiting = int(np.count_nonzero(state.waiting))
        ended = len(state.problem) - waiting - len(state.running)
        if waiting and not state.unarrived and ended >= max(self._due, self._params.fewest):
            self._due = int(ended * (1 + self._params.growth)) + 1
            self.rule = PacedSkiRental() if self._saves(state, ended) else PrefillFirst()
        return super().__call__(state)

    def _saves(self, state: State, ended: int) -> bool:
        """Return whether waiting saves seconds for sampled lengths of the requests left."""
        waiting, running = np.flatnonzero(state.waiting), state.running
        waiting = waiting[: self._params.most * state.problem.slots]
        saving = Opportunity.of(state, waiting[:1].tolist(), 0, False).saving(state.problem.cost)
        price = state.problem.cost.decode_base
        if not price:
            return True
        job = _Rest(state.problem.slots, saving / price, ended, state.steps_done)
        if not job.may_wait:
            return False
        begun = np.ones(len(state.problem), dtype=np.bool_)
        begun[state.waiting] = False
        over = begun.copy()
        over[running] = False
        cap = float(state.problem.decode_steps.max())
        lengths = SeenLengths.of(state.decoded[begun], over[begun], cap)
        saved = []
        for _ in range(self._params.samples):
            reached = state.decoded[running].astype(np.float64)
            ends = np.minimum(lengths.sample(self._rng, reached), cap) - reached
            steps = np.minimum(lengths.sample(self._rng, np.zeros(len(waiting))), cap)
            ends, steps = np.ceil(np.maximum(1, ends)).tolist(), np.ceil(steps).tolist()
            eager = job.cost(ends, steps, None)
            saved.append(1 - job.cost(ends, steps, PacedSkiRental()) / eager)
        error = float(np.std(saved) / np.sqrt(len(saved)))
        return float(np.mean(saved)) > max(self._params.margin, self._params.sure * error)


@dataclass(frozen=True, slots=True)
class _Rest:
    """Rest of a job: its slots, and progress so far.

    stage: Decode steps' worth that a prefill stage costs to open.
    """

    slots: int
    stage: float
    ended: int
    steps: int

    @property
    def may_wait(self) -> bool:
        """False if the rule waits at no pace like the present."""
        pace = self.ended / self.steps if self.steps else 0.0
        return PacedSkiRental().steps(1, 0, pace, self.stage * self.slots) > 0

    def cost(self, ends: list[float], waiting: list[float], rule: PacedSkiRental | None) -> float:
        """Return the decode steps of the rest, and of opening its stages."""
        running, now, idle, begun, stages = list(ends), 0.0, 0.0, 0, 0
        heapq.heapify(running)
        worth, most = self.stage * self.slots, len(waiting)
        ended = self.ended
        while begun < most:
            free = self.slots - len(running)
            if free:
                joining, pause = min(free, most - begun), 0
                if rule is not None and running and joining < most - begun:
                    pause = rule.steps(joining, idle, ended / max(1.0, self.steps + now), worth)
                if not pause:
                    for steps in waiting[begun : begun + joining]:
                        heapq.heappush(running, now + steps)
                    begun, stages, idle = begun + joining, stages + 1, 0.0
                    continue
                until = min(now + pause, running[0])
                idle, now = idle + joining * (until - now), until
            else:
                now = running[0]
            while running and running[0] <= now:
                heapq.heappop(running)
                ended += 1
        return max(running, default=now) + stages * self.stage
