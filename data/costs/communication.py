"""What devices that share a model tell each other, as operations of its profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .cost import FloatArray
from .layer_profile import LayerProfile, Operation
from .link import Link

EXPERTS = ("moe",)
"""Operations that compute a layer's experts."""
_FAR = 1e6
"""Tokens or sequences: what is told is linear in them up to there."""


def with_all_reduce(profile: LayerProfile, link: Link) -> LayerProfile:
    """
    Return a profile with what its tensor-parallel devices tell each other.

    A layer adds up two arrays: after the attention, and after the feed-forward part. Once an iteration the
    embedding is added up, and each device's share of the logits is gathered.

    Parameters
    ----------
    profile
        Of one device of the group, without synchronisation; returned as it is at degree 1, or if it was
        measured with it.
    link
        Between the devices.
    """
    degree, shape = profile.tensor_parallel, profile.shape
    if degree == 1 or profile.operation("synchronisation") is not None:
        return profile
    token, logits = (width * shape.bytes_per_value for width in (shape.hidden, shape.vocabulary))

    def reduced(tokens: float) -> float:
        return link.all_reduce_seconds(degree, tokens * token)

    told = (
        _line("synchronisation", "tokens", reduced, times=2),
        _line("embedding_synchronisation", "tokens", reduced, per_layer=False),
        _line(
            "logits_gather", "sequences",
            lambda sequences: link.gather_seconds(degree, sequences * logits), per_layer=False,
        ),
    )  # fmt: skip
    return replace(profile, operations=(*profile.operations, *told), warnings=())


def experts_apart(
    profile: LayerProfile, devices: int, link: Link | None
) -> tuple[LayerProfile, LayerProfile]:
    """
    Return a profile without its experts, and the experts alone with the exchange of tokens around them.

    Every device of the group gathers the tokens of all, computes those of its own experts, and the sums are
    scattered back (vLLM's all-gather and reduce-scatter).

    Parameters
    ----------
    profile
        Of one device, its experts timed with the tokens of all devices.
    devices
        That share the experts, each with tokens of its own.
    link
        Between them.
    """
    shape = profile.shape
    share = shape.expert_layers / shape.layers
    experts = [each for each in profile.operations if each.name in EXPERTS]
    rest = tuple(each for each in profile.operations if each.name not in EXPERTS)
    if link is not None:
        data = shape.hidden * shape.bytes_per_value

        def exchanged(tokens: float) -> float:
            return share * link.gather_seconds(devices, tokens * data)

        experts.append(_line("token_exchange", "tokens", exchanged, times=2))
    return replace(profile, operations=rest), replace(profile, operations=tuple(experts))


def _line(
    name: str, axis: str, seconds: Callable[[float], float], *, times: int = 1, per_layer: bool = True
) -> Operation:
    points: FloatArray = np.array([[1.0], [_FAR]])
    values = np.array([seconds(1.0), seconds(_FAR)])
    return Operation(name, "both", (axis,), points, values, times=times, per_layer=per_layer)
