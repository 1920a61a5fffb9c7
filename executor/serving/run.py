"""
Serving a job on a transformers model by a serving policy, its completions checked against the model's own.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...data.arrays import IntArray
from ...data.workload import Workload
from ...heuristics.serving.policy import ServingPolicy
from .engine import ServingEngine
from .regions import PlacedLedger
from .simulation import ServingRun, serve_on_device


@dataclass(frozen=True, slots=True, eq=False)
class EngineRun:
    """
    What a model did.

    run: As a simulated device's, in measured seconds.
    answers: Token ids of each request.
    moved_tokens: Tokens of keys and values copied on the device: regions that grew or were moved together,
        and guests that moved out.
    compactions: How often all regions were moved together.
    """

    run: ServingRun
    answers: list[list[int]]
    moved_tokens: int
    compactions: int


def serve_on_model(
    model: Any,
    prompts: Sequence[Sequence[int]],
    workload: Workload,
    policy: ServingPolicy,
    kv_capacity: int,
    *,
    block_tokens: int = 32,
    paged: bool = False,
    predicted: IntArray | None = None,
) -> EngineRun:
    """
    Serve every request to its length in the workload, greedily, its keys and values in a flat memory.

    model: A transformers causal language model in evaluation mode.
    prompts: Token ids of each request, as many as the workload says.
    workload: The requests, with the lengths their completions are decoded to, arrivals and deadlines.
    policy: Fresh.
    kv_capacity: Tokens of keys and values; memory for them is allocated, and no more.
    block_tokens: Tokens of a block.
    paged: Whether blocks may lie anywhere (block-allocation), instead of one region for each request.
    predicted: Completion lengths the policy sees, shape (requests,); the true ones by default.
    Raises UnsupportedModelError if the model's completions would be wrong.
    Raises ServingError, KvLedgerError as :func:`~.simulation.serve_on_device` says.
    """
    ledger = PlacedLedger(kv_capacity, len(workload), block_tokens, paged=paged)
    engine = ServingEngine(model, prompts, ledger)
    run = serve_on_device(workload, policy, engine, ledger, predicted=predicted)
    return EngineRun(run, engine.answers, engine.moved_tokens, ledger.compactions)


def own_answer(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """
    Return the model's own greedy completion to one prompt alone, as ``generate`` gives it.

    model: A transformers causal language model in evaluation mode.
    tokens: Of the completion; no token ends it before.
    """
    ids = torch.tensor([list(prompt)], device=model.device)
    ends, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    finally:
        model.generation_config.eos_token_id = ends
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer
