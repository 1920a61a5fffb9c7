"""Least seconds of a job on devices at their stated rates, by every deadline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.arrays import IntArray
from ...data.costs.model_shape import ModelShape
from ...data.demand import Demand, Excess, Machine, Work
from ...data.iterations import Sequences
from ..exegpt.roofline import RooflineDevice

_ROUNDING = 1e-9
"""Share by which a demand is lowered, against rounding."""


def least_work(rows: Sequences) -> Work:
    """Return the least work of some completions on any engine with a prefix cache.

    A decode reads what its prompt shares with no other, and what it generated. Another prompt may go on
    after the last token of one, so a last token alone is not counted.
    """
    own, decodes = rows.prompt - rows.shared, rows.output - 1
    alone = np.where(own == 1, 0, own)
    return Work(
        tokens=int((rows.prompt - rows.cached + decodes).sum()),
        drawn=int(rows.output.sum()),
        reads=int((decodes * alone + decodes * rows.output // 2).sum()),
        longest=int(rows.output.max()),
    )


def machine_of(shape: ModelShape, device: RooflineDevice, devices: int) -> Machine:
    """Return the rates of some devices, and what the model asks of them at least."""
    head = shape.vocabulary * shape.hidden
    whole = 1 - shape.window_layers / shape.layers
    return Machine(
        flops=devices * fastest(device, shape),
        bandwidth=devices * device.bandwidth,
        memory=devices * device.memory,
        weights=shape.weight_bytes,
        read=shape.layers * float(shape.read_bytes(np.ones(1))[0]) + head * shape.bytes_per_value,
        kv_token=whole * shape.layers * shape.kv_bytes_per_layer_token,
        flops_token=2 * shape.layers * (shape.token_values - 2 * shape.hidden),
        flops_drawn=2 * head,
    )


def fastest(device: RooflineDevice, shape: ModelShape) -> float:
    """Return the highest rate of a device for the model's factors."""
    return max(device.flops_at(bits) for bits in (16, 8, 4) if bits >= shape.multiply_bits)


def least_seconds(work: Work, machine: Machine) -> tuple[float, str]:
    """Return the least seconds of some work, and what limits it.

    Every iteration reads the weights that a token uses, and the KV cache of the decoding sequences. No more
    sequences run at a time than the memory holds, and a sequence draws a token in an iteration.
    """
    room = machine.memory - machine.weights
    if room <= 0:
        return float("inf"), "memory"
    held = work.reads * machine.kv_token
    iterations = max(work.longest, held / room)
    arithmetic = (machine.flops_token * work.tokens + machine.flops_drawn * work.drawn) / machine.flops
    reading = (iterations * machine.read + held) / machine.bandwidth
    least = max((arithmetic, "arithmetic"), (reading, "reading"))
    return least[0] * (1 - _ROUNDING), least[1]


def demands(rows: Sequences, jobs: Sequence[IntArray], windows: Sequence[float]) -> list[Demand]:
    """Return the work that is due by each deadline.

    jobs: Completions of each job.
    windows: Seconds until each job's deadline.
    """
    found = []
    for window in sorted(set(windows)):
        due = tuple(number for number, until in enumerate(windows) if until <= window)
        found.append(Demand(due, window, least_work(rows.select(np.concatenate([jobs[job] for job in due])))))
    return found


def excess(due: Sequence[Demand], machine: Machine) -> Excess | None:
    """Return the first deadline by which more is due than the machine can do, or None."""
    for demand in due:
        seconds, limit = least_seconds(demand.work, machine)
        if seconds > demand.window:
            return Excess(demand, seconds, limit)
    return None
