"""Replay an instance on a server with forced lengths."""

from __future__ import annotations

from dataclasses import replace as replaced

import numpy as np

from ..data.files.disk import InputError
from ..data.files.outputs import refuse_outputs
from ..data.iteration_plan import IterationPlan, PlannedShare
from ..data.iterations import EngineLimits
from ..data.objective import Goal, Objective
from ..data.readers.replayed import Replayed
from ..data.readers.server_metrics import ServerMetrics
from ..executor.server.forced import ForcedRun
from ..executor.server.probe import ServerFacts
from ..heuristics.prefixes.vllm_cache import BlockTree
from ..heuristics.serving.in_flight import in_flight_of
from ..heuristics.serving.release import predict
from ..listening import note, working
from ..options.option import takes
from ..options.plan import USUAL_BLOCK, USUAL_BUDGET
from ..options.replay import SEARCH, ReplayOptions
from ..planning.aimed import on_prefix_cache, published_orders
from ..planning.iterations import Engines, make_iteration_plan
from ..planning.mixed_job import MixedJob, read_mixed_job
from ..planning.release import Releasable
from ..solvers.result import Limits, Status, StoppedBy
from ..solvers.solve import DEFAULT_SECONDS
from .on_servers import check_urls


@takes(ReplayOptions)
def replay(options: ReplayOptions) -> Replayed:
    """Send an instance's requests to a server, each with its planned length, and save what it counts.

    It takes the options of ``batchbound replay`` as keywords.
    """
    refuse_outputs([options.output], options.overwrite, options.read_files())
    check_urls([options.server])
    # A mistake in the instance is told before the server is asked.
    _ = IterationPlan.load(options.instance) if options.is_plan else _job(options, None)
    run = ForcedRun(options.server, options.model)
    with working(f"asking {options.server}"):
        facts = run.facts()
    plan = _instance(options, facts)
    if (wrong := plan.check()) is not None:
        raise InputError(f"the plan contradicts itself: {wrong}", file=options.instance, hint="Plan again.")
    with working(f"replaying {len(plan.workload):,} completions"):
        replayed = run.run(plan, facts)
    replayed.save(options.output)
    return replayed


def _instance(options: ReplayOptions, facts: ServerFacts) -> IterationPlan:
    """Return the plan to replay, with the limits of the server and in the order of the policy."""
    metrics = facts.metrics or ServerMetrics()
    if options.is_plan:
        plan = IterationPlan.load(options.instance)
        if len(plan.shares) > 1 or plan.rates is not None or plan.profile is not None:
            hint = "Plan for one engine, without --cost."
            raise InputError("is of several engines, or has costs", file=options.instance, hint=hint)
        job = MixedJob(plan.workload, counted=True, tree=plan.tree, assumptions=plan.assumptions)
        limits = _limits(options, metrics, plan.shares[0].limits)
        if options.policy is None and limits == plan.shares[0].limits:
            return plan
        aim = None if plan.aim is None else plan.aim.goal.objective
    else:
        job = _job(options, None if metrics.prefix_caching is False else metrics.reuse_unit or 1)
        limits, aim = _limits(options, metrics, None), options.aim
    search = options.policy == SEARCH
    try:
        plan = make_iteration_plan(
            job,
            Engines((limits,), budget_stated=options.token_budget is not None or options.is_plan),
            limits=Limits(seconds=DEFAULT_SECONDS) if search else Limits(work=1),
            objective=aim,
        )
    except ValueError as error:
        hint = "Choose other limits, or another objective."
        raise InputError(str(error), file=options.instance, hint=hint) from None
    return plan if search else in_order(plan, options.policy or "first-come")


def _job(options: ReplayOptions, unit: int | None) -> MixedJob:
    """Return the completions of a table or a generator; the engine reuses beginnings by ``unit`` tokens."""
    if options.slots is None:
        raise InputError("the slots of the server are unknown", hint="Give --slots, its max_num_seqs.")
    job = read_mixed_job(options.instance, unit=unit).job
    if not job.exact:
        hint = "Give a table of lengths, or a plan of `plan --for`."
        raise InputError("the lengths of its completions are unknown", file=options.instance, hint=hint)
    return job


def _limits(options: ReplayOptions, metrics: ServerMetrics, planned: EngineLimits | None) -> EngineLimits:
    known = planned or EngineLimits(
        options.slots or 1, max(USUAL_BUDGET, options.slots or 1), None, USUAL_BLOCK
    )
    tokens = options.kv_capacity or metrics.kv_tokens or known.kv_tokens
    limits = replaced(
        known,
        sequences=options.slots or known.sequences,
        batched_tokens=options.token_budget or known.batched_tokens,
        kv_tokens=tokens,
        block_tokens=metrics.block_tokens or known.block_tokens,
    )
    if planned is not None and limits != planned:
        note(f"the server has other limits than the plan: {limits} in place of {planned}")
    return limits


def in_order(plan: IterationPlan, policy: str) -> IterationPlan:
    """Return a plan of one engine in a published order, simulated."""
    share, work = plan.shares[0], plan.workload
    goal = None if plan.aim is None else plan.aim.goal
    rows = plan.sequences()
    requests = np.arange(len(work))
    releasable = Releasable.of_rows(rows, requests, exact=True)
    order = published_orders(releasable, share.limits)[policy]
    if rows.tree is not None and len(rows.tree.parent):
        blocks = BlockTree.of(rows.tree, share.limits.block_tokens)
        aim = goal or Goal(Objective("first", len(work)))
        predicted = on_prefix_cache(blocks, work.output_tokens, share.limits, order, aim)
        if predicted is not None and goal is None:
            predicted = replaced(predicted, value=None)
    else:
        predicted = predict(rows, share.limits, order, lag=1, goal=goal)
    made = PlannedShare(share.limits, order, policy, in_flight_of(share.limits.sequences), predicted)
    maker = replaced(plan.maker, solver=policy, status=Status.FEASIBLE, stopped_by=StoppedBy.FINISHED)
    ordered = replaced(plan, shares=(made,), maker=maker)
    if ordered.proven_optimal:
        ordered = replaced(ordered, maker=replaced(maker, status=Status.OPTIMAL, stopped_by=StoppedBy.PROOF))
    return ordered
