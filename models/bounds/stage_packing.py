"""Argument that prefill stages are bins of prompts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem
from .packing.lower_bounds import packing_bound

PRICED_WORK = 20_000_000
"""Most capacity times lengths, as the checker repeats the knapsack."""

BY_SLOTS: Mapping[str, object] = {"kind": "requests over slots"}
BY_CAP: Mapping[str, object] = {"kind": "tokens over cap"}


def fewest_stages(problem: Problem, slots: int, *, priced: bool) -> tuple[int, Mapping[str, object]]:
    """Return the fewest prefill stages with their proof.

    A stage prefills at most one request a slot. Under a token cap it also computes at most that many prompt
    tokens; those that requests share are computed at least once. All prompts of a stage are held at once,
    each as a whole, so the KV capacity caps them too. Stages are thus the bins of a packing, which dual
    feasible functions bound (``priced``).
    """
    stages, claim = -(-len(problem) // slots), BY_SLOTS
    for pieces, cap, held in _packed(problem):
        needed, witness = -(-int(pieces.sum()) // cap), BY_CAP
        if priced and cap * len(np.unique(pieces)) <= PRICED_WORK:
            bins, prices = packing_bound(pieces, cap)
            if bins > needed:
                needed, witness = bins, {**prices, **held}
        if needed > stages:
            stages, claim = needed, witness
    return stages, claim


def _packed(problem: Problem) -> list[tuple[IntArray, int, Mapping[str, object]]]:
    """Return the pieces to pack, a stage's tokens and the claim's field."""
    computed, held = problem.prefill_token_cap, problem.kv_capacity
    if not len(problem.prefix_tokens):
        caps = [cap for cap in (computed, held) if cap is not None]
        return [(problem.prompt_tokens, min(caps), {})] if caps else []
    packed: list[tuple[IntArray, int, Mapping[str, object]]] = []
    if computed is not None:
        packed.append((problem.prompt_pieces, computed, {}))
    if held is not None:
        packed.append((problem.prompt_tokens, held, {"held": True}))
    return packed
