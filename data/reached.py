"""Latency and throughput of a configuration in a run, next to the planned ones."""

from __future__ import annotations

from dataclasses import dataclass

from .files.record import plain


@dataclass(frozen=True, slots=True)
class Reached:
    """
    A configuration's steady state, planned and measured.

    Parameters
    ----------
    planned_throughput, throughput
        Requests a second.
    planned_latency, latency
        Seconds from the start of a request's encoding to its last token: planned of the 99th-percentile
        length, measured as the 99th percentile.
    latency_bound
        Seconds; None for no bound.
    requests
        That joined in the steady state.
    slowdown
        How many times slower the machine was than while it was profiled; None if unknown.
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
