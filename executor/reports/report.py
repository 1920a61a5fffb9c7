"""Report of a run: makespan, gaps, and use of time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from ...data.arrays import FloatArray, IntArray
from ...data.bound import Bound
from ...data.costs.cost import CostModel, FitError
from ...data.files.disk import InputError
from ...data.fleet import Fleet
from ...data.plan import Plan
from ...data.problem import Problem
from ...data.report import (
    BETWEEN,
    BUBBLES,
    BUSY,
    NO_ARRIVAL,
    TAIL,
    TOOLS,
    LengthError,
    Percentiles,
    Report,
)
from ...data.trace import Trace
from ...data.workload import Turns, Workload
from ...heuristics.loop import execute
from ...heuristics.registry import POLICIES
from ...heuristics.replay_and_repair import Replay
from ...heuristics.simulate import simulate
from ...heuristics.simulator import KEEPS_KV, Simulator
from ...models.bounds.conversations import counted_bound
from ...models.bounds.fleet import work_bound
from ...models.bounds.makespan import best_bound
from ...models.bounds.prove import evicting_bound
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
    turns: Turns | None = None,
) -> Report:
    """Report a run on one machine.

    problem: Planned problem, with its cost model and the planned lengths.
    trace: Trace of the run. Requests that are not in it count as completed by an earlier run.
    bound: Proven bound of the problem, or None. A bound that is not valid in general is left out.
    planned_makespan: Planned makespan in model seconds, or None.
    fit: Error of the problem's cost model if it was fitted.
    run_bound: Proven bound of the served requests at their actual lengths. If these are the planned ones, the
        larger bound counts. A run with evictions needs :func:`~batchbound.models.bounds.fleet.work_bound`.
    seconds: Seconds of the program for planning or running, copied to the report.
    turns: Order of the requests within conversations; None without conversations.

    Raises ValueError if the trace serves a request that is not in the problem.
    """
    part = _Part.of(
        problem.workload, _rows(problem.workload.ids, [trace])[0], trace, problem.cost, turns=turns
    )
    found = _report([part], len(problem), bound, _holding(Fleet.of(problem, 1), [trace], run_bound))
    if turns is not None:
        seconds_of = dict(found.slot_seconds)
        # First turns arrive at the start, so all later arrivals wait for tools.
        seconds_of[TOOLS], seconds_of[NO_ARRIVAL] = seconds_of[NO_ARRIVAL], 0.0
        found = replace(found, slot_seconds=seconds_of)
    return replace(found, planned_makespan=planned_makespan, fit=fit, seconds=seconds)


def plan_report(
    plan: Plan, traces: Sequence[Trace], *, fit: FitError | None = None, run_bound: Bound | None = None
) -> Report:
    """Report a run of a plan."""
    found = fleet_report(
        plan.fleet, traces, plan.claim, run_bound=run_bound, served_by=plan.shares.replica_of
    )
    # Where completions end before their caps, a plan made of caps predicted nothing.
    planned = None if plan.lengths_unknown and found.lengths.wrong else plan.seconds
    held, served = plan.bound_of or "every schedule", [name for trace in traces for name in trace.ids]
    if plan.provenance.condition:
        held += f", if {plan.provenance.condition}"
    found = replace(
        found,
        planned_makespan=planned,
        fit=fit,
        expected=plan.expected,
        bound_of=held,
        repeats=plan.repeats_in(served, [trace.distinct_tokens for trace in traces]),
    )
    ends = None if plan.followed is not None else plan.shares.finishes(plan.fleet)
    return found if ends is None or not found.replicas else replace(found, planned_ends=ends)


def fleet_report(
    fleet: Fleet,
    traces: Sequence[Trace],
    bound: Bound | None,
    *,
    run_bound: Bound | None = None,
    served_by: IntArray | None = None,
) -> Report:
    """Report a fleet's run without a plan.

    ``served_by``: planned replica of each request, shape (requests,); None counts none as moved.
    """
    if len(traces) != len(fleet.replicas):
        raise ValueError(f"{len(traces)} traces for {len(fleet.replicas)} replicas")
    for trace, replica in zip(traces, fleet.replicas, strict=True):
        if trace.slots != replica.slots:
            # With more slots the run may end below the plan's bound.
            raise ValueError(f"a trace is of {trace.slots} slots, the plan's replica has {replica.slots}")
    rows = _rows(fleet.workload.ids, traces)
    parts = [
        _Part.of(fleet.workload, mine, trace, replica.cost, replica.busy)
        for replica, mine, trace in zip(fleet.replicas, rows, traces, strict=True)
    ]
    found = _report(parts, len(fleet), bound, _holding(fleet, traces, run_bound))
    if len(traces) == 1:
        return found
    # An evicted request may have continued elsewhere, so no bound of one replica's requests holds.
    parts = [replace(part, shared=found.evictions > 0) for part in parts]
    moved = 0
    if served_by is not None:
        moved = sum(int(np.count_nonzero(served_by[mine] != k)) for k, mine in enumerate(rows))
    return replace(
        found,
        moved=moved,
        lost={k: str(trace.engine["lost"]) for k, trace in enumerate(traces) if "lost" in trace.engine},
        replicas=tuple(
            _of_replica(fleet, k, mine, part) if mine.size else None
            for k, (mine, part) in enumerate(zip(rows, parts, strict=True))
        ),
    )


def run_bound_of(
    served: Fleet,
    traces: Sequence[Trace],
    prove: Callable[[Fleet], Bound | None],
    *,
    evictions: bool = False,
) -> Bound | None:
    """Return a bound that counts no prompt token which the engine need not compute.

    It is None if the engines share beginnings, and the traces do not tell how many tokens are distinct: other
    replicas or an earlier engine may have computed some.

    prove: Bound of requests that share what the workload says.
    evictions: Bound schedules that evict requests as well, as if a trace did.
    """
    computed = [trace.distinct_tokens for trace in traces]
    whole = [_prompt_tokens(served, trace) for trace in traces]
    if all(tokens is None or tokens >= most for tokens, most in zip(computed, whole, strict=True)):
        return prove(served)
    if len(traces) > 1 or computed[0] is None or not np.isfinite(traces[0].finished).all():
        return None
    if computed[0] < len(served.workload):
        # An earlier engine, or one that serves several runs, had computed some prompts whole.
        return None
    return counted_bound(served.problem(), computed[0], evictions=evictions or traces[0].evictions > 0)


def _prompt_tokens(served: Fleet, trace: Trace) -> int:
    """Return the distinct prompt tokens of the served requests in a trace; none for an idle replica."""
    mine = {name for name, end in zip(trace.ids, trace.finished.tolist(), strict=True) if np.isfinite(end)}
    rows = [row for row, name in enumerate(served.workload.ids.tolist()) if name in mine]
    return served.workload.select(rows).computed_tokens if rows else 0


def _holding(fleet: Fleet, traces: Sequence[Trace], run_bound: Bound | None) -> Bound | None:
    """Return the bound of a run, which may have evictions."""
    if not any(trace.evictions for trace in traces):
        return run_bound
    served = served_part(fleet, traces)
    return None if served is None else run_bound_of(served, traces, _evicting)


def _evicting(served: Fleet) -> Bound:
    bounds = [work_bound(served)]
    if len(served.replicas) == 1 and not served.replicas[0].busy:
        bounds.append(evicting_bound(served.problem()))
    return max(bounds, key=lambda bound: bound.seconds)


def served_part(fleet: Fleet, traces: Sequence[Trace]) -> Fleet | None:
    """Return the served requests at their actual lengths.

    Capacities are dropped, as actual lengths may exceed them; a bound without them is still valid.
    """
    rows = _rows(fleet.workload.ids, traces)
    served = np.concatenate(rows)
    if not served.size:
        return None
    order = np.argsort(served, kind="stable")
    tokens = np.concatenate([trace.tokens for trace in traces])[order]
    workload = fleet.workload.select(served[order]).with_output_tokens(tokens)
    free = [
        replace(one, kv_capacity=None, prefill_token_cap=None, max_position=None) for one in fleet.replicas
    ]
    return replace(fleet, workload=workload, replicas=tuple(free))


def simulated(plan: Plan) -> tuple[Trace, ...]:
    """Return each replica's planned trace by its cost model: of the schedule, or of the followed policy.

    Raises InputError if there is no such policy.
    """
    if plan.followed is not None:
        if plan.followed.policy not in POLICIES:
            what, where = f"no policy is called {plan.followed.policy!r}", "field 'followed.policy'"
            raise InputError(what, where=where, hint="Plan again.")
        return (simulate(plan.problem, plan.followed.policy, swap=KEEPS_KV),)
    traces = []
    for k, schedule in enumerate(plan.shares.schedules):
        if schedule is None:
            traces.append(Trace.empty(plan.fleet.replicas[k].slots))
            continue
        problem = plan.fleet.problem_of(k, plan.shares.members(k))
        traces.append(execute(problem, Replay(schedule, problem), Simulator(problem)))
    return tuple(traces)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Part of a job on one replica.

    prompt_tokens: Tokens of the prompts, without those that a group shares more than once; those that stages
        computed if the engine shares beginnings.
    whole: False if the engine shares beginnings of which the problem knows nothing.
    shared: True if other replicas may have done some of its work.
    """

    trace: Trace
    cost: CostModel
    busy: float
    served: npt.NDArray[np.bool_]
    planned: IntArray
    prompt_tokens: int
    whole: bool
    model_seconds: float
    schedule_seconds: float
    shared: bool = False

    @classmethod
    def of(
        cls,
        workload: Workload,
        rows: IntArray,
        trace: Trace,
        cost: CostModel,
        busy: float = 0.0,
        *,
        turns: Turns | None = None,
    ) -> _Part:
        served = np.isfinite(trace.finished)
        measured = _clock([trace]) == "measured"
        prompts = workload.select(rows[served]) if served.any() else None
        tokens = 0 if prompts is None else prompts.computed_tokens
        distinct = trace.distinct_tokens if served.all() else None
        return cls(
            trace,
            cost,
            busy,
            served,
            planned=workload.output_tokens[rows][served],
            prompt_tokens=tokens if trace.distinct_tokens is None else trace.prompt_tokens,
            whole=prompts is None
            or prompts.tree is not None
            or distinct is None
            or distinct >= prompts.input_tokens.sum(),
            model_seconds=model_seconds(cost, trace, overheads=measured, turns=turns),
            schedule_seconds=model_seconds(cost, trace, overheads=False, turns=turns),
        )

    def waited(self, times: FloatArray) -> FloatArray:
        seconds: FloatArray = (times - self.trace.queued)[self.served]
        return seconds


