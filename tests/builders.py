"""Small problems, schedules and fleets, built the same way in every test that wants one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload

PAPER = CostModel.paper()
UNIT = CostModel(prefill_base=1.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)
"""A second a prefill stage and a second a decode round."""


def workload_of(prompts: Sequence[int], outputs: Sequence[int], **columns: Any) -> Workload:
    """Return requests of these lengths, named by their position."""
    return Workload([str(i) for i in range(len(prompts))], prompts, outputs, **columns)  # type: ignore[arg-type]


def problem_of(
    prompts: Sequence[int],
    outputs: Sequence[int],
    slots: int,
    cost: CostModel = PAPER,
    *,
    arrival: Sequence[float] | None = None,
    **limits: Any,
) -> Problem:
    """Return the problem of serving requests of these lengths."""
    return Problem(workload_of(prompts, outputs, arrival=arrival), cost, slots, **limits)


def schedule_of(bins: Sequence[int], slots: Sequence[int], rounds: Sequence[int]) -> Schedule:
    """Return a schedule of plain lists."""
    return Schedule(bins, slots, rounds)  # type: ignore[arg-type]
