"""Phases of the schedule search that run compiled."""

from __future__ import annotations

import math
from dataclasses import replace

from ....data.problem import Problem
from ....data.schedule import Schedule
from ..backward import slots_are_scarcer
from ..incumbent import Budget, SearchRun
from ..stage_split import stages_capped
from .compiled import Allowance, Parameters, compiled_core
from .parameters import CoreParameters, RuinParameters
from .plans import CompiledJob, countable


def is_compiled(problem: Problem) -> bool:
    """Return whether compiled searches can plan a problem."""
    if problem.cost.decode_base <= 0 or not problem.decode_steps.any():
        return False
    return countable(problem) and compiled_core() is not None


def only_slots_bind(problem: Problem, _: CoreParameters) -> bool:
    """Return whether memory is enough for all slots."""
    return is_compiled(problem) and not problem.memory_can_run_out


def memory_binds(problem: Problem, _: CoreParameters) -> bool:
    """Return whether memory can run out before slots do."""
    return is_compiled(problem) and problem.memory_can_run_out


def few_under_memory(problem: Problem, core: CoreParameters) -> bool:
    """Return whether orders are searched: few requests under scarce memory."""
    few = len(problem) <= core.events_requests
    return is_compiled(problem) and problem.memory_can_run_out and few


def slots_bind_under_memory(problem: Problem, core: CoreParameters) -> bool:
    """Return whether memory and, even more, slots are scarce."""
    many = len(problem) > core.events_requests
    return is_compiled(problem) and problem.memory_can_run_out and many and slots_are_scarcer(problem)


def anneal_spans(run: SearchRun, budget: Budget) -> None:
    """Anneal stage times and the spans between them."""
    share = run.core.spans_curved_share if _is_curved(run.problem) else run.core.spans_share
    if _computes_again(run.problem):
        share = run.core.spans_groups_share
    _spans(run, budget.part(share), run.best.schedule)
    _ruin(run, budget, run.best.schedule, run.core.ruin_improves)


def anneal_spans_within_memory(run: SearchRun, budget: Budget) -> None:
    """Anneal spans that fill less memory until they make a schedule."""
    fill, heat, schedule = run.core.spans.memory_share, 1.0, run.best.schedule
    for share in run.core.spans_memory_shares:
        found = _spans(run, budget.part(share), schedule, fill=fill, heat=heat)
        if found is None or found.check(run.problem) is None:
            return
        fill, heat, schedule = fill - run.core.memory_step, run.core.heat_again, found
    # Start times mend what is short of memory, if that is little.
    _ruin(run, budget, schedule, run.core.ruin_improves)


def anneal_orders(run: SearchRun, budget: Budget) -> None:
    """Anneal orders in which requests are placed backward."""
    moves = max(1, run.core.placed_per_work // len(run.problem))
    _run(run, "core_events", run.core.events, _allowance(run, budget, moves), run.best.schedule)


def ruin_and_recreate(run: SearchRun, budget: Budget) -> None:
    """Remove requests of the best schedule and insert them elsewhere."""
    _ruin(run, budget, run.best.schedule, run.core.ruin)


def _is_curved(problem: Problem) -> bool:
    """Return whether a stage's cost depends on its prompts."""
    return problem.prefill_token_cap is not None or problem.reaches_bend or _computes_again(problem)


def _computes_again(problem: Problem) -> bool:
    """Return whether several stages may compute a shared prompt."""
    return len(problem.prefix_tokens) > 0 and not problem.keeps_every_prefix


def _spans(
    run: SearchRun, budget: Budget, start: Schedule, *, fill: float | None = None, heat: float = 1.0
) -> Schedule | None:
    """Anneal spans from a schedule; under memory fill a share of it."""
    count, core, spans = len(run.problem), run.core, run.core.spans
    if count >= core.many_requests:
        spans = replace(spans, stage_bias=core.most_bias if count >= core.most_requests else core.many_bias)
    if fill is not None:
        lowered = spans.balance_share - spans.memory_share + fill
        spans = replace(spans, memory_share=fill, balance_share=lowered)
    spans = replace(spans, hot_steps=heat * spans.hot_steps, hot_stages=heat * spans.hot_stages)
    allowance = _allowance(run, budget, core.moves_per_work)
    if fill is not None or _is_curved(run.problem):
        # Mean prompts promise what real ones do not keep.
        allowance = replace(allowance, enough=-math.inf)
    return _run(run, "core_spans", spans, allowance, start)


def _ruin(run: SearchRun, budget: Budget, start: Schedule, parameters: RuinParameters) -> None:
    if start.decode_steps.sum() <= run.core.most_steps:
        allowance = _allowance(run, budget, run.core.ruins_per_work)
        _run(run, "core_ruin_recreate", parameters, allowance, start)


def _allowance(run: SearchRun, budget: Budget, moves_per_work: int) -> Allowance:
    best, seed = run.best, int(run.rng.integers(2**31))
    if budget.over:
        return Allowance(0.0, None, best.enough, seed)
    seconds, steps = min(budget.left, best.patience), budget.steps_left
    if steps is None:
        return Allowance(seconds, None, best.enough, seed)
    best.steps += steps
    return Allowance(seconds, steps * moves_per_work, best.enough, seed)


def _run(
    run: SearchRun, name: str, parameters: Parameters, allowance: Allowance, start: Schedule
) -> Schedule | None:
    """Offer a search's schedule and return it; then raise an interrupt again."""
    if allowance.seconds <= 0:
        return None
    job = CompiledJob(run.problem, memory=run.problem.memory_can_run_out)
    found = job.search(name, parameters, allowance, start)
    schedule = job.schedule(found)
    if schedule is not None:
        schedule = stages_capped(run.problem, schedule)
        run.best.offer(schedule)
    if found.interrupted:
        raise KeyboardInterrupt
    return schedule