def _report(parts: Sequence[_Part], requests: int, bound: Bound | None, run_bound: Bound | None) -> Report:
    traces = [part.trace for part in parts]
    planned = np.concatenate([part.planned for part in parts])
    actual = np.concatenate([part.trace.tokens[part.served] for part in parts])
    off = planned - actual
    clock, wrong = _clock(traces), int(np.count_nonzero(off))
    # Model seconds include a replica's earlier work; a measured run begins after it.
    busy = [part.busy if clock == "model" else 0.0 for part in parts]
    ends = [part.trace.makespan + before for part, before in zip(parts, busy, strict=True)]
    model_makespan = max(part.busy + part.model_seconds for part in parts)
    # A bound of a plan without a tree counts whole prompts.
    proven = bound.proven if bound is not None and all(part.whole for part in parts) else None
    as_planned = len(actual) == requests and not wrong
    evictions = sum(trace.evictions for trace in traces)
    bounds_of_run = [None if run_bound is None else run_bound.proven]
    if as_planned and (not evictions or (bound is not None and bound.certificate.get("evictions") is True)):
        bounds_of_run.append(proven)
    padding, padding_seconds = _padding(parts)
    pace, missed, between = _paces(parts) if clock == "measured" else (None, None, None)
    return Report(
        clock=clock,
        makespan=max(ends),
        model_makespan=model_makespan,
        schedule_makespan=max(part.busy + part.schedule_seconds for part in parts),
        planned_makespan=None,
        bound=proven,
        bound_source=None if proven is None or bound is None else bound.source,
        run_bound=max((each for each in bounds_of_run if each is not None), default=None),
        requests=len(actual),
        resumed=requests - len(actual),
        slots=sum(trace.slots for trace in traces),
        prefill_stages=sum(trace.prefill_stages for trace in traces),
        decode_steps=sum(trace.decode_steps for trace in traces),
        evictions=evictions,
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        output_tokens=int(actual.sum()),
        utilization=_utilization(parts, model_makespan),
        slot_seconds=_slot_seconds(traces, ends),
        finish=_percentiles(
            [before + part.waited(part.trace.finished) for before, part in zip(busy, parts, strict=True)]
        ),
        first_token=_percentiles(
            [before + part.waited(part.trace.first_token) for before, part in zip(busy, parts, strict=True)]
        ),
        per_token=_percentiles([_per_token(part) for part in parts]),
        lengths=LengthError(
            mean_absolute=float(np.abs(off).mean()) if len(off) else 0.0,
            bias=float(off.mean()) if len(off) else 0.0,
            wrong=wrong,
        ),
        padding=padding,
        padding_seconds=padding_seconds,
        change_seconds=_change_seconds(parts) if clock == "measured" else 0.0,
        pace=pace,
        missed=missed,
        between=between,
        engine=dict(traces[0].engine) if len(traces) == 1 else {},
    )


