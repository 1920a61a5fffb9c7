"""What a layer would cost at a device's peak rates: a profile for those who have measured none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...data.costs.cost import FloatArray
from ...data.costs.layer_profile import LayerProfile, Operation
from ...data.costs.model_shape import ModelShape

_TOKENS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192], dtype=np.float64)
_LENGTHS = np.array([1, 64, 128, 256, 512, 1024, 2048, 4096, 8192], dtype=np.float64)
_SEQUENCES = np.array([1, 8, 64, 256, 1024], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class RooflineDevice:
    """
    A device's peak rates.

    Parameters
    ----------
    name
        The device.
    flops
        Multiplications and additions a second, at 16 bits.
    bandwidth
        Bytes a second from its memory.
    memory
        Bytes.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float


ROOFLINE_DEVICES: Mapping[str, RooflineDevice] = {
    device.name: device
    for device in (
        RooflineDevice("a40", 149.7e12, 696e9, 48 * 2**30),
        RooflineDevice("a100-80gb", 312e12, 2039e9, 80 * 2**30),
        RooflineDevice("h100-80gb", 989e12, 3350e9, 80 * 2**30),
        RooflineDevice("h200", 989e12, 4800e9, 141e9),
        RooflineDevice("rtx4090", 165.2e12, 1008e9, 24 * 2**30),
    )
}
"""Data sheets' dense rates, by name."""


def roofline_profile(shape: ModelShape, device: RooflineDevice, tensor_parallel: int = 1) -> LayerProfile:
    """
    Return the profile of a model at a device's peak rates, which says that it is one.

    An operation takes the longer of its arithmetic at peak rate and its bytes at peak bandwidth; launches,
    imperfect kernels and synchronisation are not in it, so real times are longer.

    Parameters
    ----------
    shape
        The model.
    device
        The device.
    tensor_parallel
        Devices that share every layer evenly.
    """
    value = shape.bytes_per_value
    layer_bytes = shape.token_values * value
    head_bytes = shape.vocabulary * shape.hidden * value
    new = np.repeat(_SEQUENCES, len(_LENGTHS))
    held = np.tile(_LENGTHS, len(_SEQUENCES))
    kv = shape.kv_bytes_per_layer_token
    # Scores and weighted values: two products of query length by key length, of every head; causal, so half.
    per_pair = 4 * shape.heads * shape.head_dim

    def seconds(flops: FloatArray, moved: FloatArray) -> FloatArray:
        return np.maximum(flops / device.flops, moved / device.bandwidth) / tensor_parallel

    operations = (
        Operation(
            "dense", "both", ("tokens",), _TOKENS[:, None],
            seconds(2 * _TOKENS * shape.token_values, layer_bytes + 4 * _TOKENS * shape.hidden * value),
        ),
        Operation(
            "lm_head", "both", ("sequences",), _SEQUENCES[:, None],
            seconds(2 * _SEQUENCES * shape.vocabulary * shape.hidden, head_bytes + 0 * _SEQUENCES),
            per_layer=False,
        ),
        Operation(
            "encode_attention", "encode", ("length",), _LENGTHS[:, None],
            seconds(per_pair * _LENGTHS**2 / 2, kv * _LENGTHS),
        ),
        Operation(
            "decode_attention", "decode", ("decodes", "context"), np.column_stack((new, held)),
            seconds(per_pair * new * held, kv * new * held),
        ),
    )  # fmt: skip
    return LayerProfile(
        shape=shape,
        device=device.name,
        device_bytes=device.memory,
        tensor_parallel=tensor_parallel,
        operations=operations,
        source=f"analytical roofline of {shape.name} on {device.name}: arithmetic and bytes, not measured",
        measured=False,
    )
