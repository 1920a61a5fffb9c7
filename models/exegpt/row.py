"""Performance of a row of configurations, with bounds for searches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...data.arrays import FloatArray, IntArray
from ...data.costs.layer_profile import LayerProfile
from ...data.costs.model_shape import ModelShape
from ...data.lengths.pair import LengthPair
from .completion import Occupancy
from .configuration import Cluster, Performance
from .stage_seconds import StageSeconds


@dataclass(frozen=True, slots=True)
class Probe:
    """Performance of one configuration, and bounds on its row.

    latency, throughput: Its own, seconds and requests a second.
    least_latency: Lower bound for this and larger encoding batches.
    most_throughput: Upper bound for this and smaller encoding batches.
    """

    latency: float
    throughput: float
    least_latency: float
    most_throughput: float


class Row(Protocol):
    """Configurations that differ in the encoding batch alone."""

    def reach(self, batches: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return latency and throughput of some encoding batches."""

    def ttft(self, batches: IntArray) -> FloatArray:
        """Return the seconds to the first token of some batches."""

    def probe(self, low: int, at: int) -> Probe:
        """Return a batch's performance, and bounds for larger and smaller ones."""

    def performance(self, batch: int) -> Performance:
        """Return the full performance of an encoding batch."""


class RowTimeline(Protocol):
    """:class:`~.timeline.Timeline` as its rows use it."""

    cluster: Cluster
    lengths: LengthPair
    profile: LayerProfile
    shape: ModelShape
    survival: FloatArray
    longest: int

    def stage_seconds(self, devices: int, degree: int, groups: int) -> StageSeconds:
        """Return the stages of these devices."""

    def occupancy(self, decode_steps: int) -> Occupancy:
        """Return a query's share of the decode batch."""

    def peak(self, occupancy: Occupancy, encode_batch: FloatArray) -> FloatArray:
        """Return the bytes of KV cache."""

    def within_memory(self, seconds: FloatArray, device_bytes: FloatArray) -> FloatArray:
        """Return latencies, infinite where a device lacks memory."""

    def waa_bytes(
        self,
        encode_batch: FloatArray,
        encoders: int,
        batches: int,
        lead: IntArray | int,
        copies: float = 1.0,
    ) -> FloatArray:
        """Return the bytes on the fullest device."""

    def handover_seconds(self, encode_batch: float) -> float:
        """Return the seconds of moving KV cache through host memory."""