def _of_replica(fleet: Fleet, replica: int, rows: IntArray, part: _Part) -> Report:
    mine = fleet.workload.select(rows)
    alone = served_part(
        Fleet(mine, (fleet.replicas[replica],), fleet.prefill_emits_first_token), [part.trace]
    )
    run_bound = None
    if alone is not None and not part.shared:
        run_bound = run_bound_of(alone, [part.trace], lambda fleet: best_bound(fleet.problem()))
    return _report([replace(part, busy=0.0)], len(rows), None, run_bound)


def model_seconds(
    cost: CostModel, trace: Trace, *, overheads: bool = True, turns: Turns | None = None
) -> float:
    """Return the model seconds of a run.

    The model prices every stage by its tokens, active slots and KV cache. A prefill stage waits for its
    requests' arrival, a turn for the end of its pause.
    """
    edges = _model_edges(cost, trace, overheads=overheads, turns=turns)
    return float(edges[-1, 1]) if len(edges) else 0.0


def in_model_seconds(cost: CostModel, trace: Trace) -> Trace:
    """Return a run at the cost model's pace, without gaps.

    Only on this clock is a run comparable with a proven bound.
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


def pace_of(runs: Sequence[tuple[CostModel, Trace]]) -> tuple[float | None, float | None]:
    """Return the machine's slowdown, and the model's remaining error."""
    model = np.array([stage.model_seconds(cost) for cost, trace in runs for stage in trace.stages])
    measured = np.array([stage.seconds for _, trace in runs for stage in trace.stages])
    if not model.sum() or not measured.sum():
        return None, None
    counted = model > 0
    ratio = measured[counted] / model[counted]
    order = np.argsort(ratio)
    share = np.cumsum(model[counted][order])
    pace = float(ratio[order][np.searchsorted(share, share[-1] / 2)])
    return (pace, float(measured.sum() / (pace * model.sum()) - 1)) if pace else (None, None)


def _model_edges(
    cost: CostModel, trace: Trace, *, overheads: bool = True, turns: Turns | None = None
) -> FloatArray:
    """Return each stage's begin and end in model seconds."""
    ready = np.zeros(len(trace.stages))
    served = trace.stage_of >= 0
    if turns is not None:
        served = served & turns.first
    np.maximum.at(ready, trace.stage_of[served], trace.queued[served])
    follow: dict[int, list[tuple[int, float]]] = {}
    if turns is not None:
        ended = np.searchsorted([stage.end for stage in trace.stages], trace.finished)
        for turn in np.flatnonzero(~turns.first).tolist():
            before = int(ended[turns.after[turn]]), float(turns.pause[turn])
            follow.setdefault(int(trace.stage_of[turn]), []).append(before)
    edges = np.zeros((len(trace.stages), 2))
    time = 0.0
    for index, stage in enumerate(trace.stages):
        answered = (edges[last, 1] + pause for last, pause in follow.get(index, ()))
        time = max(time, float(ready[index]), *answered)
        end = time + stage.model_seconds(cost, overheads=overheads)
        edges[index] = time, end
        time = end
    return edges


