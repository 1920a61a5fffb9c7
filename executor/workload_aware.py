"""The engine of WAA's worker that decodes: what another process encodes joins its running batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data.cost import FloatArray
from ..data.problem import Problem
from .encode_worker import EncodeWorker
from .huggingface import HuggingFaceEngine


class DecodeEngine(HuggingFaceEngine):
    """
    Decodes on a running batch; prefilling a request takes up what the other worker has encoded.

    It is its policy's :class:`~batchbound.heuristics.workload_aware_allocation.Encoding`, too.

    Parameters
    ----------
    worker
        Encodes the prompts; its model and sampling are this engine's.
    problem, model, prompts, options
        As :class:`~.huggingface.HuggingFaceEngine` takes them.
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
        self.encode_began: FloatArray = np.full(len(prompts), np.nan)
        """When each request's encoding began, seconds after the job's start, shape (requests,)."""
        self.encode_cpu_seconds = 0.0
        """Of the other worker's process."""

    def encode(self, requests: Sequence[int]) -> None:
        """Have requests encoded by the other worker."""
        names = [self._names[request] for request in requests]
        self._worker.send(requests, names, [self._prompts[request] for request in requests])

    def encoded(self, *, wait: bool) -> list[list[int]]:
        """Return the batches encoded since the last call; their keys and values are on this side now."""
        from .handover import unpack

        batches = []
        for batch in self._worker.receive(wait=wait):
            for request, suspended in zip(batch.requests, unpack(batch.parcel), strict=True):
                self._residence.receive(request, suspended)
                self.answers[request] = [int(suspended.state[0])]
                self.encode_began[request] = batch.begun - self._origin
            self.encode_cpu_seconds += batch.cpu_seconds
            batches.append(list(batch.requests))
        return batches
