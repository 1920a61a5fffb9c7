r"""
The hybrid paper's makespan bin packing (26)-(30), :math:`P \| C_{max}`: as printed, and as an arc flow.

Letters as there: :math:`x_{ij}` request on client, :math:`T_i` a request's decode time, :math:`t_j` that of a
client.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.costs.cost import FloatArray, IntArray
from .linear_model import LinearModel, ModelBuilder


@dataclass(frozen=True, slots=True, eq=False)
class PartitionModel:
    """
    The literal model and where its columns stand.

    Parameters
    ----------
    model
        Its objective is the largest load.
    x
        Columns "item on machine", shape (items, machines).
    loads
        Columns of the machines' loads, shape (machines,).
    largest
        The column of the largest load, shape ().
    """

    model: LinearModel
    x: IntArray
    loads: IntArray
    largest: IntArray


def partition_model(weights: npt.ArrayLike, machines: int) -> PartitionModel:
    r"""
    Return the model (26)-(30) as printed, the maximum in (26) a column :math:`t^{max} \ge t_j`.

    Parameters
    ----------
    weights
        The paper's :math:`T_i`, shape (items,). Whole weights make the times whole columns, too.
    machines
        The paper's clients :math:`J`.
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


def read_partition(model: PartitionModel, values: FloatArray) -> IntArray:
    """Return the machine of each item, shape (items,)."""
    machine: IntArray = values[model.x].argmax(axis=1)
    return machine


def write_partition(model: PartitionModel, weights: npt.ArrayLike, machine_of: IntArray) -> FloatArray:
    """Return the solution that an assignment means: a point to start from."""
    values = np.zeros(model.model.columns)
    values[model.x[np.arange(len(machine_of)), machine_of]] = 1.0
    loads = np.bincount(machine_of, weights=np.asarray(weights, np.float64), minlength=len(model.loads))
    values[model.loads] = loads
    values[model.largest] = loads.max()
    return values


@dataclass(frozen=True, slots=True, eq=False)
class ArcFlowModel:
    """
    An arc-flow model of whether the items fit into so many machines of one capacity.

    Parameters
    ----------
    model
        Without an objective: a solution is a packing.
    weights
        Of the items, shape (items,).
    tails, heads
        Loads between which each item arc leads, shape (arcs,); item arcs are the model's first columns.
    """

    model: LinearModel
    weights: IntArray
    tails: IntArray
    heads: IntArray


def arc_flow_model(weights: npt.ArrayLike, machines: int, capacity: int) -> ArcFlowModel:
    """
    Return the arc-flow model of packing the items into machines of a capacity.

    A machine is a path of loads from 0 to the capacity, an item an arc of its weight, idleness an arc to the
    next load reached. Items come heaviest first along a path, so that each set has one path
    (Valerio de Carvalho 1999; for the makespan Mrad and Souayah 2018).

    Parameters
    ----------
    weights
        Positive and whole, shape (items,).
    machines
        Paths at most.
    capacity
        At least the heaviest weight.

    Raises
    ------
    ValueError
        If a weight is not positive or more than the capacity.
    """
    items = np.asarray(weights, dtype=np.int64)
    if len(items) == 0 or items.min() < 1 or items.max() > capacity:
        raise ValueError(f"the weights must be from 1 to the capacity of {capacity}")
    sizes, counts = np.unique(items, return_counts=True)
    tails, kinds = _arcs(sizes[::-1], counts[::-1], capacity)
    sizes, counts = sizes[::-1], counts[::-1]
    heads = tails + sizes[kinds]
    nodes = np.unique(np.concatenate((tails, heads, [0, capacity])))
    add = ModelBuilder()
    flow = add.columns("flow", (len(tails),), upper=np.minimum(counts[kinds], machines), integer=True)
    idle = add.columns("idle", (len(nodes) - 1,), upper=machines, integer=True)
    ends = np.concatenate((heads, nodes[1:])), np.concatenate((tails, nodes[:-1]))
    arcs = np.concatenate((flow, idle))
    for at, node in enumerate(nodes[1:-1].tolist(), start=1):
        into, out = arcs[ends[0] == node], arcs[ends[1] == node]
        add.rows(f"node[{node}]", [(1, into[None, :]), (-1, out[None, :])], lower=0, upper=0)
        assert nodes[at] == node
    add.rows("machines", [(1, arcs[ends[1] == 0][None, :])], upper=machines)
    for kind, count in enumerate(counts.tolist()):
        add.rows(f"packed[{kind}]", [(1, flow[kinds == kind][None, :])], lower=count, upper=count)
    return ArcFlowModel(add.build(), items, tails, heads)


def _arcs(sizes: IntArray, counts: IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """Return the tail and kind of each arc: kinds heaviest first, each from loads they reach."""
    reached = np.zeros(capacity + 1, dtype=np.bool_)
    reached[0] = True
    tails, kinds = [], []
    for kind, (size, count) in enumerate(zip(sizes.tolist(), counts.tolist(), strict=True)):
        starts = reached.copy()
        for _ in range(min(count, capacity // size) - 1):
            more = starts.copy()
            more[size:] |= starts[:-size]
            starts = more
        starts[capacity - size + 1 :] = False
        at = np.flatnonzero(starts)
        tails.append(at)
        kinds.append(np.full(len(at), kind))
        reached[at + size] = True
    return np.concatenate(tails), np.concatenate(kinds)


def read_arc_flow(model: ArcFlowModel, values: FloatArray) -> IntArray:
    """Return the machine of each item, shape (items,): the flow taken apart into paths."""
    flow = np.round(values[: len(model.tails)]).astype(np.int64)
    waiting: dict[int, list[int]] = {}
    for i, weight in enumerate(model.weights.tolist()):
        waiting.setdefault(weight, []).append(i)
    machine_of = np.full(len(model.weights), -1, dtype=np.int64)
    # Paths ordered by load: an arc is taken by a machine that stands at or below its tail, idle up to there.
    loads: list[list[int]] = []
    for arc in np.lexsort((-model.heads, model.tails)).tolist():
        tail, head = int(model.tails[arc]), int(model.heads[arc])
        for _ in range(int(flow[arc])):
            machine = next((m for m, load in enumerate(loads) if load[0] <= tail), None)
            if machine is None:
                loads.append([0])
                machine = len(loads) - 1
            loads[machine][0] = head
            machine_of[waiting[head - tail].pop()] = machine
    return machine_of
