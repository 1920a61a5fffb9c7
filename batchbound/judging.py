"""Reports of runs, and verification of plans without their solver."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from .data.bound import PROVEN_WITHIN, Bound
from .data.claims.assumptions import COLD_CACHE, RELIES_ON, Basis, assumed_of, stated_limits
from .data.costs.cost import CalibratedCost
from .data.files.errors import InputError, check_type
from .data.files.record import record
from .data.fleet import Fleet
from .data.iteration_plan import IterationPlan, PlannedShare, least_known, load_plan
from .data.iterations import Predicted, Sequences
from .data.plan import FollowedPolicy, Plan
from .data.report import Report
from .data.schedule import Violation
from .data.trace import PLANNED, Trace
from .executor.reports.report import plan_report, run_bound_of, served_part
from .executor.reports.report import simulated as traces_of
from .executor.reports.steady_state import reached
from .heuristics.prefixes.engine import TreeEngine
from .heuristics.prefixes.vllm_cache import BlockTree
from .heuristics.registry import POLICIES
from .heuristics.serving.release import predict, simulable, simulated
from .heuristics.simulate import simulate
from .heuristics.simulator import KEEPS_KV
from .models.bounds.fleet import fleet_bound
from .models.bounds.prove import DEFAULT_SECONDS, proven_bound
from .models.certificates.completions import verify_completions
from .models.certificates.fleet import verify_fleet_bound
from .models.certificates.iterations import verify_iteration_seconds, verify_iterations
from .models.iterations.iteration_minorant import Minorant, dearest_excess
from .models.iterations.layer_cost import LayerCost
from .planning.aimed import on_prefix_cache
from .planning.iterations import iteration_prices

HOLDS_WHEN_FLEETS_EVICT = ("fleet shares", "one request")
"""Kinds of fleets' certificates that hold if requests are evicted."""


def verify(plan: Plan | IterationPlan | str | os.PathLike[str]) -> Violation | None:
    """Return a violation of a plan or of a plan's file, or None if it is valid.

    The bound is derived again from its certificate, by code independent of the solvers. For a plan for
    servers, the prediction of its order is simulated again.
    """
    if isinstance(plan, str | os.PathLike):
        plan = load_plan(plan)
    check_type("plan", plan, Plan, IterationPlan, hint="a Plan, or the path of one")
    if isinstance(plan, IterationPlan):
        wrong = plan.check() or _unnamed(plan) or _false_bound(plan) or _false_aim(plan)
        return wrong or _false_seconds(plan) or _false_prediction(plan)
    broken = plan.shares.check(plan.fleet, plan.groups)
    if broken is not None:
        return broken
    wrong = None if plan.bound is None else verify_fleet_bound(plan.fleet, plan.bound)
    return wrong or (None if plan.followed is None else _false_followed(plan, plan.followed))


def _false_followed(plan: Plan, followed: FollowedPolicy) -> Violation | None:
    if followed.policy not in POLICIES:
        return Violation("followed", f"no policy is called {followed.policy!r}")
    fleet, seconds, counts = plan.fleet, 0.0, (0, 0, 0)
    for k, replica in enumerate(fleet.replicas):
        mine, seconds = plan.shares.members(k), max(seconds, replica.busy)
        if mine.size:
            trace = simulate(fleet.problem_of(k, mine), followed.policy, swap=KEEPS_KV)
            seconds = max(seconds, replica.busy + trace.makespan)
            stages, steps, evictions = counts
            counts = stages + trace.prefill_stages, steps + trace.decode_steps, evictions + trace.evictions
    stated = followed.prefill_stages, followed.decode_steps, followed.evictions
    if counts != stated or not math.isclose(seconds, followed.seconds, rel_tol=PROVEN_WITHIN):
        what = f"{seconds!r} s, stages, steps and evictions {counts}"
        return Violation("followed", f"simulated again, {followed.policy} takes {what}")
    certificate = followed.bound.certificate
    inner = certificate.get("of", certificate)
    kind = inner.get("kind") if isinstance(inner, Mapping) else None
    if certificate.get("evictions") is not True and kind not in HOLDS_WHEN_FLEETS_EVICT:
        return Violation("followed", "its bound holds only for schedules without evictions")
    return verify_fleet_bound(plan.fleet, followed.bound)


