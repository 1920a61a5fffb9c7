"""Collective operations of tensor and expert parallelism in a layer profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..arrays import FloatArray
from .layer_profile import LayerProfile, Operation
from .link import Link
from .model_shape import ModelShape

EXPERTS = ("moe",)
"""Operations that compute a layer's experts."""
_FAR = 1e6
"""Largest number of tokens for which the data sent is linear."""
_ROUTE = 8
"""Bytes of an expert's number and weight (vLLM: 32 bits each)."""
SQUARES = 8
"""Bytes of a token's squares of queries and keys."""


def with_all_reduce(profile: LayerProfile, link: Link, *, gathered: bool = False) -> LayerProfile:
    """Add tensor-parallel devices' collective operations to a profile.

    A layer all-reduces two arrays, after attention and after the feed-forward part. It also all-reduces the
    squares of queries and keys if their norm is over all heads. Each iteration all-reduces the embedding and
    gathers the logits.
    """
    degree, shape = profile.tensor_parallel, profile.shape
    if degree == 1 or profile.operation("synchronisation") is not None:
        return profile
    token, logits = (width * shape.bytes_per_value for width in (shape.hidden, shape.vocabulary))
    share = shape.expert_layers / shape.layers if gathered else 0.0

    def reduced(tokens: float) -> float:
        return link.all_reduce_seconds(degree, tokens * token)

    def after_feed_forward(tokens: float) -> float:
        return share * link.gather_seconds(degree, tokens * token) + (1 - share) * reduced(tokens)

    operations = [
        _line("synchronisation", "tokens", reduced),
        _line("feed_forward_synchronisation", "tokens", after_feed_forward),
        _line("embedding_synchronisation", "tokens", reduced, per_layer=False),
        _line(
            "logits_gather", "sequences",
            lambda sequences: link.gather_seconds(degree, sequences * logits), per_layer=False,
        ),
    ]  # fmt: skip
    if shape.norm_across:
        squares = _line(
            "norm_synchronisation", "tokens", lambda tokens: link.all_reduce_seconds(degree, tokens * SQUARES)
        )
        operations.append(squares)
    return replace(profile, operations=(*profile.operations, *operations), warnings=())


def experts_apart(profile: LayerProfile) -> tuple[LayerProfile, LayerProfile]:
    """Split a profile into the part without experts, and the experts."""
    experts = tuple(operation for operation in profile.operations if operation.name in EXPERTS)
    rest = tuple(operation for operation in profile.operations if operation.name not in EXPERTS)
    return replace(profile, operations=rest), replace(profile, operations=experts)


def exchange_seconds(shape: ModelShape, link: Link, tokens: Sequence[float]) -> float:
    """Return the seconds to exchange tokens between experts' devices.

    Every device gathers all tokens with their routes, computes those of its own experts, and scatters the
    sums (vLLM's all-gather and reduce-scatter). All wait for the device that receives most, which has the
    fewest tokens of its own.
    """
    if len(tokens) == 1:
        return 0.0
    received = sum(tokens) - min(tokens)
    data = received * (2 * shape.hidden * shape.bytes_per_value + shape.active_experts * _ROUTE)
    return shape.expert_layers * (2 * link.latency + data / link.bandwidth)


def _line(name: str, axis: str, seconds: Callable[[float], float], *, per_layer: bool = True) -> Operation:
    points: FloatArray = np.array([[1.0], [_FAR]])
    values = np.array([seconds(1.0), seconds(_FAR)])
    return Operation(name, "both", (axis,), points, values, per_layer=per_layer)
