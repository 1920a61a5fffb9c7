"""Phases of the schedule search that run compiled."""

from __future__ import annotations

import math
from dataclasses import replace

from ....data.problem import Problem
from ....data.schedule import Schedule
from ..backward import slots_are_scarcer
from ..incumbent import Budget, SearchRun
from ..params import SearchParams
from ..stage_split import stages_capped
from .compiled import Allowance, Parameters, compiled_core
from .parameters import RuinParameters
from .plans import CompiledJob, countable

MADE = 2.0
"""Seconds kept for making a schedule of what a search finds, in times of those of the last offer."""


def is_compiled(problem: Problem) -> bool:
    """Return whether compiled searches can plan a problem."""
    if problem.cost.decode_base <= 0 or not problem.decode_steps.any():
        return False
    return countable(problem) and compiled_core() is not None


def only_slots_bind(problem: Problem, _: SearchParams) -> bool:
    """Return whether memory is enough for all slots."""
    return is_compiled(problem) and not problem.memory_can_run_out


def memory_binds(problem: Problem, _: SearchParams) -> bool:
    """Return whether memory can run out before slots do."""
    return is_compiled(problem) and problem.memory_can_run_out


def few_under_memory(problem: Problem, params: SearchParams) -> bool:
    """Return whether orders are searched: few requests under scarce memory."""
    few = len(problem) <= params.core.events_requests
    return is_compiled(problem) and problem.memory_can_run_out and few


def slots_bind_under_memory(problem: Problem, params: SearchParams) -> bool:
    """Return whether memory and, even more, slots are scarce."""
    many = len(problem) > params.core.events_requests
    return is_compiled(problem) and problem.memory_can_run_out and many and slots_are_scarcer(problem)


def anneal_spans(run: SearchRun, budget: Budget) -> None:
    """Anneal stage times and the spans between them."""
    share = run.params.core.spans_curved_share if is_curved(run.problem) else run.params.core.spans_share
    _spans(run, budget.part(share), run.best.schedule)
    _ruin(run, budget, run.best.schedule, run.params.core.ruin_improves)


def anneal_spans_within_memory(run: SearchRun, budget: Budget) -> None:
    """Anneal spans that fill less memory until they make a schedule."""
    fill, heat, schedule = run.params.core.spans.memory_share, 1.0, run.best.schedule
    for share in run.params.core.spans_memory_shares:
        plan = _spans(run, budget.part(share), schedule, fill=fill, heat=heat)
        if plan is None or plan.check(run.problem) is None:
            return
        fill, heat, schedule = fill - run.params.core.memory_step, run.params.core.heat_again, plan
    # Start times mend what is short of memory, if that is little.
    _ruin(run, budget, schedule, run.params.core.ruin_improves)


def anneal_orders(run: SearchRun, budget: Budget) -> None:
    """Anneal orders in which requests are placed backward."""
    moves = max(1, run.params.core.placed_per_work // len(run.problem))
    _run(run, budget, ("core_events", moves), run.params.core.events, run.best.schedule)


def ruin_and_recreate(run: SearchRun, budget: Budget) -> None:
    """Remove requests of the best schedule and insert them elsewhere."""
    _ruin(run, budget, run.best.schedule, run.params.core.ruin)


def is_curved(problem: Problem) -> bool:
    """Return whether a stage's cost depends on its prompts."""
    return problem.prefill_token_cap is not None or problem.reaches_bend


def _spans(
    run: SearchRun, budget: Budget, start: Schedule, *, fill: float | None = None, heat: float = 1.0
) -> Schedule | None:
    """Anneal spans from a schedule; under memory fill a share of it."""
    count, core, spans = len(run.problem), run.params.core, run.params.core.spans
    if count >= core.many_requests:
        spans = replace(spans, stage_bias=core.most_bias if count >= core.most_requests else core.many_bias)
    if fill is not None:
        lowered = spans.balance_share - spans.memory_share + fill
        spans = replace(spans, memory_share=fill, balance_share=lowered)
    spans = replace(spans, hot_steps=heat * spans.hot_steps, hot_stages=heat * spans.hot_stages)
    # Mean prompts promise what real ones do not keep.
    enough = -math.inf if fill is not None or is_curved(run.problem) else run.best.enough
    return _run(run, budget, ("core_spans", core.moves_per_work), spans, start, enough)


def _ruin(run: SearchRun, budget: Budget, start: Schedule, parameters: RuinParameters) -> None:
    if start.decode_steps.sum() <= run.params.core.most_steps:
        _run(run, budget, ("core_ruin_recreate", run.params.core.ruins_per_work), parameters, start)


def _run(
    run: SearchRun,
    budget: Budget,
    search: tuple[str, int],
    parameters: Parameters,
    start: Schedule,
    enough: float | None = None,
) -> Schedule | None:
    """
    Offer a search's schedule and return it; then raise an interrupt again.

    search: Name, and the moves that one step of a work limit stands for.
    enough: Makespan in seconds that ends it; by default that of the whole search.
    """
    best, (name, moves_per_work) = run.best, search
    seed = int(run.rng.integers(2**31))
    if budget.over:
        return None
    job = CompiledJob(run.problem, memory=run.problem.memory_can_run_out)
    enough_steps = job.in_steps(best.enough if enough is None else enough, start)
    # Steps of a work limit count at once; the schedule found is still to be made, and offered.
    seconds, steps = min(budget.left, best.patience) - MADE * best.offer_seconds, budget.steps_left
    best.steps += steps or 0
    if seconds <= 0:
        return None
    moves = None if steps is None else steps * moves_per_work
    answer = job.search(name, parameters, Allowance(seconds, moves, enough_steps, seed), start)
    schedule = job.schedule(answer)
    if schedule is not None:
        schedule = stages_capped(run.problem, schedule)
        best.offer(schedule)
    if answer.interrupted:
        # Raised again now that its schedule is kept.
        raise KeyboardInterrupt
    return schedule
