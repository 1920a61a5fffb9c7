"""Formulations that are built and solved in a worker."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ...data.arrays import FloatArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...models.formulations.full_model import (
    FullModel,
    literal_model,
    read_schedule,
    repaired_model,
    write_schedule,
)
from ...models.formulations.slot_free import (
    SlotFreeModel,
    read_slot_free,
    slot_free_model,
    write_slot_free,
)
from ..result import Limits
from .backend import Answer, Backend, BackendModule, answered
from .linear import LinearResult, checked
from .worker import Desk, Outcome

Built: TypeAlias = FullModel | SlotFreeModel


@dataclass(frozen=True, slots=True)
class Solved:
    """Result of a backend for a formulation.

    found: The backend's result, without the columns' values.
    schedule: Its schedule, not yet checked by the referee.
    """

    found: LinearResult
    schedule: Schedule | None


def solve_formulation(
    problem: Problem, formulation: str, backend: Backend, limits: Limits, start: Schedule | None, desk: Desk
) -> Solved | str:
    """Build a formulation and solve it.

    Returns a text if the backend cannot be trusted with the model.

    problem: Problem that the formulation does not refuse.
    formulation: ``literal``, ``repaired`` or ``slot-free``.
    backend, limits: As for :func:`~.linear.solve_linear`.
    start: Schedule for a warm start, or None; the literal model takes none.
    desk: Receives ``built`` once the model is built, and schedules as they are found.
    """
    begun = time.monotonic()
    importlib.import_module(backend.imports)
    module: BackendModule = importlib.import_module(backend.module)
    desk.ready()
    built, read, point = _built(problem, formulation, start)
    if (refusal := backend.refusal(built.model)) is not None:
        return refusal
    desk.report("built", True)
    reader = _Reader(built, read)
    desk.read_incumbents(reader.better)
    answer = answered(module, backend, built.model, limits, point, desk)
    return reader.solved(backend, point, answer, time.monotonic() - begun)


def _built(
    problem: Problem, formulation: str, start: Schedule | None
) -> tuple[Built, Callable[[FloatArray], Schedule], FloatArray | None]:
    if formulation == "slot-free":
        free = slot_free_model(problem)
        return (
            free,
            lambda values: read_slot_free(free, values),
            None if start is None else write_slot_free(free, start),
        )
    if formulation == "literal":
        printed = literal_model(problem)
        return printed, lambda values: read_schedule(printed, values), None
    full = repaired_model(problem)
    return (
        full,
        lambda values: read_schedule(full, values),
        None if start is None else write_schedule(full, start),
    )


class _Reader:
    def __init__(self, built: Built, read: Callable[[FloatArray], Schedule]) -> None:
        self._model, self._read = built.model, read
        self._last: object = None

    def better(self, values: object) -> Schedule | None:
        """Return a reported solution as a schedule, if it is better."""
        self._last = values
        point = self._model.rounded(np.asarray(values))
        return self._read(point) if self._model.violation(point) is None else None

    def solved(self, backend: Backend, start: FloatArray | None, answer: Answer, seconds: float) -> Solved:
        reports = {} if self._last is None else {"incumbent": self._last}
        outcome = checked(self._model, backend, start, Outcome(answer, reports, None, seconds))
        schedule = None if outcome.values is None else self._read(outcome.values)
        return Solved(replace(outcome, values=None), schedule)
