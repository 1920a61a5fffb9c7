"""Estimated cost of a layer from a device's peak rates."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray
from ...data.costs.communication import SQUARES
from ...data.costs.layer_profile import LayerProfile, Operation
from ...data.costs.link import LINKS, Link, usual_link
from ...data.costs.model_shape import ModelShape
from ...data.files.disk import read_json_object
from ...data.files.record import record

_TOKENS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192], dtype=np.float64)
_LENGTHS = np.array([1, 64, 128, 256, 512, 1024, 2048, 4096, 8192], dtype=np.float64)
_SEQUENCES = np.array([1, 8, 64, 256, 1024], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class RooflineDevice:
    """Peak rates of a device.

    flops: Multiplications and additions a second, at 16 bits, dense.
    bandwidth: Bytes a second from its memory.
    memory: Bytes.
    flops_8bit, flops_4bit: At fewer bits; 0 without such units.

    Raises ValueError if a rate is not positive and finite.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    flops_8bit: float = 0.0
    flops_4bit: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "memory"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} of {self.name!r} is {value}; it must be positive")
        if not min(self.flops_8bit, self.flops_4bit) >= 0:
            raise ValueError(f"rates of {self.name!r} at fewer bits are negative")

    def flops_at(self, bits: int) -> float:
        """Return the rate at a number of bits, by default of 16."""
        return {8: self.flops_8bit, 4: self.flops_4bit}.get(bits, 0.0) or self.flops

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RooflineDevice:
        """Load a device from JSON; raise InputError for impossible rates."""
        return record(cls, read_json_object(path), file=path)


_T, _G, _GB = 1e12, 1e9, 2**30
ROOFLINE_DEVICES: Mapping[str, RooflineDevice] = {
    device.name: device
    for device in (
        RooflineDevice("t4", 65 * _T, 320 * _G, 16 * _GB),
        RooflineDevice("v100-32gb", 125 * _T, 900 * _G, 32 * _GB),
        RooflineDevice("a10", 125 * _T, 600 * _G, 24 * _GB),
        RooflineDevice("a40", 149.7 * _T, 696 * _G, 48 * _GB),
        RooflineDevice("a100-40gb", 312 * _T, 1555 * _G, 40 * _GB),
        RooflineDevice("a100-80gb", 312 * _T, 2039 * _G, 80 * _GB),
        RooflineDevice("l4", 121 * _T, 300 * _G, 24 * _GB, 242 * _T),
        RooflineDevice("l40s", 362 * _T, 864 * _G, 48 * _GB, 733 * _T),
        RooflineDevice("h20", 148 * _T, 4000 * _G, 96 * _GB, 296 * _T),
        RooflineDevice("h100-80gb", 989 * _T, 3350 * _G, 80 * _GB, 1979 * _T),
        RooflineDevice("h200", 989 * _T, 4800 * _G, 141e9, 1979 * _T),
        RooflineDevice("b200", 2250 * _T, 8000 * _G, 180e9, 4500 * _T, 9000 * _T),
        RooflineDevice("b300", 2500 * _T, 8000 * _G, 270e9, 5000 * _T, 15000 * _T),
        RooflineDevice("gb200", 2500 * _T, 8000 * _G, 186e9, 5000 * _T, 10000 * _T),
        RooflineDevice("rtx4090", 165.2 * _T, 1008 * _G, 24 * _GB, 330.3 * _T),
        RooflineDevice("rtx5090", 209.5 * _T, 1792 * _G, 32 * _GB, 419 * _T, 1676 * _T),
        RooflineDevice("rtxpro6000", 503.8 * _T, 1597.6 * _G, 96 * _GB, 1007.6 * _T, 2015 * _T),
        RooflineDevice("mi300x", 1307.4 * _T, 5300 * _G, 192e9, 2614.9 * _T),
    )
}
"""Dense rates of data sheets, by name."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Efficiency of a serving engine on a device.

    weights, keys: Share of memory bandwidth for reading weights, and KV cache.
    decoding, encoding: Share of the arithmetic rate in decodes, and in prompts.
    link: Share of the link's bandwidth.
    collective: Overhead of a collective operation, seconds.
    kernel: Overhead of a kernel of a layer, seconds (:attr:`.ModelShape.kernels`).
    iteration: Overhead of an iteration, seconds.
    """

    weights: float
    keys: float
    decoding: float
    encoding: float
    link: float
    collective: float
    kernel: float
    iteration: float


