"""Two workers of a model to be timed: one that encodes, and engines that decode beside it (ExeGPT's WAA)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Self

from ..data.cost import CostModel
from ..data.problem import Problem
from ..data.workload import Workload
from ..heuristics.dynamic_batch import DynamicBatch
from ..heuristics.workload_aware_allocation import WorkloadAwareAllocation
from .encode_worker import EncodeWorker
from .engine_spec import EngineSpec
from .huggingface import HuggingFaceEngine
from .loop import execute
from .profile_grid import spread
from .workload_aware import DecodeEngine

_NO_COST = CostModel(0.0, 0.0, 0.0, 0.0)
_LEAD = 2
"""Batches encoded ahead."""
FEWEST_ROUNDS = 5
"""In which rounds with and without another worker can be compared."""
_BATCHES = 24
"""That join in a job that is timed."""


class WorkerPair:
    """
    The worker that encodes, started when it is first needed, and what is timed with it.

    Parameters
    ----------
    spec
        What it loads: the model that is profiled.
    decode_engine
        Returns an engine that takes up what a worker encodes.
    most_prompts, most_tokens
        Prompts encoded together, and tokens of one, at most.
    clock
        Seconds from any origin; the worker is timed on its process's CPU where this is
        :func:`time.process_time`.
    """

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

    def join(self, prompts: int, length: int, running: int, rounds: int) -> dict[str, float]:
        """
        Return what passes where encoded prompts join a running batch, on a job of both workers.

        Parameters
        ----------
        prompts
            Of each batch.
        length
            Mean tokens of a prompt.
        running
            Requests decoding, about, if they stay for so many ``rounds`` at most.
        rounds
            Decode rounds of an answer at most.

        Returns
        -------
        dict
            ``between``: seconds between decode stages, for each batch that joins; all that sending prompts
            and taking them up costs is in there. ``stages``: decode stages, for each batch that joins.
            ``beside``: seconds that the other worker takes for a batch.
        """
        stay = max(1, min(rounds, running // prompts))
        lengths = spread(length, prompts) * _BATCHES
        problem = Problem(
            Workload.from_lengths(lengths, [1 + stay] * len(lengths)),
            _NO_COST,
            prompts * (stay + _LEAD + 1),
            prefill_emits_first_token=True,
        )
        engine = self._decode_engine(self._started(), problem)
        policy = WorkloadAwareAllocation(engine, DynamicBatch(prompts, length, None, math.inf), _LEAD)
        decodes = [stage for stage in execute(problem, policy, engine).stages if stage.kind == "decode"]
        between = sum(after.start - before.end for before, after in pairwise(decodes))
        # What comes before the first decode stage, the wait for the first batch in it, is not between any.
        between -= sum(engine.waits[1:])
        seconds = [self._of_clock(*each) for each in engine.encode_seconds]
        return {
            "between": between / (_BATCHES - 1),
            "stages": (len(decodes) - 1) / (_BATCHES - 1),
            "beside": median(seconds),
        }

    def crowd(self, engine: HuggingFaceEngine, length: int, rounds: int) -> dict[str, float]:
        """
        Return the seconds of an engine's decode round while the other worker rests, and while it encodes.

        Parameters
        ----------
        engine
            With a batch that no request leaves within ``rounds`` rounds.
        length
            Mean tokens of the prompts to encode.
        rounds
            To run at most, :data:`FEWEST_ROUNDS` at least.
        """
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
        found: dict[str, list[float]] = {"alone": [], "beside": []}
        many = max(1, rounds // 2 - 2)
        # In turns, round for round the same requests hold as many tokens: the first and the last rest.
        begun = time.perf_counter()
        decode()
        found["alone"] += [decode() for _ in range(many // 2)]
        each = (time.perf_counter() - begun) / (1 + many // 2)
        ahead = 2 + math.ceil(2 * each / once)
        encode(ahead)
        decode()
        for _ in range(many):
            encode(max(0, ahead - worker.under_way))
            seconds = decode()
            take(wait=False)
            # It may have run out of prompts meanwhile.
            if worker.under_way:
                found["beside"].append(seconds)
        while worker.under_way:
            take(wait=True)
        decode()
        found["alone"] += [decode() for _ in range(many - many // 2)]
        alone = median(found["alone"])
        return {"alone": alone, "beside": median(found["beside"] or [alone])}

    def _of_clock(self, seconds: float, cpu_seconds: float) -> float:
        return cpu_seconds if self._clock is time.process_time else seconds

    def _started(self) -> EncodeWorker:
        if self._worker is None:
            self._worker = EncodeWorker(self._spec, self._most_prompts, self._most_tokens)
        return self._worker
