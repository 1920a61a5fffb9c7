"""Files of a plan for other engines and trainers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..data.files.disk import atomic_write, write_json
from ..data.iteration_plan import IterationPlan
from ..data.readers.server_batch import ServerBatch, encoded, read_server_batch

if TYPE_CHECKING:
    from .handover import Handover

SERVERS = ("vllm", "sglang")
"""Engines that take requests with a priority in the body."""

ENGINES = (*SERVERS, "verl", "openrlhf", "trl")
"""Engines and trainers that a plan can be made for."""


def handover_paths(plan_path: str | os.PathLike[str], engine: str, replicas: int) -> tuple[Path, ...]:
    """Return the paths of an engine's files, next to the plan."""
    stem = Path(plan_path).with_suffix("")
    if engine not in SERVERS:
        return (stem.with_name(f"{stem.name}.{engine}.json"),)
    if replicas == 1:
        return (stem.with_name(f"{stem.name}.{engine}.jsonl"),)
    return tuple(stem.with_name(f"{stem.name}.{engine}.{k}.jsonl") for k in range(replicas))


def write_handover(
    handover: Handover,
    plan: IterationPlan,
    plan_path: str | os.PathLike[str],
    batch: str | os.PathLike[str] | ServerBatch | None,
) -> tuple[Path, ...]:
    """Write a handover, and return its files.

    A server gets a batch file per replica, in order of priority, with ``priority`` in each body. A job of
    lengths has only ids and priorities. A trainer gets one JSON object.

    batch: Requests or their file; None for a job of lengths.
    """
    ids = plan.workload.ids.tolist()
    if handover.engine not in SERVERS:
        (path,) = handover_paths(plan_path, handover.engine, 1)
        write_json(path, _for_trainer(handover, plan))
        return (path,)
    assert handover.priority is not None
    requests = batch if isinstance(batch, ServerBatch | None) else read_server_batch(batch)
    of = np.arange(len(ids))
    if requests is not None:
        # The completions of a request are adjacent.
        of = np.repeat(np.arange(len(requests)), requests.choices)
    paths = handover_paths(plan_path, handover.engine, len(plan.shares))
    for path, share in zip(paths, plan.shares, strict=True):
        written = np.zeros(len(ids), dtype=np.bool_)
        with atomic_write(path) as stream:
            for i in share.requests.tolist():
                if written[of[i]]:
                    # The request is already written: this is another of its completions.
                    continue
                written[of[i]] = True
                priority = int(handover.priority[i])
                line = (
                    encoded({"custom_id": ids[i], "priority": priority})
                    if requests is None
                    else requests.with_priority(int(of[i]), priority)
                )
                stream.write(line.decode() + "\n")
    return paths


def _for_trainer(handover: Handover, plan: IterationPlan) -> dict[str, object]:
    value: dict[str, object] = {
        "engine": handover.engine,
        "ids": plan.workload.ids.tolist(),
        "order": plan.order.tolist(),
        "replica_of": plan.replica_of.tolist(),
        "settings": dict(handover.settings),
    }
    return value if handover.priority is None else value | {"priority": handover.priority.tolist()}
