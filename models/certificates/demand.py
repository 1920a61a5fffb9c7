"""Check of a demand that no schedule meets, from the requests and the device's rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from ...data.costs.model_shape import ModelShape
from ...data.demand import Demand, Excess, Work
from ...data.iterations import Sequences
from .beginnings import Beginnings

_CLOSE = 1e-8


def check_work(demand: Demand, rows: Sequences, job_of: Sequence[int]) -> str | None:
    """Return what is wrong with the work of a demand, or None.

    job_of: Job of each completion.
    """
    due = [row for row, job in enumerate(job_of) if job in demand.jobs]
    if not due:
        return "no completion is due"
    part = rows.select(np.array(due))
    output, reused, most = part.output.tolist(), part.cached.tolist(), part.shared.tolist()
    if part.tree is not None:
        reused, most = Beginnings.of_tree(part.tree).reused(output)
    computed, read = 0, 0
    for prompt, cached, shared, drawn in zip(part.prompt.tolist(), reused, most, output, strict=True):
        computed += prompt - cached + drawn - 1
        # Another prompt may hold the last token, too.
        own = 0 if shared == prompt - 1 else prompt - shared
        read += (drawn - 1) * own + drawn * (drawn - 1) // 2
    derived = Work(computed, sum(output), read, max(output))
    larger = any(
        claimed > least for claimed, least in zip(astuple(demand.work), astuple(derived), strict=True)
    )
    return f"{demand.work} is claimed, {derived} follows" if larger else None


def check_excess(excess: Excess, shape: ModelShape, rates: Sequence[float]) -> str | None:
    """Return what is wrong with the seconds of some work, or None.

    rates: Operations a second, bytes a second and bytes of memory of all devices.
    """
    work, (flops, bandwidth, memory) = excess.demand.work, rates
    embedding = shape.vocabulary * shape.hidden
    layer = shape.token_values - 2 * shape.hidden
    operations = 2 * (shape.layers * layer * work.tokens + embedding * work.drawn)
    full = shape.layers - shape.window_layers
    cache = work.reads * full * shape.kv_bytes_per_layer_token
    left = memory - shape.weight_bytes
    if left <= 0:
        return None if excess.limit == "memory" else "the weights do not fit"
    # An expert layer reads at least the experts of one token.
    share, spared = shape.expert_layers / shape.layers, shape.experts - shape.active_experts
    least = shape.layer_bytes - share * spared * shape.expert_values * (
        shape.feed_forward_bytes or shape.bytes_per_value
    )
    weights = shape.layers * least + embedding * shape.bytes_per_value
    times = max(work.longest, cache / left)
    seconds = max(operations / flops, (times * weights + cache) / bandwidth)
    if excess.seconds > seconds * (1 + _CLOSE):
        return f"{excess.seconds:,.3f} s are claimed, {seconds:,.3f} s follow"
    if excess.seconds <= excess.demand.window:
        return "the work fits into the window"
    return None
