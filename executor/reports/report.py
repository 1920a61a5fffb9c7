"""The report of a run: what it took, what was planned, what is proven, and where the time went."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...data.bound import Bound
from ...data.costs.calibration import FitError
from ...data.costs.cost import CostModel, FloatArray, IntArray
from ...data.problem import Problem
from ...data.report import LengthError, Percentiles, Report
from ...data.trace import Trace
from .bubbles import slot_seconds


def report(
    problem: Problem,
    trace: Trace,
    bound: Bound | None,
    planned_makespan: float | None,
    fit: FitError | None = None,
    *,
    run_bound: Bound | None = None,
    seconds: float | None = None,
) -> Report:
    """
    Return the report of a run.

    Parameters
    ----------
    problem
        The problem that was planned, with its cost model and the lengths the plan counted on.
    trace
        The run. A request of the problem that it did not serve counts as resumed: answered by an earlier run.
    bound
        A proven bound of the problem, or None. One that is not valid in general is left out.
    planned_makespan
        Model seconds the plan predicted, or None.
    fit
        The error of the problem's cost model, if it is a fitted one.
    run_bound
        A proven bound of the requests served, at the answer lengths that came out. If all were served and
        came out as planned it is a bound of the problem, too, and the larger of the two counts.
    seconds
        What planning or running took the program, to be handed on.

    Raises
    ------
    ValueError
        If the trace serves a request that the problem does not have.
    """
    rows = _rows(problem, trace)
    served = np.isfinite(trace.finished)
    requests = int(served.sum())
    planned = problem.workload.output_tokens[rows][served]
    actual = trace.tokens[served]
    off = planned - actual
    makespan = trace.makespan
    wrong = int(np.count_nonzero(off))
    proven = _valid(bound)
    as_planned = requests == len(problem) and not wrong
    bounds_of_run = [each for each in (_valid(run_bound), proven if as_planned else None) if each is not None]
    padding, padding_seconds = _padding(problem.cost, trace)
    clock = "model" if trace.engine.get("name") == "simulator" else "measured"
    bursts = sum(stage.kind == "decode" for stage in trace.stages)
    pace, missed = (None, None) if clock == "model" else pace_of(problem.cost, trace)
    later = served & (trace.tokens > 1)
    return Report(
        clock=clock,
        makespan=makespan,
        model_makespan=model_seconds(problem.cost, trace, overheads=clock != "model"),
        schedule_makespan=model_seconds(problem.cost, trace, overheads=False),
        planned_makespan=planned_makespan,
        bound=None if proven is None else proven.seconds,
        bound_source=None if proven is None else proven.source,
        run_bound=max((each.seconds for each in bounds_of_run), default=None),
        requests=requests,
        resumed=len(problem) - requests,
        slots=trace.slots,
        prefill_stages=trace.prefill_stages,
        decode_rounds=trace.decode_rounds,
        evictions=trace.evictions,
        prompt_tokens=int(problem.prompt_tokens[rows][served].sum()),
        output_tokens=int(actual.sum()),
        utilization=_utilization(
            problem.cost, trace, model_seconds(problem.cost, trace, overheads=clock != "model")
        ),
        slot_seconds=slot_seconds(trace),
        finish=_percentiles((trace.finished - trace.queued)[served]),
        first_token=_percentiles((trace.first_token - trace.queued)[served]),
        per_token=_percentiles((trace.finished - trace.first_token)[later] / (trace.tokens[later] - 1)),
        lengths=LengthError(
            mean_absolute=float(np.abs(off).mean()) if requests else 0.0,
            bias=float(off.mean()) if requests else 0.0,
            wrong=wrong,
        ),
        padding=padding,
        padding_seconds=padding_seconds,
        change_seconds=0.0 if clock == "model" else problem.cost.decode_per_change * bursts,
        pace=pace,
        missed=missed,
        between=None if clock == "model" else makespan - sum(stage.seconds for stage in trace.stages),
        fit=fit,
        engine=dict(trace.engine),
        seconds=seconds,
    )


def model_seconds(cost: CostModel, trace: Trace, *, overheads: bool = True) -> float:
    """
    Return the seconds a cost model gives what a run did.

    Every stage costs what the model says of its tokens, active slots and the keys and values it read; a stage
    that prefills a request waits until that has arrived.

    Parameters
    ----------
    cost, trace
        The model and the run.
    overheads
        Whether to count what the engine adds: padding that attention read, and changes of the batch.
    """
    edges = _model_edges(cost, trace, overheads=overheads)
    return float(edges[-1, 1]) if len(edges) else 0.0


def in_model_seconds(cost: CostModel, trace: Trace) -> Trace:
    """
    Return a run as it would have been at a cost model's pace, with no time between stages.

    On that clock, and on no other, a run may stand beside a proven bound.

    Parameters
    ----------
    cost, trace
        The model and the run.
    """
    if not trace.stages:
        return trace
    edges = _model_edges(cost, trace)
    stages = tuple(
        replace(stage, start=float(start), end=float(end))
        for stage, (start, end) in zip(trace.stages, edges, strict=True)
    )
    measured = np.array([(stage.start, stage.end) for stage in trace.stages]).ravel()

    def moved(times: FloatArray) -> FloatArray:
        return np.where(np.isfinite(times), np.interp(times, measured, edges.ravel()), times)

    return replace(
        trace,
        stages=stages,
        prefilled=moved(trace.prefilled),
        first_token=moved(trace.first_token),
        finished=moved(trace.finished),
    )


def pace_of(cost: CostModel, trace: Trace) -> tuple[float | None, float | None]:
    """
    Return how much slower than a cost model a run's machine was, and what the model missed besides.

    Returns
    -------
    pace
        Measured over model seconds of the median stage, stages weighted by their model seconds.
    missed
        Measured seconds of all stages over model seconds at that pace, minus one. Both are None where the
        model gives no stage any time, or none was measured.
    """
    model = np.array([stage.model_seconds(cost) for stage in trace.stages])
    measured = np.array([stage.seconds for stage in trace.stages])
    if not model.sum() or not measured.sum():
        return None, None
    counted = model > 0
    ratio = measured[counted] / model[counted]
    order = np.argsort(ratio)
    share = np.cumsum(model[counted][order])
    pace = float(ratio[order][np.searchsorted(share, share[-1] / 2)])
    return (pace, float(measured.sum() / (pace * model.sum()) - 1)) if pace else (None, None)


def _model_edges(cost: CostModel, trace: Trace, *, overheads: bool = True) -> FloatArray:
    """Return when each stage begins and ends in model seconds, shape (stages, 2)."""
    ready = np.zeros(len(trace.stages))
    served = trace.stage_of >= 0
    np.maximum.at(ready, trace.stage_of[served], trace.queued[served])
    edges = np.zeros((len(trace.stages), 2))
    time = 0.0
    for index, stage in enumerate(trace.stages):
        time = max(time, float(ready[index]))
        end = time + stage.model_seconds(cost, overheads=overheads)
        edges[index] = time, end
        time = end
    return edges


def _valid(bound: Bound | None) -> Bound | None:
    return bound if bound is not None and bound.valid else None


def _rows(problem: Problem, trace: Trace) -> IntArray:
    row_of = {name: row for row, name in enumerate(problem.workload.ids.tolist())}
    strangers = [name for name in trace.ids if name not in row_of]
    if strangers:
        raise ValueError(
            f"the trace serves {strangers[0]!r}, which is not a request of the problem; it is of another plan"
        )
    return np.array([row_of[name] for name in trace.ids], dtype=np.int64)


def _utilization(cost: CostModel, trace: Trace, makespan: float) -> float:
    r"""
    Return :math:`\frac{1}{T} \frac{\sum_i N^d_i}{J} t(J)`: full rounds' seconds over the makespan.

    As the hybrid paper counts it (section V), where a full round takes t(J) = 71 ms at J = 200 slots. Such
    a round holds J times the keys and values that an active slot held on average. The makespan is in model
    seconds as well: a share of measured seconds would be more or less than all by the model's error.
    """
    decodes = [stage for stage in trace.stages if stage.kind == "decode"]
    slot_rounds = sum(stage.rounds * stage.active for stage in decodes)
    if not slot_rounds:
        return 0.0
    held = sum(stage.kv_tokens for stage in decodes) / slot_rounds
    full_round = cost.decode_seconds(trace.slots, round(held * trace.slots))
    return slot_rounds / trace.slots * full_round / makespan if makespan else 0.0


def _padding(cost: CostModel, trace: Trace) -> tuple[float, float]:
    """Return the share of the keys and values read that was padding, and the model seconds of reading it."""
    decodes = [stage for stage in trace.stages if stage.kind == "decode"]
    read = sum(stage.padded_kv_tokens for stage in decodes)
    padding = read - sum(stage.kv_tokens for stage in decodes)
    return padding / read if read else 0.0, cost.decode_per_kv_token * padding


def _percentiles(seconds: FloatArray) -> Percentiles | None:
    known = seconds[np.isfinite(seconds)]
    if not known.size:
        return None
    p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
    return Percentiles(p50, p90, p99)
