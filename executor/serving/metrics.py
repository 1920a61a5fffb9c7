"""What a served trace comes to: the figures EconoServe's paper compares systems by."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from .simulation import EXECUTING, PAUSED, QUEUED, WAITING, ServingRun


@dataclass(frozen=True, slots=True)
class ServingMetrics:
    """
    Figures of one run. Means are over requests, unless something else is said; seconds throughout.

    completion: Job completion time: from arrival to the last token, the scheduling time excluded.
    waiting, execution, queueing, preemption: Its parts: before the prompt starts; prompt and completion under
        way; between prompt and completion; stopped.
    scheduling: CPU time of the policy's decisions between a request's arrival and its end, measured.
    between_tokens: From the first token to the last, per other token; None where no completion has two.
    between_tokens_p95: Its 95th percentile over the requests.
    normalized_latency: Completion time per token of completion.
    slo_satisfaction: Share of the requests with a deadline that end by it; None where none was due.
    requests_per_s, tokens_per_s: Served, over the time to the last end.
    kv_held, kv_promised: Share of the memory in use and given away, over the device's busy time.
    kv_full: Share of the device's busy time in which at least 95 % of the memory is given away.
    forward_size: Tokens of an iteration, over iterations.
    completed_per_iteration: Completions that ended.
    failed: Share of the requests that were stopped at least once.
    decision: CPU seconds of one decision, over iterations, measured.
    makespan: Time of the last end.
    """

    completion: float
    waiting: float
    execution: float
    queueing: float
    preemption: float
    scheduling: float
    between_tokens: float | None
    between_tokens_p95: float | None
    normalized_latency: float
    slo_satisfaction: float | None
    requests_per_s: float
    tokens_per_s: float
    kv_held: float
    kv_promised: float
    kv_full: float
    forward_size: float
    completed_per_iteration: float
    failed: float
    decision: float
    makespan: float

    def to_json(self) -> dict[str, float | None]:
        """Return the figures by name."""
        return asdict(self)


def serving_metrics(run: ServingRun) -> ServingMetrics:
    """
    Return the figures of a run.

    Where a run was stopped, a request that is still there counts in ``completion`` and its parts with the
    seconds it has spent; latency by token is of those served, SLO satisfaction of those whose deadline came.
    """
    stopped = bool(np.isnan(run.finished).any())
    horizon = run.until if stopped else float(run.finished.max())
    arrival = run.workload.arrival
    ended = np.fmin(run.finished, horizon)
    served = run.finished <= horizon
    latency = (ended - arrival)[served] / run.tokens[served]
    more = served & (run.tokens > 1)
    gaps = (run.finished - run.first_token)[more] / (run.tokens[more] - 1)
    busy = float(run.seconds.sum())
    # Decisions made before a request came are not part of its time, nor are those after it ended.
    decided = np.concatenate(([0.0], np.cumsum(run.decided)))
    begin, end = (np.searchsorted(run.start, times, side="left") for times in (arrival, ended))
    deadline = run.workload.deadline
    due = deadline <= horizon if stopped else np.isfinite(deadline)
    in_time = (run.finished <= deadline)[due]
    return ServingMetrics(
        completion=float((ended - arrival).mean()),
        waiting=float(run.spent[:, WAITING].mean()),
        execution=float(run.spent[:, EXECUTING].mean()),
        queueing=float(run.spent[:, QUEUED].mean()),
        preemption=float(run.spent[:, PAUSED].mean()),
        scheduling=float((decided[end] - decided[begin]).mean()),
        between_tokens=float(gaps.mean()) if gaps.size else None,
        between_tokens_p95=float(np.quantile(gaps, 0.95)) if gaps.size else None,
        normalized_latency=float(latency.mean()) if latency.size else 0.0,
        slo_satisfaction=float(in_time.mean()) if in_time.size else None,
        requests_per_s=int(served.sum()) / horizon,
        tokens_per_s=float(run.tokens.sum()) / horizon,
        kv_held=float((run.held * run.seconds).sum()) / busy / run.capacity,
        kv_promised=float((run.promised * run.seconds).sum()) / busy / run.capacity,
        kv_full=float(run.seconds[run.promised >= 0.95 * run.capacity].sum()) / busy,
        forward_size=float((run.decodes + run.prompt_tokens).mean()),
        completed_per_iteration=float(run.completed.mean()),
        failed=float((run.preempted[~np.isnan(run.first_token)] > 0).mean()),
        decision=float(run.decided.mean()),
        makespan=horizon,
    )
