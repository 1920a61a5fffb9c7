"""Steady state of a configuration's run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...data.configuration import PlannedConfiguration, Reached
from ...data.trace import Trace


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Steady state of a run, between its fill and its end.

    start, end: Seconds after the job's start.
    latency: 99th percentile of the seconds from the start of a request's encoding to its last token.
    requests: Requests that joined in that time.
    """

    start: float
    end: float
    latency: float
    requests: int

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return self.requests / (self.end - self.start)


def steady_state(trace: Trace) -> SteadyState | None:
    """Return a run's steady state; None if too short.

    It lies between the longest completion's decode steps and the last prefill stages.
    """
    if not len(trace):
        return None
    longest = int(trace.tokens.max())
    decode_steps = np.cumsum([stage.decode_steps for stage in trace.stages])
    joins = [number for number, stage in enumerate(trace.stages) if stage.kind == "prefill"]
    filled = [number for number in joins if decode_steps[number] >= longest]
    # The last stages have no full batch.
    if len(filled) < 4:
        return None
    first, last = filled[0], filled[-2]
    joined = (trace.stage_of >= first) & (trace.stage_of < last)
    latency = float(np.quantile((trace.finished - trace.prefilled)[joined], 0.99))
    start, end = (trace.stages[number].start for number in (first, last))
    return SteadyState(start, end, latency, int(joined.sum()))


def reached(configuration: PlannedConfiguration, trace: Trace) -> Reached | None:
    """Compare planned and reached steady state."""
    state = steady_state(trace)
    if state is None:
        return None
    reference = configuration.reference
    return Reached(
        planned_throughput=configuration.throughput,
        throughput=state.throughput,
        planned_latency=configuration.latency,
        latency=state.latency,
        latency_bound=configuration.latency_bound,
        requests=state.requests,
        slowdown=None if reference is None else reference.slowdown(trace.readings),
    )