CALIBRATED = Efficiency(0.805, 0.746, 0.6, 0.788, 0.396, 13.2e-6, 3.31e-6, 0.466e-3)
"""Efficiency fitted to measured points by ``benchmarks/roofline_error.py``."""
ERROR_BAR = (0.74, 1.52)
"""Range of estimated over measured TPOT for 90 % of held-out points."""
ERROR_MEDIAN = 1.04
"""Median of that ratio."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline estimate of a model on a device.

    degree: Devices that share every layer.
    efficiency: Shares of the rates that are reached.
    link: Link between the devices; the device's usual one by default.
    """

    shape: ModelShape
    device: RooflineDevice
    degree: int = 1
    efficiency: Efficiency = CALIBRATED
    link: Link | None = None

    def layer_seconds(self, tokens: FloatArray, *, prompts: bool) -> FloatArray:
        """Return the seconds of a layer's matrices, mean over the layers."""
        shape, of = self.shape, self.efficiency
        read = shape.read_bytes(tokens) / (self.device.bandwidth * of.weights)
        share = of.encoding if prompts else of.decoding
        arithmetic = 2 * tokens * shape.token_values / (self.device.flops_at(shape.multiply_bits) * share)
        return np.asarray(np.maximum(read, arithmetic) / self.degree + of.kernel * shape.kernels)

    def head_seconds(self, sequences: FloatArray) -> FloatArray:
        """Return the seconds of the output head, once an iteration."""
        values = self.shape.vocabulary * self.shape.hidden
        read = values * self.shape.bytes_per_value / (self.device.bandwidth * self.efficiency.weights)
        arithmetic = 2 * sequences * values / (self.device.flops * self.efficiency.decoding)
        return np.asarray(np.maximum(read, arithmetic) / self.degree + self.efficiency.iteration)

    def decode_attention(self, sequences: FloatArray, context: FloatArray) -> FloatArray:
        """Return the seconds of reading a layer's KV cache."""
        kv_bytes = sequences * self.shape.attended(context) * self.shape.kv_bytes_per_layer_token
        parts = self.degree / self.shape.kv_copies(self.degree)
        return np.asarray(kv_bytes / (parts * self.device.bandwidth * self.efficiency.keys))

    def encode_attention(self, length: FloatArray) -> FloatArray:
        """Return the seconds of a layer's attention of one prompt."""
        pairs = length * self.shape.attended(length / 2)
        rate = self.device.flops_at(self.shape.multiply_bits) * self.efficiency.encoding
        return np.asarray(self.shape.prompt_pair_flops * pairs / (rate * self.degree))

    def all_reduce_seconds(self, tokens: FloatArray) -> FloatArray:
        """Return the seconds of a layer's all-reduces by tokens."""
        if self.degree == 1:
            return np.zeros_like(tokens)
        shape, across = self.shape, self.shape.norm_across
        link = self.link or usual_link(self.device.name) or LINKS["pcie4"]
        data = tokens * (2 * shape.hidden * shape.bytes_per_value + across * SQUARES)
        ring = 2 * (self.degree - 1) / self.degree * data / (link.bandwidth * self.efficiency.link)
        return np.asarray((2 + across) * self.efficiency.collective + ring)

    def decode_steps(self, sequences: FloatArray, contexts: FloatArray) -> FloatArray:
        """Return the seconds of a token for each sequence, by sequences and mean tokens held."""
        layer = self.layer_seconds(sequences, prompts=False) + self.decode_attention(sequences, contexts)
        layer = layer + self.all_reduce_seconds(sequences)
        return np.asarray(self.shape.layers * layer + self.head_seconds(sequences))

    def decode_step(self, sequences: float, context: float) -> float:
        """Return the seconds of a token for each sequence."""
        return float(self.decode_steps(np.array([float(sequences)]), np.array([float(context)]))[0])

    def prompt_seconds(
        self, sequences: float, length: float, *, reused: float = 0.0, together: float = 1.0
    ) -> float:
        """Return the seconds that a prompt adds to iterations of decoding sequences.

        reused: Tokens of the prompt that need no computation.
        together: Prompts in an iteration that has prompts; below 1 for chunks. The weights are read once for
            all of them and the decodes.
        """
        batch, whole, kept = (np.array([float(value)]) for value in (sequences, length, reused))
        decoding = self.layer_seconds(batch, prompts=False)
        mixed = self.layer_seconds(batch + together * (whole - kept), prompts=True)
        seconds = np.maximum(0.0, mixed - decoding) / together
        seconds = seconds + self.encode_attention(whole) - self.encode_attention(kept)
        seconds = seconds + self.all_reduce_seconds(whole - kept) - self.all_reduce_seconds(np.zeros(1))
        return self.shape.layers * float(seconds[0])

    def tpot(self, sequences: float, input_tokens: float, output_tokens: float) -> float:
        """Return the seconds per token of a request in a steady state.

        Besides a token of each sequence, iterations compute prompts at the rate that keeps the number of
        sequences: one per ``output_tokens`` tokens of a request.
        """
        prompts = sequences / output_tokens
        step = self.decode_step(sequences, input_tokens + output_tokens / 2)
        return step + prompts * self.prompt_seconds(sequences, input_tokens, together=max(1.0, prompts))

    def profile(self) -> LayerProfile:
        """Return the model's estimated profile, with the estimates' error."""
        new, contexts = np.repeat(_SEQUENCES, len(_LENGTHS)), np.tile(_LENGTHS, len(_SEQUENCES))
        by_tokens, far = _TOKENS[:, None], np.array([[1.0], [1e6]])
        operations = [
            Operation("dense", "encode", ("tokens",), by_tokens, self.layer_seconds(_TOKENS, prompts=True)),
            Operation("dense", "decode", ("tokens",), by_tokens, self.layer_seconds(_TOKENS, prompts=False)),
            Operation(
                "lm_head", "both", ("sequences",), _SEQUENCES[:, None], self.head_seconds(_SEQUENCES),
                per_layer=False,
            ),
            Operation(
                "encode_attention", "encode", ("length",), _LENGTHS[:, None], self.encode_attention(_LENGTHS)
            ),
            Operation(
                "decode_attention", "decode", ("decodes", "context"), np.column_stack((new, contexts)),
                self.decode_attention(new, contexts),
            ),
        ]  # fmt: skip
        if self.degree > 1:
            all_reduces = self.all_reduce_seconds(far[:, 0])
            operations.append(Operation("synchronisation", "both", ("tokens",), far, all_reduces))
        low, high = ERROR_BAR
        return LayerProfile(
            shape=self.shape,
            device=self.device.name,
            device_bytes=self.device.memory,
            tensor_parallel=self.degree,
            operations=tuple(operations),
            source=f"roofline of {self.shape.name} on {self.device.name}, estimated from its rates,"
            f" not measured: of models and devices left out of its calibration, 90 % of the estimated TPOT"
            f" are {low:.2f} to {high:.2f} times the measured ones, half of them below {ERROR_MEDIAN:.2f}",
            measured=False,
        )
