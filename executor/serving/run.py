"""Jobs served on a model, and checks of their completions.

Importing this module needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...data.arrays import IntArray
from ...data.workload import Workload
from ...heuristics.serving.policy import ServingPolicy
from ...heuristics.serving.simulation import ServingRun, serve_on_device
from .engine import ServingEngine
from .regions import PlacedLedger


@dataclass(frozen=True, slots=True, eq=False)
class EngineRun:
    """Run of a model.

    run: As on a simulated device, in measured seconds.
    answers: Token ids of each completion.
    moved_tokens: Tokens of KV cache copied: regions that grew, compactions, and guests that moved out.
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
    """Serve every request greedily, in flat KV memory.

    prompts: Token ids of each request.
    kv_capacity: Tokens of KV memory, allocated exactly.
    paged: True to place blocks anywhere (block allocation) instead of one region per request.
    predicted: Completion lengths the policy sees, shape (requests,); the true ones by default.

    Raises UnsupportedModelError if the model's completions would be wrong, and the errors of
    :func:`~.simulation.serve_on_device`.
    """
    ledger = PlacedLedger(kv_capacity, len(workload), block_tokens, paged=paged)
    engine = ServingEngine(model, prompts, ledger)
    run = serve_on_device(workload, policy, engine, ledger, predicted=predicted)
    return EngineRun(run, engine.answers, engine.moved_tokens, ledger.compactions)


def own_answer(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the model's own greedy completion of some length."""
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
