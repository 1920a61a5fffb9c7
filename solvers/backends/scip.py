"""SCIP through PySCIPOpt, imported in workers only."""

from __future__ import annotations

import os
import tempfile

import numpy as np
from pyscipopt import SCIP_EVENTTYPE, Eventhdlr, Model  # type: ignore[attr-defined]
from pyscipopt.scip import Event

from ...data.arrays import FloatArray
from ...models.formulations.linear_files import write_mps
from ...models.formulations.linear_model import LinearModel
from ..result import Limits, Status, StoppedBy
from .backend import Answer, Backend
from .worker import Desk

_PROOFS = {"optimal": Status.OPTIMAL, "infeasible": Status.INFEASIBLE, "unbounded": Status.UNBOUNDED}
_LIMITS = {
    "timelimit": StoppedBy.TIME,
    "totalnodelimit": StoppedBy.WORK,
    "nodelimit": StoppedBy.WORK,
    "userinterrupt": StoppedBy.INTERRUPT,
}


class _Incumbents(Eventhdlr):
    """Event handler that reports each better solution."""

    def __init__(self, names: tuple[str, ...], desk: Desk) -> None:
        self.names = names
        self.desk = desk

    def eventinit(self) -> None:
        self.model.catchEvent(SCIP_EVENTTYPE.BESTSOLFOUND, self)

    def eventexit(self) -> None:
        self.model.dropEvent(SCIP_EVENTTYPE.BESTSOLFOUND, self)

    def eventexec(self, event: Event) -> None:
        self.desk.report("incumbent", _values(self.model, self.names))


def solve(
    backend: Backend, model: LinearModel, limits: Limits, start: FloatArray | None, desk: Desk
) -> Answer:
    """Solve a model with SCIP.

    The model is a file, as rows take PySCIPOpt six times as long.
    """
    scip = Model()
    scip.hideOutput()
    handle, path = tempfile.mkstemp(suffix=".mps")
    os.close(handle)
    write_mps(model, path)
    scip.readProblem(path)
    scip.setParams(
        {
            "misc/catchctrlc": False,
            "randomization/randomseedshift": limits.seed,
            "limits/gap": 0.0,
        }
    )
    if limits.work is not None:
        scip.setParam("limits/totalnodes", limits.work)
    if start is not None:
        columns = {column.name: column for column in scip.getVars()}
        point = scip.createSol()
        for name, value in zip(model.column_names, start.tolist(), strict=True):
            scip.setSolVal(point, columns[name], value)
        scip.addSol(point)
    scip.includeEventhdlr(_Incumbents(model.column_names, desk), "incumbents", "hands over solutions")
    desk.on_stop(scip.interruptSolve)
    if (seconds := desk.remaining()) is not None:
        scip.setParam("limits/time", seconds)
    scip.optimizeNogil()
    status = scip.getStatus()
    proof = _PROOFS.get(status)
    # An unbounded model's "solution" is a point of a ray, worth -1e20.
    values = _values(scip, model.column_names) if scip.getNSols() and proof is not Status.UNBOUNDED else None
    bound = scip.getDualbound() if proof in (None, Status.OPTIMAL) else None
    return Answer(proof, _LIMITS.get(status), values, bound, infeasible_or_unbounded=status == "inforunbd")


def _values(scip: Model, names: tuple[str, ...]) -> FloatArray:
    best = scip.getBestSol()
    columns = {column.name: column for column in scip.getVars(transformed=False)}
    return np.array([scip.getSolVal(best, columns[name]) for name in names])
