"""WAA's decoding engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...data.arrays import FloatArray
from ...data.problem import Problem
from ...data.trace import Stage
from ..engines.huggingface import HuggingFaceEngine
from .encode_worker import Encoded, EncodeWorker


class DecodeEngine(HuggingFaceEngine):
    """Engine that decodes, and takes prefilled requests from another worker.

    It is also its policy's :class:`~batchbound.heuristics.exegpt.workload_aware.Encoding`.
    """

    def __init__(
        self,
        worker: EncodeWorker,
        problem: Problem,
        model: Any,
        prompts: Sequence[Sequence[int]],
        **options: Any,
    ) -> None:
        super().__init__(problem, model, prompts, **options)
        self._worker = worker
        self._names = [str(name) for name in problem.workload.ids]
        self._arrived: dict[int, tuple[Encoded, int]] = {}
        self.encode_began: FloatArray = np.full(len(prompts), np.nan)
        """Start of each request's encoding, seconds after the job's start, shape (requests,)."""
        self.encode_seconds: list[tuple[float, float]] = []
        """Per encoded batch: wall seconds, and CPU seconds of the other worker's process."""
        self.waits: list[float] = []
        """Seconds of each wait without a request to decode, the start included."""

    def encode(self, requests: Sequence[int]) -> None:
        """Send requests to the other worker."""
        names = [self._names[request] for request in requests]
        self._worker.send(requests, names, [self._prompts[request] for request in requests])

    def encoded(self, *, wait: bool) -> list[list[int]]:
        """Return the newly encoded batches, in shared memory until prefilled."""
        batches, begun = [], self.time
        ready = self._worker.receive(wait=wait)
        if wait:
            self.waits.append(self.time - begun)
        for batch in ready:
            requests = list(batch.requests)
            self._arrived.update((request, (batch, place)) for place, request in enumerate(requests))
            self.encode_began[requests] = batch.begun - self._origin
            self.encode_seconds.append((batch.ended - batch.begun, batch.cpu_seconds))
            batches.append(requests)
        return batches

    def prefill(self, requests: Sequence[int], slots: Sequence[int]) -> tuple[Stage, list[int]]:
        """Add encoded requests; prefill or resume the others here."""
        joining = {request: self._arrived.pop(request) for request in requests if request in self._arrived}
        for request, (batch, place) in joining.items():
            suspended = batch.suspended[place]
            self.answers[request] = [int(suspended.state[0])]
            self._residence.receive(request, suspended)
        done = super().prefill(requests, slots)
        self._residence.keep(joining)
        still_there = {id(batch) for batch, _ in self._arrived.values()}
        for batch in {id(batch): batch for batch, _ in joining.values()}.values():
            if id(batch) not in still_there:
                self._worker.give_back(batch)
        return done
