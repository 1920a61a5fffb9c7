"""One replica of a fleet: an actor with an engine."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...data.trace import Stage
from ...heuristics.fleet.policy import FleetPolicy, NamedPolicy
from ...heuristics.fleet.simulation import longest_first_policy
from ...heuristics.loop import execute
from ...heuristics.policy import Policy, State, Step
from ...heuristics.replay_and_repair import Replay
from .engine_spec import EngineSpec

_LOG = logging.getLogger(__name__)
_QUIET = 0.05
"""Seconds of events that are sent together."""


class ReplicaActor:
    """Actor with a loaded model that serves shares of a job."""

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        from ..engines.tiers import choose_tier
        from ..models.source import load_model

        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self._spec = spec
        self._model = load_model(
            spec.model,
            load_format=spec.load_format,  # type: ignore[arg-type]
            dtype=spec.dtype,
            device=spec.device,
            seed=spec.seed,
        )
        self._tier = choose_tier(self._model, spec.tier)
        self._policy: Releasing | None = None
        self._began: float | None = None

    def pid(self) -> int:
        """Return the process the replica runs in."""
        import os

        return os.getpid()

    def release(self) -> list[int]:
        """Give up half of the waiting requests, and return them."""
        return [] if self._policy is None else self._policy.release()

    def serve(
        self,
        problem: Problem,
        planned: Schedule | None,
        requests: list[int],
        prompts: list[list[int]],
        most: IntArray,
        following: FleetPolicy | NamedPolicy | None = None,
    ) -> Any:
        """Yield lists of events.

        They are ``("engine", description)``, ``("stage", ...)`` and ``("completion", ...)``. A stage has the
        requests it prefilled and their slots. A completion has its tokens and its end in seconds since this
        replica first served.
        """
        events: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        policy = Releasing(problem, planned, requests, following)
        self._policy = policy
        work = threading.Thread(
            target=self._serve, args=(problem, policy, prompts, most, events), daemon=True
        )
        work.start()
        ended = False
        while not ended:
            batch = [events.get()]
            until = time.monotonic() + _QUIET
            while not _is_last(batch[-1]) and (seconds_left := until - time.monotonic()) > 0:
                try:
                    batch.append(events.get(timeout=seconds_left))
                except queue.Empty:
                    break
            *before, last = batch
            ended = last is None
            failed = last is not None and last[0] == "error"
            # Events before an error count: their completions are finished.
            yield [event for event in (before if ended or failed else batch) if event is not None]
            if failed and last is not None:
                self._policy = None
                raise last[1]
        self._policy = None

    def _serve(
        self,
        problem: Problem,
        policy: Releasing,
        prompts: list[list[int]],
        most: IntArray,
        events: queue.SimpleQueue[tuple[Any, ...] | None],
    ) -> None:
        from ..engines.huggingface import DecodeOptions, HuggingFaceEngine

        try:
            engine = HuggingFaceEngine(
                problem,
                self._model,
                prompts,
                most,
                decoding=DecodeOptions(frozenset(self._spec.eos_ids), self._spec.sampler),
                tier=self._tier,
            )
            now = time.perf_counter()
            self._began = now if self._began is None else self._began
            offset = now - self._began
            events.put(("engine", dict(engine.describe())))

            end = 0.0

            def staged(stage: Stage, _: int) -> None:
                nonlocal end
                taken, slots = policy.prefilled() if stage.kind == "prefill" else ([], [])
                end = stage.end + offset
                events.put(("stage", replace(stage, start=stage.start + offset, end=end), taken, slots))

            def finished(request: int) -> None:
                events.put(("completion", policy.requests[request], engine.answers[request], end))

            try:
                execute(problem, policy, engine, on_finish=finished, on_stage=staged)
            except AllReleasedError:
                _LOG.debug("the rest of the share was taken over by another replica")
            events.put(None)
        except BaseException as error:
            events.put(("error", error))


def _is_last(event: tuple[Any, ...] | None) -> bool:
    return event is None or event[0] == "error"


class AllReleasedError(Exception):
    """Error of a policy with no requests left."""


class Releasing:
    """Policy whose waiting requests another thread may take."""

    def __init__(
        self,
        problem: Problem,
        planned: Schedule | None,
        requests: Sequence[int],
        following: FleetPolicy | NamedPolicy | None = None,
    ) -> None:
        self._replay = None if planned is None or following is not None else Replay(planned, problem)
        otherwise = longest_first_policy if following is None else following
        self._policy: Policy = self._replay or otherwise(problem)
        self.requests = list(requests)
        self._lock = threading.Lock()
        self._gone = np.zeros(len(requests), dtype=np.bool_)
        self._begun = np.zeros(len(requests), dtype=np.bool_)
        self._decode_steps = problem.decode_steps
        self._step = Step()

    def __call__(self, state: State) -> Step:
        """Return the policy's next step for the requests left."""
        with self._lock:
            state.waiting[self._gone] = False
            if not state.waiting.any() and not state.running.size:
                raise AllReleasedError
            step = self._policy(state)
            self._begun[list(step.prefill)] = True
            if len(step.prefill):
                self._step = step
            return step

    def prefilled(self) -> tuple[list[int], list[int]]:
        """Return the requests of the latest prefill stage, with slots."""
        return [self.requests[i] for i in self._step.prefill], list(self._step.slots)

    def release(self) -> list[int]:
        """Give up half of the waiting requests, and return them."""
        with self._lock:
            waiting = np.flatnonzero(~self._begun & ~self._gone)
            longest = waiting[np.argsort(-self._decode_steps[waiting], kind="stable")]
            taken = longest[::2]
            self._gone[taken] = True
            if self._replay is not None:
                self._replay.withdraw(taken)
            return [self.requests[i] for i in taken.tolist()]
