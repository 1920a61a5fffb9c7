"""The phases of the schedule search, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...data.problem import Problem
from ...data.schedule import Schedule
from .core import phases as core
from .drop_stages import drop_stages
from .incumbent import Budget, SearchRun
from .memory.beam import BeamSearch, beam_pays
from .prefill_only import StageExchange, evenly_packed
from .slot_sequences import SlotSequences, packing_pays, requests_are_few
from .stages.search import anneal_stage_times, can_anneal_stage_times

BEAM_SLOTS = 6
"""Slots up to which beams are searched where memory is enough."""

FEW = 40
"""Requests up to which beams are searched there only if a stage costs more than a decode step."""

MOST_UNDER_MEMORY = 130
"""Requests up to which beams are searched under scarce memory."""

MOST_PACKED = 20_000
"""Requests up to which prefill stages are packed evenly: of more, one packing takes half a second."""

PACKING_SHARE = 0.1
"""Most of the seconds left that packing slots or stages takes."""

FEW_STAGES = 10
"""Requests a slot up to which stage times are annealed with a linear programme besides spans."""

PLACED_SECONDS = 1e-6
"""Least seconds for each pair of a slot's requests that placing them in stages takes."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A way to improve the best schedule; none makes it worse."""

    name: str
    applies: Callable[[Problem], bool]
    """Whether it can do anything for a problem."""
    improve: Callable[[SearchRun, Budget], None]
    """Offers better schedules until its budget is over, or it has no more."""
    share: float | None = None
    """Share of the time left that it gets unless the parameters say otherwise; None for the usual one."""


def _only_prefills(problem: Problem) -> bool:
    return not problem.decode_steps.any() and not len(problem.prefix_tokens)


def _pack_stages(run: SearchRun, budget: Budget) -> None:
    """Pack ever more prefill stages evenly."""
    for schedule in evenly_packed(run.problem, run.rng, PACKING_SHARE * run.best.left):
        run.best.steps += 1
        run.best.offer(schedule)
        if budget.over:
            break


def _exchange_stages(run: SearchRun, budget: Budget) -> None:
    """Move requests between prefill stages and exchange them."""
    run.repeat(budget, StageExchange(run.problem, run.rng, run.best.schedule).step)


def _decodes(problem: Problem) -> bool:
    return bool(problem.decode_steps.any())


def _without_stages(run: SearchRun, schedule: Schedule | None) -> Schedule | None:
    """Return a schedule without the prefill stages that it can do without."""
    if schedule is None or run.best.left <= 0:
        return schedule
    late = lambda: run.best.left <= 0  # noqa: E731
    return drop_stages(run.problem, schedule.without_idle_steps(run.problem), late)


def _beam_applies(problem: Problem) -> bool:
    if not _decodes(problem) or problem.cost.decode_base == 0 or not beam_pays(problem):
        return False
    if problem.memory_can_run_out:
        return len(problem) <= MOST_UNDER_MEMORY
    dear = max(problem.cost.prefill_base, problem.cost.prefill_floor) >= problem.cost.decode_base
    return problem.slots <= BEAM_SLOTS and (len(problem) > FEW or dear)


def _search_beams(run: SearchRun, budget: Budget) -> None:
    """Search beams of schedules that requests are put into one by one."""
    beams = BeamSearch(run.problem, run.rng)
    run.repeat(budget, lambda done: _without_stages(run, beams.step(done)))


def _slots_alone_bind(problem: Problem) -> bool:
    return _decodes(problem) and not problem.memory_can_run_out and problem.prefill_token_cap is None


def _orders_slots(problem: Problem) -> bool:
    return _slots_alone_bind(problem) and packing_pays(problem) and requests_are_few(problem)


def _order_slots(run: SearchRun, budget: Budget) -> None:
    """Pack the slots full, and anneal over which requests follow one another."""
    problem, best = run.problem, run.best
    if PLACED_SECONDS * len(problem) ** 2 / problem.slots > best.left:
        return
    run.repeat(budget, SlotSequences(problem, run.rng, PACKING_SHARE * best.left).step)


def _anneals_stages(problem: Problem) -> bool:
    return _slots_alone_bind(problem) and can_anneal_stage_times(problem)


def _has_few_stages(problem: Problem) -> bool:
    """Return whether a programme places stages better than spans do: few of them, of many requests each."""
    return _anneals_stages(problem) and len(problem) <= FEW_STAGES * problem.slots


PHASES = (
    Phase("pack_stages", lambda job: _only_prefills(job) and len(job) <= MOST_PACKED, _pack_stages),
    Phase("exchange_stages", _only_prefills, _exchange_stages),
    Phase("beam", _beam_applies, _search_beams),
    Phase("slot_sequences", _orders_slots, _order_slots),
    Phase("stage_times", _has_few_stages, anneal_stage_times),
    Phase("spans", core.only_slots_bind, core.anneal_spans),
    Phase("orders", core.few_under_memory, core.anneal_orders, share=0.6),
    Phase("spans_within_memory", core.slots_bind_under_memory, core.anneal_spans_within_memory, share=0.8),
    Phase("ruin_recreate", core.memory_binds, core.ruin_and_recreate),
)
"""All phases. Each gets a share of the time left; the last one that applies gets all of it."""
