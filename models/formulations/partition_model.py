r"""Hybrid paper's bin packing (26)-(30), :math:`P \| C_{max}`, as printed.

Letters as there: :math:`x_{ij}` request on client, :math:`T_i` a request's decode time, :math:`t_j` that of a
client.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.arrays import FloatArray, IntArray
from .linear_model import LinearModel, ModelBuilder


@dataclass(frozen=True, slots=True, eq=False)
class PartitionModel:
    """Literal model, and its columns.

    model: Model; its objective is the largest load.
    x: Columns "item on machine", shape (items, machines).
    loads: Columns of the machines' loads, shape (machines,).
    largest: Column of the largest load, shape ().
    """

    model: LinearModel
    x: IntArray
    loads: IntArray
    largest: IntArray


def partition_model(weights: npt.ArrayLike, machines: int) -> PartitionModel:
    r"""Return the model (26)-(30) as printed.

    The maximum in (26) is a column :math:`t^{max} \ge t_j`.

    weights: The paper's :math:`T_i`, shape (items,). Whole weights make the times whole columns, too.
    machines: The paper's clients :math:`J`.
    """
    sizes = np.asarray(weights, dtype=np.float64)
    whole = bool((sizes == np.round(sizes)).all())
    total = float(sizes.sum())
    add = ModelBuilder()
    x = add.columns("x", (len(sizes), machines), upper=1, integer=True)
    loads = add.columns("t", (machines,), upper=total, integer=whole)
    largest = add.columns("tmax", (), upper=total, integer=whole, cost=1.0)
    add.rows("eq26", [(1, np.broadcast_to(largest, (machines,))), (-1, loads)], lower=0)
    add.rows("eq27", [(1, x)], lower=1, upper=1)
    add.rows("eq28", [(sizes, x.T), (-1, loads)], upper=0)
    return PartitionModel(add.build(), x, loads, largest)


def write_partition(model: PartitionModel, weights: npt.ArrayLike, machine_of: IntArray) -> FloatArray:
    """Return an assignment as a solution, for a warm start."""
    values = np.zeros(model.model.columns)
    values[model.x[np.arange(len(machine_of)), machine_of]] = 1.0
    loads = np.bincount(machine_of, weights=np.asarray(weights, np.float64), minlength=len(model.loads))
    values[model.loads] = loads
    values[model.largest] = loads.max()
    return values
