"""Execution configurations: what ExeGPT's scheduler chooses, and the devices it chooses for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ...data.arrays import FloatArray


class Strategy(StrEnum):
    """How encoding and decoding share the devices (ExeGPT, section 4.1)."""

    RRA = "RRA"
    """Every device encodes and decodes in turn."""
    WAA_C = "WAA-C"
    """Some devices encode, others decode, shared out by computation."""
    WAA_M = "WAA-M"
    """Some devices encode, others decode, shared out by memory."""


@dataclass(frozen=True, slots=True)
class ExecConfig:
    """
    One execution configuration.

    encode_batch: Prompts of an encoding phase, the paper's :math:`B_E`.
    decode_steps: Decode iterations between two encoding phases, :math:`N_D`; 1 under WAA.
    micro_batches: Parts a decode batch is split into under WAA, :math:`B_m`; 1 under RRA, which splits it by
        stages.
    tensor_degree: Devices that share a layer where layers are shared, :math:`T_P`.
    tensor_groups: Groups of that many devices; the others hold layers alone.
    Raises ValueError if a number is below one (groups: zero).
    """

    strategy: Strategy
    encode_batch: int
    decode_steps: int = 1
    micro_batches: int = 1
    tensor_degree: int = 1
    tensor_groups: int = 0

    def __post_init__(self) -> None:
        least = min(self.encode_batch, self.decode_steps, self.micro_batches, self.tensor_degree)
        if least < 1 or self.tensor_groups < 0:
            raise ValueError(f"{self} has a number below one")


@dataclass(frozen=True, slots=True)
class Targets:
    """
    What a completion of the 99th-percentile length must keep to; infinite for no target.

    Parameters
    ----------
    latency
        Seconds from the start of its encoding to its last token.
    ttft
        Seconds from there to its first token.
    tpot
        Seconds a token after the first.

    Raises
    ------
    ValueError
        If a target is not positive.
    """

    latency: float = math.inf
    ttft: float = math.inf
    tpot: float = math.inf

    def __post_init__(self) -> None:
        if not min(self.latency, self.ttft, self.tpot) > 0:
            raise ValueError(f"{self} has a target that is not positive")

    @classmethod
    def of(cls, bound: float | Targets) -> Targets:
        """Return targets: themselves, or a latency alone."""
        return bound if isinstance(bound, Targets) else cls(bound)

    @property
    def of_latency_alone(self) -> bool:
        """Whether there is no target for the first token, nor for those after it."""
        return math.isinf(self.ttft) and math.isinf(self.tpot)

    def tightened(self, margin: float) -> Targets:
        """Return targets with a share of each kept back."""
        left = 1 - margin
        return Targets(left * self.latency, left * self.ttft, left * self.tpot)

    def within(self, latency: FloatArray, ttft: FloatArray, tokens: int) -> FloatArray:
        """Return latencies, infinite where a target is missed, of completions of so many tokens."""
        kept = (latency <= self.latency) & (ttft <= self.ttft) & (latency - ttft <= tokens * self.tpot)
        return np.where(kept, latency, math.inf)

    def __str__(self) -> str:
        named = (("", self.latency), ("a TTFT of ", self.ttft), ("a TPOT of ", self.tpot))
        return ", ".join(f"{name}{value:g} s" for name, value in named if math.isfinite(value)) or "none"


@dataclass(frozen=True, slots=True)
class Cluster:
    """
    The devices of one model instance.

    devices: Of one kind.
    device_bytes: Memory of each; 0 for no limit.
    usable: Share of it for weights, keys and values.
    link_bandwidth, link_latency: Between two devices: bytes a second each way, and seconds. Modelled, where
        the profile holds no synchronisation of its own. By default those of PCIe 5.0 x16.
    host_bandwidth: From a device to another through the host's memory, bytes a second.
    slots, kv_tokens: Most requests decoding at once, and most tokens of keys and values held, where the
        engine sets such limits; 0 for none. Looked at under RRA.
    Raises ValueError if there is no device.
    """

    devices: int
    device_bytes: float = 0.0
    usable: float = 0.9
    link_bandwidth: float = 50e9
    link_latency: float = 10e-6
    host_bandwidth: float = 20e9
    slots: int = 0
    kv_tokens: int = 0

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"a cluster has {self.devices} devices; it needs at least one")

    def all_reduce_seconds(self, degree: int, data: float) -> float:
        """
        Return the seconds in which ``degree`` devices add up an array each has (ring all-reduce).

        degree: Devices.
        data: Bytes of the array.
        """
        if degree == 1:
            return 0.0
        return self.link_latency + 2 * (degree - 1) / degree * data / self.link_bandwidth


@dataclass(frozen=True, slots=True)
class Performance:
    """
    What a configuration reaches.

    throughput: Requests a second, in the steady state.
    latency: Seconds from the start of a request's encoding to its last token, for the 99th-percentile length;
        infinite if the configuration does not fit into memory.
    decode_batch: Requests that a decode iteration starts with, the paper's :math:`B_D`.
    stages: Pipeline stages that encode and that decode; the same ones under RRA.
    device_bytes: Most bytes on one device.
    encode_seconds: Of an encoding stage, on average.
    """

    throughput: float
    latency: float
    decode_batch: float
    stages: tuple[int, int]
    device_bytes: float
    encode_seconds: float

    @property
    def ttft(self) -> float:
        """Seconds from the start of a request's encoding to its first token."""
        return self.stages[0] * self.encode_seconds
