"""Phases of the schedule search, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...data.problem import Problem
from .core import phases as core
from .incumbent import Budget, SearchRun
from .params import SearchParams
from .prefill_only import evenly_packed
from .stages.search import anneal_stage_times, can_anneal_stage_times
from .staggered import anneal_stage_sizes, staggers


@dataclass(frozen=True, slots=True)
class Phase:
    """Step that improves the best schedule; none makes it worse."""

    name: str
    applies: Callable[[Problem, SearchParams], bool]
    """True if it can improve a problem."""
    improve: Callable[[SearchRun, Budget], None]
    """Function that offers better schedules until its budget is over."""
    share: float | None = None
    """Share of the time left, or None for the usual one."""


def _packs_stages(problem: Problem, params: SearchParams) -> bool:
    few = len(problem) <= params.packed_requests
    return few and not problem.decode_steps.any() and not problem.shares_prompts


def _pack_stages(run: SearchRun, budget: Budget) -> None:
    """Pack ever more prefill stages evenly."""
    for schedule in evenly_packed(run.problem, run.rng, run.params.packing_share * run.best.left):
        run.best.steps += 1
        run.best.offer(schedule)
        if budget.over:
            break


def _decodes(problem: Problem) -> bool:
    return bool(problem.decode_steps.any())


def _slots_alone_bind(problem: Problem) -> bool:
    return _decodes(problem) and not problem.memory_can_run_out and problem.prefill_token_cap is None


def _anneals_stages(problem: Problem) -> bool:
    return _slots_alone_bind(problem) and can_anneal_stage_times(problem)


def _has_few_stages(problem: Problem, params: SearchParams) -> bool:
    """Return whether there are few stages of many requests.

    A linear programme then places them better than spans do.
    """
    return _anneals_stages(problem) and len(problem) <= params.stage_times.requests_per_slot * problem.slots


PHASES = (
    Phase("pack_stages", _packs_stages, _pack_stages),
    Phase("stage_times", _has_few_stages, anneal_stage_times),
    Phase("staggered", staggers, anneal_stage_sizes, share=0.5),
    Phase("spans", core.only_slots_bind, core.anneal_spans),
    Phase("orders", core.few_under_memory, core.anneal_orders, share=0.6),
    Phase("spans_within_memory", core.slots_bind_under_memory, core.anneal_spans_within_memory, share=0.8),
    Phase("ruin_recreate", core.memory_binds, core.ruin_and_recreate),
)
"""All phases; the last one that applies gets all of the time."""
