"""What an execution configuration reached in a run, beside what was planned of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .files.json_fields import JsonFields


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
        """Whether the measured latency is within the bound; None without one."""
        return None if self.latency_bound is None else self.latency <= self.latency_bound

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain JSON values, with those derived from them."""
        return {**asdict(self), "error": self.error, "bound_met": self.bound_met}

    @classmethod
    def from_json(cls, value: object, *, file: str | None = None) -> Reached:
        """
        Return what :meth:`to_json` wrote.

        Raises
        ------
        InputError
            If a field is missing or of another kind.
        """
        read = JsonFields(value, file, "reached", "Write it again with `batchbound report`.")
        names = ("planned_throughput", "throughput", "planned_latency", "latency")
        return cls(
            **{name: read.number(name) for name in names},
            latency_bound=read.optional_number("latency_bound"),
            requests=read.integer("requests"),
            slowdown=read.optional_number("slowdown"),
        )
