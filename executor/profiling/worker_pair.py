"""Two timed workers of a model: one encodes, one decodes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, median
from typing import Self

from ...data.costs.cost import CostModel
from ...data.problem import Problem
from ...data.workload import Workload
from ...heuristics.exegpt.dynamic_batch import DynamicBatch
from ...heuristics.exegpt.workload_aware import WorkloadAwareAllocation
from ...heuristics.loop import execute
from ...heuristics.policy import State, Step
from ...models.exegpt.run_profile import WARMING_STEPS
from ..engines.huggingface import HuggingFaceEngine
from ..processes.encode_worker import EncodeWorker
from ..processes.engine_spec import EngineSpec
from ..processes.workload_aware import DecodeEngine
from .profile_grid import decoding, spread

_NO_COST = CostModel(0.0, 0.0, 0.0, 0.0)
_LEAD = 2
"""Batches encoded ahead."""
FEWEST_STEPS = 5
"""Least decode steps for a comparison."""
_BATCHES = 24
"""Batches that join in a timed job."""
_STAY = 4
"""Decode steps of those requests."""
MOST_STEPS = 2 * _BATCHES
"""Decode steps of the requests that are there from the start."""


class WorkerPair:
    """Encoding worker, started on first use, and measurements with it."""

    def __init__(
        self,
        spec: EngineSpec,
        decode_engine: Callable[[EncodeWorker, Problem], DecodeEngine],
        most_prompts: int,
        most_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._spec, self._decode_engine, self._clock = spec, decode_engine, clock
        self._most_prompts, self._most_tokens = most_prompts, most_tokens
        self._worker: EncodeWorker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.close()

    def join(self, prompts: int, length: int, running: int) -> dict[str, float]:
        """Return the costs of encoded prompts that join a batch."""
        stay = max(1, min(_STAY, running // prompts))
        there = running - prompts * stay
        joining = spread(length, prompts) * _BATCHES
        workload = Workload.from_lengths(
            decoding(length, there, MOST_STEPS // 2) + joining if there else joining,
            [1 + MOST_STEPS] * there + [1 + stay] * len(joining),
        )
        slots = running + prompts * (_LEAD + 1)
        problem = Problem(workload, _NO_COST, slots, prefill_emits_first_token=True)
        engine = self._decode_engine(self._started(), problem)
        allocation = WorkloadAwareAllocation(engine, DynamicBatch(prompts, length, None, math.inf), _LEAD)

        def policy(state: State) -> Step:
            if there and not state.steps_done and state.waiting[0]:
                return Step(prefill=range(there), slots=range(there), decode_steps=0)
            return allocation(state)

        decodes = [stage for stage in execute(problem, policy, engine).stages if stage.kind == "decode"]
        between = sum(after.start - before.end for before, after in pairwise(decodes))
        # If nothing runs yet, the first batch is waited for, and joins before the first decode stage.
        first = 0 if there else 1
        seconds = [own if self._clock is time.process_time else wall for wall, own in engine.encode_seconds]
        # Measured once as many requests leave as join.
        steady = [stage for stage in decodes[_STAY + 1 : _BATCHES] if stage.decode_steps == 1]
        active = fmean(stage.active for stage in steady)
        return {
            "between": (between - sum(engine.waits[first:])) / (_BATCHES - first),
            "stages": (len(decodes) - 1) / (_BATCHES - first),
            "beside": median(seconds),
            "decode": fmean(stage.seconds for stage in steady),
            "active": active,
            "context": fmean(stage.kv_tokens for stage in steady) / active,
        }

    def crowd(self, engine: HuggingFaceEngine, length: int, decode_steps: int) -> dict[str, float]:
        """Return the seconds of a step ``alone`` and ``beside`` a worker."""
        worker = self._started()
        prompts = [[0] * tokens for tokens in spread(length, self._most_prompts)]
        names = [""] * len(prompts)

        def encode(batches: int) -> None:
            for _ in range(batches):
                worker.send(range(len(prompts)), names, prompts)

        def take(*, wait: bool) -> None:
            for batch in worker.receive(wait=wait):
                worker.give_back(batch)

        def decode() -> float:
            return engine.decode(1, float("inf"))[0].seconds

        encode(1)
        begun = time.perf_counter()
        take(wait=True)
        once = time.perf_counter() - begun
        measured: dict[str, list[float]] = {"alone": [], "beside": []}
        many = max(1, decode_steps // 2 - 2)
        # The phases alternate, so that requests hold as many tokens in both. The worker rests in the first
        # and the last, once KV cache is back in the processor caches.
        engine.decode(WARMING_STEPS, float("inf"))
        begun = time.perf_counter()
        measured["alone"] += [decode() for _ in range(many - many // 2)]
        mean_seconds = (time.perf_counter() - begun) / len(measured["alone"])
        ahead = 2 + math.ceil(2 * mean_seconds / once)
        encode(ahead)
        decode()
        for _ in range(many):
            encode(max(0, ahead - worker.under_way))
            seconds = decode()
            take(wait=False)
            # The worker may have run out of prompts meanwhile.
            if worker.under_way:
                measured["beside"].append(seconds)
        while worker.under_way:
            take(wait=True)
        engine.decode(WARMING_STEPS, float("inf"))
        measured["alone"] += [decode() for _ in range(many // 2)]
        alone = median(measured["alone"])
        return {"alone": alone, "beside": median(measured["beside"] or [alone])}

    def _started(self) -> EncodeWorker:
        if self._worker is None:
            self._worker = EncodeWorker(self._spec, self._most_prompts, self._most_tokens)
        return self._worker