def _clock(traces: Sequence[Trace]) -> Literal["model", "measured"]:
    simulated = all(trace.engine.get("name") == "simulator" for trace in traces if trace.engine)
    return "model" if simulated and any(trace.engine for trace in traces) else "measured"


def _rows(ids: npt.NDArray[np.object_], traces: Sequence[Trace]) -> list[IntArray]:
    """Return the plan's requests in each trace."""
    row_of = {name: row for row, name in enumerate(ids.tolist())}
    strangers = [name for trace in traces for name in trace.ids if name not in row_of]
    if strangers:
        raise ValueError(
            f"the trace serves {strangers[0]!r}, which is not a request of the plan; it is of another plan"
        )
    times = Counter(name for trace in traces for name in trace.ids)
    if len(traces) > 1 and len(times) < times.total():
        raise ValueError(f"two traces serve {max(times, key=times.__getitem__)!r}")
    return [np.array([row_of[name] for name in trace.ids], dtype=np.int64) for trace in traces]


def _utilization(parts: Sequence[_Part], makespan: float) -> float:
    r"""Return the utilization as the hybrid paper counts it (section V).

    There a full decode step takes t(J) = 71 ms at J = 200 slots. It holds J times the mean KV cache of an
    active slot. The makespan is in model seconds, to exclude the
    model's error. For replicas it is the mean by slots.
    """
    slots = sum(part.trace.slots for part in parts)
    seconds = sum(part.trace.slots * _full_step_seconds(part) for part in parts)
    return seconds / (slots * makespan) if makespan else 0.0


