"""Execution configurations, latency targets and devices of ExeGPT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ...data.arrays import FloatArray


class Strategy(StrEnum):
    """Division of the devices between encoding and decoding (ExeGPT, section 4.1)."""

    RRA = "RRA"
    """Every device alternates between encoding and decoding."""
    WAA_C = "WAA-C"
    """Some devices encode, others decode, divided by computation."""
    WAA_M = "WAA-M"
    """Some devices encode, others decode, divided by memory."""


@dataclass(frozen=True, slots=True)
class ExecConfig:
    """Execution configuration.

    encode_batch: Prompts of an encoding phase, the paper's :math:`B_E`.
    decode_steps: Decode iterations between two encoding phases, :math:`N_D`; 1 under WAA.
    micro_batches: Parts of a decode batch under WAA, :math:`B_m`; 1 under RRA, which splits it by stages.
    tensor_degree: Devices that share a layer, :math:`T_P`.
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
        smallest = min(self.encode_batch, self.decode_steps, self.micro_batches, self.tensor_degree)
        if smallest < 1 or self.tensor_groups < 0:
            raise ValueError(f"{self} has a number below one")


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets of a completion of the 99th-percentile length.

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
        """True if the latency is the only target."""
        return math.isinf(self.ttft) and math.isinf(self.tpot)

    def tightened(self, margin: float) -> Targets:
        """Return targets reduced by a share of each."""
        share = 1 - margin
        return Targets(share * self.latency, share * self.ttft, share * self.tpot)

    def within(self, latency: FloatArray, ttft: FloatArray, tokens: int) -> FloatArray:
        """Return latencies of completions, infinite if a target is missed."""
        keeps = (latency <= self.latency) & (ttft <= self.ttft) & (latency - ttft <= tokens * self.tpot)
        return np.where(keeps, latency, math.inf)

    def __str__(self) -> str:
        limits = (("", self.latency), ("a TTFT of ", self.ttft), ("a TPOT of ", self.tpot))
        return ", ".join(f"{name}{value:g} s" for name, value in limits if math.isfinite(value)) or "none"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one model instance, all of one kind.

    device_bytes: Memory of each; 0 for no limit.
    usable: Share of it for weights and KV cache.
    link_bandwidth, link_latency: Bytes a second each way between two devices, and seconds, for profiles
    without measured synchronisation. The default is PCIe 5.0 x16.
    host_bandwidth: Bytes a second between two devices through host memory.
    slots, kv_tokens: The engine's most decoding requests and KV tokens; 0 for no limit. Used under RRA only.

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
        """Return the seconds of a ring all-reduce."""
        if degree == 1:
            return 0.0
        return self.link_latency + 2 * (degree - 1) / degree * data / self.link_bandwidth


@dataclass(frozen=True, slots=True)
class Performance:
    """Performance of a configuration.

    throughput: Requests a second, in the steady state.
    latency: Seconds from the start of encoding to the last token, for the 99th-percentile length; infinite if
        the configuration does not fit into memory.
    decode_batch: Requests at the start of a decode iteration, the paper's :math:`B_D`.
    stages: Pipeline stages that encode and that decode; the same ones under RRA.
    device_bytes: Most bytes on one device.
    encode_seconds: Mean seconds of an encoding stage.
    """

    throughput: float
    latency: float
    decode_batch: float
    stages: tuple[int, int]
    device_bytes: float
    encode_seconds: float

    @property
    def ttft(self) -> float:
        """Seconds from a request's encoding to its first token."""
        return self.stages[0] * self.encode_seconds
