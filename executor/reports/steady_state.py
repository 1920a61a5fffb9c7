"""The steady state of a run of an execution configuration, and how it compares with the plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...data.configuration import PlannedConfiguration
from ...data.costs.cost import FloatArray
from ...data.reached import Reached
from ...data.trace import Trace

_FEWEST_READINGS = 5
"""Of a machine's speed in the steady state: with fewer, those of the whole run count."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """
    What a run reached between filling the batch and running out of requests.

    Parameters
    ----------
    start, end
        Seconds after the job's start.
    latency
        The 99th percentile of the seconds from the start of a request's encoding to its last token.
    requests
        That joined in that time.
    """

    start: float
    end: float
    latency: float
    requests: int

    @property
    def throughput(self) -> float:
        """Requests a second."""
        return self.requests / (self.end - self.start)


def steady_state(trace: Trace) -> SteadyState | None:
    """
    Return what a run reached after the longest answer's rounds and before the last prefill stages.

    None if the run is too short to have such a time.

    Parameters
    ----------
    trace
        Of a run of a configuration.
    """
    if not len(trace):
        return None
    longest = int(trace.tokens.max())
    rounds = np.cumsum([stage.rounds for stage in trace.stages])
    joins = [number for number, stage in enumerate(trace.stages) if stage.kind == "prefill"]
    filled = [number for number in joins if rounds[number] >= longest]
    # The last stages take what is left: not a full batch.
    if len(filled) < 4:
        return None
    first, last = filled[0], filled[-2]
    joined = (trace.stage_of >= first) & (trace.stage_of < last)
    latency = float(np.quantile((trace.finished - trace.prefilled)[joined], 0.99))
    start, end = (trace.stages[number].start for number in (first, last))
    return SteadyState(start, end, latency, int(joined.sum()))


def reached(configuration: PlannedConfiguration, trace: Trace) -> Reached | None:
    """
    Return what a run reached of what was planned; None if it is too short to have a steady state.

    Parameters
    ----------
    configuration
        As planned.
    trace
        Of its run.
    """
    state = steady_state(trace)
    if state is None:
        return None
    readings, reference = _readings(trace, state), configuration.reference
    waited = _waited(readings)
    return Reached(
        planned_throughput=configuration.throughput,
        throughput=state.throughput,
        planned_latency=configuration.latency,
        latency=state.latency,
        latency_bound=configuration.latency_bound,
        requests=state.requests,
        slowdown=None
        if reference is None or not len(readings)
        else reference.slowdown(readings[:, 1:3], waited),
        waited=waited,
    )


def _readings(trace: Trace, state: SteadyState) -> FloatArray:
    """Return the readings of the machine's speed in the steady state, as the trace has them."""
    at = trace.readings[:, 0]
    within = (at >= state.start) & (at < state.end)
    if within.sum() < _FEWEST_READINGS:
        within[:] = True
    return np.asarray(trace.readings[within])


def _waited(readings: FloatArray) -> float:
    """Return the share of the time in which the process waited for a core; 0 if nobody knows."""
    if len(readings) < 2:
        return 0.0
    waited = float((readings[-1, 3] - readings[0, 3]) / (readings[-1, 0] - readings[0, 0]))
    return min(0.99, waited)
