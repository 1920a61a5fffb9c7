"""What the configurations of one row of a grid reach: all of them, or one with what it says of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...data.arrays import FloatArray, IntArray
from .configuration import Performance


@dataclass(frozen=True, slots=True)
class Probe:
    """
    What one configuration reaches, and what it says of the rest of its row.

    latency, throughput: Its own, seconds and requests a second.
    least_latency: No configuration of the row with as large an encoding batch, or a larger one, has less.
    most_throughput: None with as large an encoding batch, or a smaller one, has more.
    """

    latency: float
    throughput: float
    least_latency: float
    most_throughput: float


class Row(Protocol):
    """The configurations that differ in the encoding batch alone."""

    def reach(self, batches: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return latency and throughput for each of some encoding batches."""

    def ttft(self, batches: IntArray) -> FloatArray:
        """Return the seconds to a request's first token for each of some encoding batches."""

    def probe(self, low: int, at: int) -> Probe:
        """Return what a batch says of itself, of larger ones, and of smaller ones from ``low`` on."""

    def performance(self, batch: int) -> Performance:
        """Return all that is known of an encoding batch."""
