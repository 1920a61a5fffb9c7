"""Metrics of a served trace, as EconoServe defines them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from .simulation import EXECUTING, PAUSED, QUEUED, WAITING, ServingRun


@dataclass(frozen=True, slots=True)
class ServingMetrics:
    """Metrics of one run, as means over requests in seconds.

    completion: Job completion time: from arrival to the last token, without scheduling time.
    waiting, execution, queueing, preemption: Its parts: before the prompt; prompt and completion running;
    between prompt and completion; stopped.
    scheduling: CPU time of the policy's decisions between a request's arrival and end, measured.
    between_tokens: Time per token after the first; None if no completion has two tokens.
    between_tokens_p95: Its 95th percentile over the requests.
    normalized_latency: Completion time per token of completion.
    slo_satisfaction: Share of requests with a deadline that meet it; None if none was due.
    requests_per_s, tokens_per_s: Throughput up to the last end.
    kv_held, kv_promised: Mean share of KV capacity in use and promised, over busy time.
    kv_full: Share of busy time in which at least 95 % of KV capacity is promised.
    forward_size: Mean tokens of an iteration.
    completed_per_iteration: Completions that ended.
    failed: Share of requests that were preempted at least once.
    decision: CPU seconds of one decision, measured, over iterations.
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
        """Return the metrics by name."""
        return asdict(self)


def serving_metrics(run: ServingRun) -> ServingMetrics:
    """Return the metrics of a run.

    In a stopped run, unfinished requests count in ``completion`` and its parts with the seconds spent.
    Latency per token covers finished requests, SLO satisfaction those past their deadline.
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
    # Decisions before a request's arrival or after its end are not part of its time.
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