def _full_step_seconds(part: _Part) -> float:
    trace = part.trace
    decodes = [stage for stage in trace.stages if stage.kind == "decode"]
    slot_steps = sum(stage.decode_steps * stage.active for stage in decodes)
    if not slot_steps:
        return 0.0
    held = sum(stage.kv_tokens for stage in decodes) / slot_steps
    return slot_steps / trace.slots * part.cost.decode_seconds(trace.slots, round(held * trace.slots))


def _slot_seconds(traces: Sequence[Trace], ends: Sequence[float]) -> dict[str, float]:
    found = dict.fromkeys((*BUSY, *BUBBLES), 0.0)
    for trace, end in zip(traces, ends, strict=True):
        for cause, seconds in slot_seconds(trace).items():
            found[cause] += seconds
        found[BETWEEN] += trace.slots * (end - trace.makespan)
        found[TAIL] += trace.slots * (max(ends) - end)
    return found


def _paces(parts: Sequence[_Part]) -> tuple[float | None, float | None, float | None]:
    """Return pace, remaining error, and seconds between stages."""
    pace, missed = pace_of([(part.cost, part.trace) for part in parts])
    trace = parts[0].trace
    between = trace.makespan - sum(stage.seconds for stage in trace.stages) if len(parts) == 1 else None
    return pace, missed, between


def _padding(parts: Sequence[_Part]) -> tuple[float, float]:
    whole, seconds, padding = 0, 0.0, 0
    for part in parts:
        decodes = [stage for stage in part.trace.stages if stage.kind == "decode"]
        read = sum(stage.padded_kv_tokens for stage in decodes)
        padded = read - sum(stage.kv_tokens for stage in decodes)
        whole, padding = whole + read, padding + padded
        seconds += part.cost.decode_per_kv_token * padded
    return padding / whole if whole else 0.0, seconds


def _change_seconds(parts: Sequence[_Part]) -> float:
    return sum(
        part.cost.decode_per_change * sum(stage.kind == "decode" for stage in part.trace.stages)
        for part in parts
    )


def _per_token(part: _Part) -> FloatArray:
    trace = part.trace
    later = part.served & (trace.tokens > 1)
    seconds: FloatArray = (trace.finished - trace.first_token)[later] / (trace.tokens[later] - 1)
    return seconds


def _percentiles(parts: Sequence[FloatArray]) -> Percentiles | None:
    seconds = np.concatenate(parts)
    known = seconds[np.isfinite(seconds)]
    if not known.size:
        return None
    p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
    return Percentiles(p50, p90, p99)
