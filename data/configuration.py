"""Execution configurations (ExeGPT), planned and reached."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .costs.reference_time import ReferenceTime
from .files.record import plain

STRATEGIES = ("RRA", "WAA-C", "WAA-M")


@dataclass(frozen=True, slots=True)
class PlannedConfiguration:
    """Execution configuration of a plan, with its lengths.

    strategy: One of :data:`STRATEGIES`.
    encode_batch: Prompts of an encoding, :math:`B_E`.
    decode_steps: Decode iterations between two encodings, :math:`N_D`; 1 under WAA.
    decode_batch: Requests at the start of a decode iteration, :math:`B_D`; 0 for no fixed number.
    lead: Batches that are encoded ahead under WAA; 0 under RRA.
    input_tokens, input_deviation: Mean and standard deviation of prompts, tokens.
    iterations, iterations_deviation: Mean and standard deviation of a completion's decode iterations.
    latency_bound: Seconds from the start of a request's encoding to its last token, or None.
    latency: Expected seconds of a completion of the 99th-percentile length.
    throughput: Expected requests per second in the steady state.
    reference: Speed of the profiled machine; None if unknown.
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
            raise ValueError(f"strategy {self.strategy!r} is none of {', '.join(STRATEGIES)}")

    @property
    def handed_over(self) -> bool:
        """True if one worker encodes for another that decodes (WAA)."""
        return self.strategy != "RRA"

    @property
    def slots(self) -> int:
        """Twice the requests that run at a time, as their number varies.

        A batch without a fixed size holds at most the requests that join while a completion decodes.
        """
        batch = self.decode_batch or self.encode_batch * self.iterations
        return 2 * math.ceil(max(batch, 1.0) + self.encode_batch)


@dataclass(frozen=True, slots=True)
class Reached:
    """Steady state of a configuration, planned and measured.

    planned_throughput, throughput: Requests a second.
    planned_latency, latency: Seconds from the start of encoding to the last token, for the 99th percentile.
    latency_bound: Seconds; None for no bound.
    requests: Requests that joined in the steady state.
    slowdown: Factor by which the machine was slower than when profiled; None if unknown.
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
        """True if the measured latency is within its bound."""
        return None if self.latency_bound is None else self.latency <= self.latency_bound

    def to_json(self) -> dict[str, object]:
        """Return fields and derived values as plain JSON values."""
        return {**plain(self), "error": self.error, "bound_met": self.bound_met}
