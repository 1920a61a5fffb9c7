"""Linear models solved in another process, with checked results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.arrays import FloatArray
from ...models.formulations.linear_model import TOLERANCE, LinearModel
from ..result import Limits, Status, StoppedBy
from .backend import BACKENDS, HUGE, Answer, Backend
from .worker import Outcome, run_in_worker


class BackendError(ValueError):
    """Error of an unknown backend, or of a model unsuitable for it."""


@dataclass(frozen=True, slots=True)
class LinearResult:
    """Checked result of a linear model.

    status: Status and proof of the solution.
    stopped_by: Reason for the end.
    values: Best solution, checked against the model, shape (columns,), or None.
    objective: Objective of ``values``, computed by us, or None.
    bound: Proven lower bound on the objective, or None.
    seconds: Wall-clock seconds since the backend's library was loaded.
    message: Remark for the user; may be empty.
    """

    status: Status
    stopped_by: StoppedBy
    values: FloatArray | None
    objective: float | None
    bound: float | None
    seconds: float
    backend: str
    version: str
    message: str = ""


def solve_linear(
    model: LinearModel, backend: str, limits: Limits | None = None, start: npt.ArrayLike | None = None
) -> LinearResult:
    """Solve a linear model on a backend.

    The backend runs in a worker process, which is killed when it overruns its limit. Ctrl-C ends it and
    returns the best solution so far. Integer columns are rounded exactly, and the solution is checked against
    the model. The start is returned if no better solution is found.

    backend: A name of :data:`~batchbound.solvers.backends.backend.BACKENDS`.
    limits: Work is in branch-and-bound nodes, of ``ortools-cp-sat`` in milliseconds of deterministic time.
        Seconds count from the import of its library on. A backend without such settings ignores threads and
        seed.
    start: Warm start, shape (columns,), or None.

    Raises BackendError for an unknown or unsuitable backend, ImportError if its library is missing, and
    ValueError if ``start`` is not a solution.
    """
    chosen = find_backend(backend)
    limits = limits or Limits()
    if (refusal := chosen.refusal(model)) is not None:
        raise BackendError(f"{backend} can't be asked for this model: {refusal}. Use another backend.")
    point = None if start is None else model.rounded(start)
    if point is not None and (broken := model.violation(point)) is not None:
        raise ValueError(f"the start is not a solution: {broken}")
    outcome = run_in_worker(
        "batchbound.solvers.backends.backend",
        "solve_here",
        (chosen, model, limits, point),
        limits.seconds,
    )
    return checked(model, chosen, point, outcome)


def find_backend(name: str) -> Backend:
    """Return a backend by name, with its library installed.

    Raises BackendError if there is none, and ImportError without its library.
    """
    if name not in BACKENDS:
        raise BackendError(f"there is no backend {name!r}; there are {', '.join(sorted(BACKENDS))}")
    if not BACKENDS[name].installed:
        needed = BACKENDS[name].distribution
        raise ImportError(
            f"the backend {name!r} needs the package {needed!r}: in the clone, run `pip install '.[solvers]'`"
        )
    return BACKENDS[name]


def checked(model: LinearModel, backend: Backend, start: FloatArray | None, outcome: Outcome) -> LinearResult:
    """Return the best checked solution and the proof that it supports.

    start: Warm start, or None.
    outcome: Outcome of the worker, with an :class:`Answer` if it finished.
    """
    answer = outcome.answer if isinstance(outcome.answer, Answer) else Answer(None)
    points = (answer.values, outcome.reports.get("incumbent"), start)
    best, objective, refused = _best_of(model, points)
    bound = _believable(answer.bound)
    bound = _believable(outcome.reports.get("bound")) if bound is None else bound
    claim = None if answer.proof is Status.OPTIMAL and answer.values is None else answer.proof
    if claim is Status.UNBOUNDED:
        best, objective = None, math.inf
    claim, bound, doubt = _believed(claim, bound, None if best is None else objective)
    if claim is not None:
        status, stopped_by = claim, StoppedBy.PROOF
    else:
        status = Status.NO_SOLUTION if best is None else Status.FEASIBLE
        stopped_by = outcome.stopped_by or answer.limit or StoppedBy.FINISHED
    return LinearResult(
        status,
        stopped_by,
        best,
        None if best is None else objective,
        bound,
        outcome.seconds,
        backend.name,
        backend.version,
        "; ".join(part for part in (outcome.message, refused, doubt) if part),
    )


def _best_of(model: LinearModel, points: Sequence[object]) -> tuple[FloatArray | None, float, str]:
    """Return the best feasible point, its objective, and why one was refused."""
    best, objective, refused = None, math.inf, ""
    for point in points:
        if point is None:
            continue
        values = model.rounded(np.asarray(point))
        if (broken := model.violation(values)) is not None:
            refused = refused or f"a solution of the backend was refused: {broken}"
        elif (value := model.objective_value(values)) < objective:
            best, objective = values, value
    return best, objective, refused


def _believed(
    claim: Status | None, bound: float | None, objective: float | None
) -> tuple[Status | None, float | None, str]:
    """Return the part of a backend's claim that solutions do not contradict.

    claim: Optimal, infeasible, unbounded, or None.
    bound: Lower bound by the backend.
    objective: Objective of the best checked solution, or None.

    The last value describes the conflict, if any.
    """
    if claim is Status.INFEASIBLE and objective is not None:
        return None, None, "the backend calls the model infeasible, which has a checked solution"
    if claim in (Status.INFEASIBLE, Status.UNBOUNDED):
        return claim, None, ""
    slack = TOLERANCE * max(1.0, abs(math.inf if objective is None else objective))
    if objective is not None and bound is not None and bound > objective + slack:
        return None, None, f"the backend's bound {bound:g} is above a checked solution"
    if claim is not Status.OPTIMAL:
        return claim, bound, ""
    if objective is None or (bound is not None and objective - bound > slack):
        return None, bound, f"the backend's optimum {bound} is not what its solution gives, {objective}"
    return claim, objective if bound is None else min(bound, objective), ""


def _believable(bound: object) -> float | None:
    if not isinstance(bound, int | float) or not math.isfinite(bound) or abs(bound) >= HUGE:
        return None
    return float(bound)
