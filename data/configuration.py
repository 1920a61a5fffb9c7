"""Execution configurations (ExeGPT): as planned, and as reached in a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .costs.reference_time import ReferenceTime
from .files.record import plain

STRATEGIES = ("RRA", "WAA-C", "WAA-M")


@dataclass(frozen=True, slots=True)
class PlannedConfiguration:
    """
    The configuration a plan is run with, and the lengths it was chosen for (ExeGPT).

    strategy: One of :data:`STRATEGIES`.
    encode_batch: Prompts of an encoding, :math:`B_E`.
    decode_steps: Decode iterations between two encodings, :math:`N_D`; 1 under WAA.
    decode_batch: Requests a decode iteration starts with, :math:`B_D`; 0 to leave it as it comes.
    lead: Batches that are encoded ahead under WAA; 0 under RRA.
    input_tokens, input_deviation: Mean and standard deviation of prompts, tokens.
    iterations, iterations_deviation: Mean and standard deviation of the decode iterations of a completion.
    latency_bound: Seconds from the start of a request's encoding to its last token; None for no bound.
    latency: Seconds expected, for a completion of the 99th-percentile length.
    throughput: Requests a second expected, in the steady state.
    reference: How fast the machine was that was profiled; None if unknown.
    """

    strategy: str
    encode_batch: int
    decode_steps: int
    decode_batch: float
    lead: int
    input_tokens: float
    input_deviation: float
    iterations: float
    iterations_deviation: float
    latency_bound: float | None
    latency: float
    throughput: float
    reference: ReferenceTime | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"the strategy {self.strategy!r} is none of {', '.join(STRATEGIES)}")

    @property
    def handed_over(self) -> bool:
        """True if one worker encodes for another that decodes (WAA)."""
        return self.strategy != "RRA"

    @property
    def slots(self) -> int:
        """
        Slots that hold what runs at a time, twice over since that varies.

        A batch left as it comes is at most what joins while a completion is decoded: an encoding each
        iteration.
        """
        batch = self.decode_batch or self.encode_batch * self.iterations
        return 2 * math.ceil(max(batch, 1.0) + self.encode_batch)


@dataclass(frozen=True, slots=True)
class Reached:
    """
    A configuration's steady state, planned and measured.

    planned_throughput, throughput: Requests a second.
    planned_latency, latency: Seconds from the start of a request's encoding to its last token: planned of the
        99th-percentile length, measured as the 99th percentile.
    latency_bound: Seconds; None for no bound.
    requests: That joined in the steady state.
    slowdown: How many times slower the machine was than while it was profiled; None if unknown.
    """

    planned_throughput: float
    throughput: float
    planned_latency: float
    latency: float
    latency_bound: float | None
    requests: int
    slowdown: float | None

    @property
    def error(self) -> float:
        """Planned throughput over the measured one, minus one."""
        return self.planned_throughput / self.throughput - 1

    @property
    def bound_met(self) -> bool | None:
        """True if the measured latency is within the bound; None without one."""
        return None if self.latency_bound is None else self.latency <= self.latency_bound

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain JSON values, with those derived from them."""
        return {**plain(self), "error": self.error, "bound_met": self.bound_met}
