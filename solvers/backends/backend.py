"""Backends: libraries that solve a linear model, and their capabilities."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ...data.arrays import FloatArray
from ...models.formulations.linear_model import LinearModel
from ..result import Limits, Status, StoppedBy
from .worker import Desk

HUGE = 1e20
"""A solver's numbers from here on mean "none"."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A backend's unchecked result.

    proof: OPTIMAL, INFEASIBLE or UNBOUNDED if proven, else None.
    limit: Limit that stopped the backend without a proof.
    values: Best solution, shape (columns,), or None.
    bound: Lower bound on the objective, including the offset, or None.
    infeasible_or_unbounded: True if one of the two is proven, but not which.
    """

    proof: Status | None
    limit: StoppedBy | None = None
    values: FloatArray | None = None
    bound: float | None = None
    infeasible_or_unbounded: bool = False


class BackendModule(Protocol):
    """Interface of a backend's module, which only workers import."""

    def solve(
        self, backend: Backend, model: LinearModel, limits: Limits, start: FloatArray | None, desk: Desk
    ) -> Answer:
        """Translate the model, solve it and return the result.

        backend: Row of the table, as a module may drive several.
        model: Model with at least one column.
        limits: Work, threads and seed; ``desk.remaining()`` tells the seconds left.
        start: Warm start, or None.
        desk: Receives intermediate solutions, as ``desk.report("incumbent", values)``.
        """


@dataclass(frozen=True, slots=True)
class Backend:
    """Row of the capability table.

    module: Module that drives it (a :class:`BackendModule`).
    imports: Packages that the module imports.
    distribution: Package of the library, for its version.
    whole_numbers_only: True if it solves only models with whole columns and coefficients.
    threads: True if it can use several threads.
    """

    name: str
    module: str
    imports: str
    distribution: str
    whole_numbers_only: bool = False
    threads: bool = True

    @property
    def installed(self) -> bool:
        """True if its library is installed; nothing is imported to check."""
        return importlib.util.find_spec(self.imports.split(".")[0]) is not None

    @property
    def version(self) -> str:
        """Package and version of the library."""
        return f"{self.distribution} {importlib.metadata.version(self.distribution)}"

    def refusal(self, model: LinearModel) -> str | None:
        """Return why the backend cannot be trusted with a model, or None."""
        if not self.whole_numbers_only:
            return None
        if not model.integer.all():
            column = model.column_names[int(np.argmin(model.integer))]
            return f"it takes whole-number columns only, and {column} is continuous"
        if (np.maximum(np.abs(model.lower), np.abs(model.upper)) > 2**40).any():
            return "it takes bounded columns only"
        if (model.matrix.data != np.round(model.matrix.data)).any():
            return "it takes whole coefficients only"
        if whole_scale(model.objective) is None:
            return "it takes an objective only whose coefficients are multiples of 1e-9"
        return None


def whole_scale(costs: FloatArray) -> int | None:
    """Return the power of ten that makes all costs whole, or None.

    It is None if 1e9 is not enough.
    """
    for power in range(10):
        scaled = costs * 10.0**power
        if np.allclose(scaled, np.round(scaled), rtol=1e-12, atol=1e-9) and (np.abs(scaled) < 2**50).all():
            return int(10**power)
    return None


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("highs", "batchbound.solvers.backends.highs", imports="highspy", distribution="highspy"),
        Backend(
            "scip",
            "batchbound.solvers.backends.scip",
            imports="pyscipopt",
            distribution="pyscipopt",
            # HiGHS's concurrent solve holds Python's lock: no incumbents could be reported, and no stop
            # works.
            threads=False,
        ),
        Backend("cbc", "batchbound.solvers.backends.pulp", imports="pulp", distribution="pulp"),
        Backend(
            "ortools-scip",
            "batchbound.solvers.backends.ortools",
            imports="ortools.math_opt.python.mathopt",
            distribution="ortools",
        ),
        Backend(
            name="ortools-cp-sat",
            module="batchbound.solvers.backends.ortools",
            imports="ortools.math_opt.python.mathopt",
            distribution="ortools",
            whole_numbers_only=True,
        ),
    )
}
"""Capability table, by name. Users may add backends."""


def solve_here(
    backend: Backend, model: LinearModel, limits: Limits, start: FloatArray | None, desk: Desk
) -> Answer:
    """Solve a model in this process, which is a worker."""
    importlib.import_module(backend.imports)
    module: BackendModule = importlib.import_module(backend.module)
    desk.ready()
    return answered(module, backend, model, limits, start, desk)


def answered(
    module: BackendModule,
    backend: Backend,
    model: LinearModel,
    limits: Limits,
    start: FloatArray | None,
    desk: Desk,
) -> Answer:
    """Solve a model, and decide between infeasible and unbounded."""
    answer = module.solve(backend, model, limits, start, desk)
    if not answer.infeasible_or_unbounded:
        return answer
    feasible = module.solve(backend, replace(model, objective=np.zeros(model.columns)), limits, None, desk)
    if feasible.values is not None:
        return replace(answer, proof=Status.UNBOUNDED)
    # With a zero objective nothing is unbounded, so the two proofs are one.
    return replace(feasible, proof=Status.INFEASIBLE) if feasible.infeasible_or_unbounded else feasible
