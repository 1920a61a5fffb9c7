"""Layer profile from a cost model of whole stages."""

from __future__ import annotations

import numpy as np

from ...data.costs.cost import CostModel
from ...data.costs.layer_profile import LayerProfile, Operation
from ...data.costs.model_shape import ModelShape

_MANY = 1e6
"""Tokens or slots far out, as lines are exact everywhere."""


def whole_model_profile(cost: CostModel, source: str) -> LayerProfile:
    """Return a one-layer profile with a cost model's stage costs.

    Layers cannot be separated, so it plans for one device, or for pipelines that divide evenly.
    """
    tokens = np.array([0.0, *_corners(cost)])
    tokens = np.unique(np.append(tokens, tokens.max() + _MANY))
    prefill = cost.prefill_seconds(tokens)
    slots = np.array([0.0, _MANY])
    decode_steps = cost.decode_base + cost.decode_per_slot * slots
    corners = np.array([[a, v] for a in (0.0, _MANY) for v in (0.0, 1e4)])
    kv_seconds = cost.decode_per_kv_token * corners[:, 0] * corners[:, 1]
    return LayerProfile(
        shape=ModelShape("whole model", 1, 1, 1, 1, 1, 1, 1),
        device="as the cost model's",
        device_bytes=0.0,
        tensor_parallel=1,
        operations=(
            Operation("prefill stage", "encode", ("tokens",), tokens[:, None], prefill),
            Operation("decode step", "decode", ("sequences",), slots[:, None], decode_steps),
            Operation("keys and values", "decode", ("decodes", "context"), corners, kv_seconds),
        ),
        source=source,
    )


def _corners(cost: CostModel) -> list[float]:
    """Return the tokens where a stage's cost may change its slope."""
    slope, beyond, bend = cost.prefill_per_token, cost.prefill_per_token_beyond, cost.prefill_bend
    corners = [bend] if beyond > 0 else []
    if slope > 0:
        corners.append((cost.prefill_floor - cost.prefill_base) / slope)
    if slope + beyond > 0:
        corners.append((cost.prefill_floor - cost.prefill_base + beyond * bend) / (slope + beyond))
    return [tokens for tokens in corners if tokens > 0]
