"""Error of the simulation against a measured run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.costs.cost import CostModel
from ...data.costs.layer_profile import LayerProfile
from ...data.costs.link import Link
from ...data.readers.measured_run import MeasuredRun
from ...data.trace import Trace
from ...heuristics.iterations.replay import replay_run


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of a run, measured and simulated."""

    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Simulated over measured, minus one; NaN without a measurement."""
        return self.simulated / self.measured - 1 if self.measured else float("nan")


@dataclass(frozen=True, slots=True)
class Validation:
    """Comparison of a simulation with the run that it replays.

    metrics: By name: ``makespan_s``; ``tokens_per_s``, completion tokens over the makespan; ``ttft_*_s``,
        from a request's arrival to its first token; ``tpot_*_s``, from its first token to its last, per other
        token.
    order_correlation: Spearman's, of the requests' finish times.
    """

    metrics: dict[str, Metric]
    order_correlation: float
    requests: int

    def to_json(self) -> dict[str, object]:
        """Return the figures as plain JSON values."""
        metrics = {name: asdict(metric) | {"error": metric.error} for name, metric in self.metrics.items()}
        return {"requests": self.requests, "order_correlation": self.order_correlation, "metrics": metrics}


def validate_run(run: MeasuredRun, profile: LayerProfile, link: Link | None = None) -> Validation:
    """Compare a measured run with its simulation (:func:`replay_run`)."""
    simulated = replay_run(run, profile, link)
    measured = (run.first_token, run.finished)
    return _compare(
        run.workload.arrival,
        run.workload.output_tokens,
        measured,
        (simulated.first_token, simulated.finished),
    )


def validate_trace(trace: Trace, cost: CostModel) -> Validation:
    """Compare our trace with its stages at a cost model's times."""
    simulated = retime(trace, cost)
    return _compare(
        trace.queued,
        trace.tokens,
        (trace.first_token, trace.finished),
        (simulated.first_token, simulated.finished),
    )


def retime(trace: Trace, cost: CostModel) -> Trace:
    """Return a trace with a cost model's seconds."""
    stages, measured, modelled = [], [0.0], [0.0]
    clock = end = 0.0
    for stage in trace.stages:
        # Between two stages of a batch job the engine only decides; a pause is a wait for an arrival.
        waited = bool(((trace.queued > end) & (trace.queued <= stage.start)).any())
        clock += stage.start - end if waited else 0.0
        seconds = stage.model_seconds(cost)
        measured += [stage.start, stage.end]
        modelled += [clock, clock + seconds]
        stages.append(replace(stage, start=clock, end=clock + seconds))
        clock, end = clock + seconds, stage.end

    def moved(times: FloatArray) -> FloatArray:
        return np.interp(times, measured, modelled)

    return replace(
        trace,
        stages=tuple(stages),
        prefilled=moved(trace.prefilled),
        first_token=moved(trace.first_token),
        finished=moved(trace.finished),
    )


def _compare(
    queued: FloatArray,
    tokens: IntArray,
    measured: tuple[FloatArray, FloatArray],
    simulated: tuple[FloatArray, FloatArray],
) -> Validation:
    from scipy.stats import rankdata

    both = [_figures(queued, tokens, *times) for times in (measured, simulated)]
    ranks = [rankdata(times[1]) for times in (measured, simulated)]
    spread = float(ranks[0].std() * ranks[1].std())
    covariance = float(((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())).mean())
    return Validation(
        metrics={name: Metric(both[0][name], both[1][name]) for name in both[0]},
        order_correlation=covariance / spread if spread else 1.0,
        requests=len(queued),
    )


def _figures(queued: FloatArray, tokens: IntArray, first: FloatArray, last: FloatArray) -> dict[str, float]:
    makespan = float(last.max())
    figures = {"makespan_s": makespan, "tokens_per_s": float(tokens.sum()) / makespan}
    more = tokens > 1
    series = {"ttft": first - queued, "tpot": (last - first)[more] / (tokens[more] - 1)}
    for name, values in series.items():
        if len(values):
            figures[f"{name}_mean_s"] = float(values.mean())
            figures[f"{name}_p50_s"], figures[f"{name}_p99_s"] = np.quantile(values, (0.5, 0.99)).tolist()
    return figures