def report(plan: Plan, traces: Sequence[Trace] | None = None, *, seconds: float | None = None) -> DrawnReport:
    """Report a run, with its gap for the actual lengths.

    Parameters
    ----------
    plan
        Plan of the run.
    traces
        Trace of each replica; without them the report is of the plan alone, simulated.
    seconds
        Wall-clock seconds of the work behind the report.

    Raises
    ------
    InputError
        If the traces are of another plan, or not one for each replica.
    """
    check_type("plan", plan, Plan, hint="a Plan, or the path of one")
    if traces is None:
        traces = traces_of(plan)
    for trace in [traces] if isinstance(traces, str | os.PathLike) else traces:
        check_type("traces", trace, Trace, hint="a list of Trace, or both arguments as paths")
    calibrated = calibration_of(plan)
    if len(traces) != len(plan.fleet.replicas):
        what = f"{len(traces)} traces for {len(plan.fleet.replicas)} replicas"
        raise InputError(what, hint="Give the trace of each replica.")
    try:
        served = served_part(plan.fleet, traces)
        _refuse_others(plan, traces)
        run_bound = (
            None if served is None or may_share(plan, traces) else run_bound_of(served, traces, _proven)
        )
        fit = None if calibrated is None else calibrated.error
        found = plan_report(plan, traces, fit=fit, run_bound=run_bound)
    except ValueError as error:
        raise InputError(str(error), hint="Give the plan that was run.") from None
    configuration = plan.configuration
    came_of_it = (
        None if configuration is None or found.clock == "model" else reached(configuration, traces[0])
    )
    return DrawnReport.of(replace(found, reached=came_of_it, seconds=seconds), plan, traces)


class DrawnReport(Report):
    """Report with its plan and traces, for pictures."""

    drawn: tuple[Plan, tuple[Trace, ...]]

    @classmethod
    def of(cls, found: Report, plan: Plan, traces: Sequence[Trace]) -> DrawnReport:
        """Return a report with its plan and traces."""
        made = cls(**{each.name: getattr(found, each.name) for each in fields(found)})
        object.__setattr__(made, "drawn", (plan, tuple(traces)))
        return made

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as a web page; also write it to ``path``."""
        from .executor.reports.gantt import Panel
        from .executor.reports.page import page, save_page

        plan, traces = self.drawn
        reports = self.replicas or (self,)
        panels = [
            Panel.of(f"Replica {k}" if len(traces) > 1 else "Run", replica.cost, trace, one)
            for k, (replica, trace, one) in enumerate(zip(plan.fleet.replicas, traces, reports, strict=True))
            if one is not None
        ]
        if path is not None:
            save_page(path, self, panels)
        return page(self, panels)


def _refuse_others(plan: Plan, traces: Sequence[Trace]) -> None:
    """Raise ValueError if a trace is of another plan.

    Traces before 0.2 name none.
    """
    named = [trace.engine[PLANNED] for trace in traces if PLANNED in trace.engine]
    if named and named != [plan.schedule_digest()] * len(named):
        raise ValueError("it is of another plan of these requests")


def may_share(plan: Plan, traces: Sequence[Trace]) -> bool:
    """Return whether replicas may have shared beginnings that no trace of one tells."""
    source = plan.provenance.prompts
    if len(traces) < 2 or source is None or all(trace.distinct_tokens is None for trace in traces):
        return False
    return source.distinct_tokens is None or source.distinct_tokens < plan.workload.computed_tokens


def _proven(fleet: Fleet) -> Bound:
    alone = len(fleet.replicas) == 1 and not fleet.replicas[0].busy
    return proven_bound(fleet.problem()) if alone else fleet_bound(fleet, DEFAULT_SECONDS)


def calibration_of(plan: Plan) -> CalibratedCost | None:
    """Return the calibration of a plan's cost model, if batchbound measured it."""
    if "cost" not in plan.provenance.cost_source:
        return None
    recorded = {name: value for name, value in plan.provenance.cost_source.items() if name != "name"}
    try:
        return record(CalibratedCost, recorded)
    except InputError as error:
        what = str(error).removesuffix(f". {error.hint}")
        raise InputError(what, where="field 'provenance.cost_source'", hint="Plan again.") from None


def _unnamed(plan: IterationPlan) -> Violation | None:
    """Return the first assumption that the plan hides, or calls better founded than it is."""
    named = {assumption.name: assumption.basis for assumption in plan.assumptions}
    of_prompts = () if plan.tree is None else assumed_of(plan.tree)
    needed: dict[str, Basis] = {one.name: one.basis for one in stated_limits(plan.proven, *of_prompts)}
    if not plan.counted:
        needed[COLD_CACHE] = "checked"  # the bound counts one token of each prompt
    elif plan.tree is None:
        needed[COLD_CACHE] = "stated"  # the engine keeps no prompts
    relied = {name for kind in plan.kinds for name in RELIES_ON.get(kind, ()) if name in needed}
    if condition := plan.provenance.condition:
        needed[condition] = "assumed"
        relied.add(condition)
    for name in sorted(relied):
        if name not in named:
            return Violation("assumptions", f"the bound relies on {name!r}, which the plan does not name")
        if _FOUNDED.index(named[name]) > _FOUNDED.index(needed[name]):
            what = f"{name!r} is called {named[name]}, and for an engine not seen yet it is {needed[name]}"
            return Violation("assumptions", what)
    return None


