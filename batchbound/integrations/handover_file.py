"""What an engine can take of a plan, as files: batches with priorities for servers, an order for trainers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.files.disk import atomic_write, write_json
from ..data.files.jsonl import json_lines
from ..data.iteration_plan import IterationPlan
from ..data.readers.server_batch import completion_ids, read_server_batch

if TYPE_CHECKING:
    from .handover import Handover

SERVERS = ("vllm", "sglang")
"""Engines that are sent requests, each with its priority in the body."""

ENGINES = (*SERVERS, "verl", "openrlhf", "trl")
"""The engines and trainers a plan can be made for."""


def handover_paths(plan_path: str | os.PathLike[str], engine: str, replicas: int) -> tuple[Path, ...]:
    """Return the files a plan is handed over in: beside it, named after it and the engine."""
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
    batch: str | os.PathLike[str] | None,
) -> tuple[Path, ...]:
    """
    Write a handover, and return its files.

    A server's are batch files in the order of the priorities: the lines of the batch that was planned with
    ``priority`` in their bodies, or ids and priorities alone for a job of lengths. A trainer's is one object.

    ``batch``: the file of the requests, or None for a job of lengths.
    """
    ids = plan.workload.ids.tolist()
    if handover.engine not in SERVERS:
        (path,) = handover_paths(plan_path, handover.engine, 1)
        write_json(path, _for_trainer(handover, plan))
        return (path,)
    assert handover.priority is not None
    lines = {} if batch is None else _lines(batch)
    paths = handover_paths(plan_path, handover.engine, len(plan.shares))
    for path, share in zip(paths, plan.shares, strict=True):
        written = set[str]()
        with atomic_write(path) as stream:
            for i in share.requests.tolist():
                priority = int(handover.priority[i])
                line = lines.get(ids[i], {"custom_id": ids[i]})
                if str(line["custom_id"]) in written:
                    # One more of the completions that a request asks for.
                    continue
                written.add(str(line["custom_id"]))
                body = line.get("body")
                if isinstance(body, Mapping):
                    line = {**line, "body": {**body, "priority": priority}}
                else:
                    line = {**line, "priority": priority}
                stream.write(json.dumps(line) + "\n")
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


def _lines(batch: str | os.PathLike[str]) -> dict[str, dict[str, object]]:
    """Return the line of each completion, by its name."""
    found: dict[str, dict[str, object]] = {}
    for request, (_, line) in zip(read_server_batch(batch), json_lines(batch), strict=True):
        found |= dict.fromkeys(completion_ids([request]), line)
    return found
