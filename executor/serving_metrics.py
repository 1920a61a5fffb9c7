"""What a served trace comes to: the figures EconoServe's paper compares systems by."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from .serving_simulation import EXECUTING, PAUSED, QUEUED, WAITING, ServingRun


@dataclass(frozen=True, slots=True)
class ServingMetrics:
    """
    Figures of one run. Means are over requests, unless something else is said; seconds throughout.

    Parameters
    ----------
    completion
        Job completion time: from arrival to the last token, the scheduling time excluded.
    waiting, execution, queueing, preemption
        Its parts: before the prompt starts; prompt and answer under way; between prompt and answer; stopped.
    scheduling
        CPU time of the policy's decisions between a request's arrival and its end, measured.
    between_tokens
        From the first token to the last, per other token.
    between_tokens_p95
        Its 95th percentile over the requests.
    normalized_latency
        Completion time per token of answer.
    slo_satisfaction
        Share of the requests that end by their deadline.
    requests_per_s, tokens_per_s
        Served, over the time to the last end.
    kv_held, kv_promised
        Share of the memory in use and given away, over the device's busy time.
    kv_full
        Share of the device's busy time in which at least 95 % of the memory is given away.
    forward_size
        Tokens of an iteration, over iterations.
    completed_per_iteration
        Answers that ended.
    failed
        Share of the requests that were stopped at least once.
    decision
        CPU seconds of one decision, over iterations, measured.
    makespan
        Time of the last end.
    """

    completion: float
    waiting: float
    execution: float
    queueing: float
    preemption: float
    scheduling: float
    between_tokens: float
    between_tokens_p95: float
    normalized_latency: float
    slo_satisfaction: float
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

    def to_json(self) -> dict[str, float]:
        """Return the figures by name."""
        return asdict(self)


def serving_metrics(run: ServingRun) -> ServingMetrics:
    """Return the figures of a run."""
    arrival, tokens = run.workload.arrival, run.tokens
    completion = run.finished - arrival
    makespan = float(run.finished.max())
    more = tokens > 1
    gaps = (run.finished - run.first_token)[more] / (tokens[more] - 1)
    busy = float(run.seconds.sum())
    # Decisions made before a request came are not part of its time, nor are those after it ended.
    decided = np.concatenate(([0.0], np.cumsum(run.decided)))
    begin, end = (np.searchsorted(run.start, times, side="left") for times in (arrival, run.finished))
    return ServingMetrics(
        completion=float(completion.mean()),
        waiting=float(run.spent[:, WAITING].mean()),
        execution=float(run.spent[:, EXECUTING].mean()),
        queueing=float(run.spent[:, QUEUED].mean()),
        preemption=float(run.spent[:, PAUSED].mean()),
        scheduling=float((decided[end] - decided[begin]).mean()),
        between_tokens=float(gaps.mean()) if gaps.size else 0.0,
        between_tokens_p95=float(np.quantile(gaps, 0.95)) if gaps.size else 0.0,
        normalized_latency=float((completion / tokens).mean()),
        slo_satisfaction=float((run.finished <= run.workload.deadline).mean()),
        requests_per_s=len(tokens) / makespan,
        tokens_per_s=float(tokens.sum()) / makespan,
        kv_held=float((run.held * run.seconds).sum()) / busy / run.capacity,
        kv_promised=float((run.promised * run.seconds).sum()) / busy / run.capacity,
        kv_full=float(run.seconds[run.promised >= 0.95 * run.capacity].sum()) / busy,
        forward_size=float((run.decodes + run.prompt_tokens).mean()),
        completed_per_iteration=float(run.completed.mean()),
        failed=float((run.preempted > 0).mean()),
        decision=float(run.decided.mean()),
        makespan=makespan,
    )