_FOUNDED = ("broken", "assumed", "stated", "checked")
"""Bases of an assumption, from the weakest to the strongest."""


def _false_bound(plan: IterationPlan) -> Violation | None:
    sequences = plan.sequences()
    wrong = verify_iterations(sequences, plan.proven, plan.bound)
    each = {share.limits for share in plan.shares}
    if plan.bound.certificate.get("kind") == "packing" and any(map(sequences.may_run_short, each)):
        return Violation("iterations", "a packing does not hold for an engine that may evict requests")
    if wrong is None and plan.maker.status.lower() == "optimal" and not plan.proven_optimal:
        return Violation("status", "the plan is marked optimal, but takes more than its bound")
    return wrong


def _false_aim(plan: IterationPlan) -> Violation | None:
    return None if plan.aim is None else verify_completions(plan.sequences(), plan.proven, plan.aim)


def _false_seconds(plan: IterationPlan) -> Violation | None:
    least, count = plan.least_seconds, len(plan.shares)
    if least is None:
        return None
    if count > 1 and least.iterations.certificate.get("kind") == "packing":
        return Violation("seconds", "a packing bounds the iterations of one engine, not the sum of several")
    sequences = plan.sequences() if plan.counted else least_known(plan.workload.output_tokens, least.limits)
    wrong = verify_iteration_seconds(
        sequences,
        least.limits,
        least.iterations,
        least.rates,
        least.seconds * count,
        resumed_known=plan.profile is not None,
    )
    if wrong is not None:
        return wrong
    if plan.rates is not None:
        for name, rate in least.rates.items():
            if rate > getattr(plan.rates, name):
                return Violation("rates", f"{name} are charged {rate!r} s, more than they cost")
        return None
    assert plan.profile is not None
    longest = int((sequences.prompt + sequences.output).max())
    minorant = Minorant(**dict(least.rates), points=0)
    dear = dearest_excess(LayerCost(plan.profile), minorant, least.limits, longest)
    if dear is None:
        return None
    excess, work = dear
    return Violation("rates", f"an iteration of {work} is charged {excess:.3g} s more than it costs")


def _false_prediction(plan: IterationPlan) -> Violation | None:
    work = plan.workload
    for share in plan.shares:
        if share.predicted is None or not len(share.requests):
            continue
        rows = Sequences(work.input_tokens[share.requests], work.output_tokens[share.requests])
        prices = iteration_prices(plan.rates, plan.profile)
        goal = None if plan.aim is None else plan.aim.goal.select(share.requests)
        if simulable(rows, share.limits):
            # This simulates single iterations; the search counts them in leaps.
            found = simulated(rows, share.limits, share.held_back, lag=1, device=prices, goal=goal)
        else:
            inputs = rows, share.limits, np.arange(len(rows)), share.held_back
            known = predict(*inputs, lag=1, prices=prices, goal=goal)
            found = known or Predicted(0)
        cached = _on_prefix_cache(plan, share)
        found = found if cached is None or _agree(found, share.predicted) else cached
        if not _agree(found, share.predicted):
            return Violation("prediction", f"simulated again, the order takes {found}, not {share.predicted}")
    return None


def _on_prefix_cache(plan: IterationPlan, share: PlannedShare) -> Predicted | None:
    """Simulate a share on a prefix cache again; None without shared beginnings."""
    if plan.tree is None or plan.profile is not None:
        return None
    tree = plan.tree.select(share.requests)
    output = plan.workload.output_tokens[share.requests]
    if not len(tree.parent):
        return None
    blocks = BlockTree.of(tree, share.limits.block_tokens)
    if plan.aim is not None:
        goal = plan.aim.goal.select(share.requests)
        return on_prefix_cache(blocks, output, share.limits, np.arange(len(tree)), goal)
    run = TreeEngine(blocks, output, share.limits, range(len(tree))).run()
    seconds = None if plan.rates is None else run.seconds(plan.rates)
    return Predicted(run.iterations, run.preemptions, run.prompt_tokens + run.decodes, seconds)


def _agree(one: Predicted, other: Predicted) -> bool:
    if replace(one, seconds=None) != replace(other, seconds=None):
        return False
    if one.seconds is None or other.seconds is None:
        return one.seconds == other.seconds
    return math.isclose(one.seconds, other.seconds, rel_tol=PROVEN_WITHIN)
