"""Plans in the terms of other engines and trainers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..data.arrays import IntArray
from ..data.files.disk import atomic_write, write_json
from ..data.iteration_plan import IterationPlan
from ..data.readers.server_batch import ServerBatch, encoded, read_server_batch

SERVERS = ("vllm", "sglang")
"""Engines that take requests with a priority in the body."""

ENGINES = (*SERVERS, "verl", "openrlhf", "trl")
"""Engines and trainers that a plan can be made for."""


@dataclass(frozen=True, slots=True, eq=False)
class Handover:
    """A plan in the terms of an engine.

    engine: Name of the engine, one of :data:`ENGINES`.
    priority: Priority of each completion, shape (completions,); None if the engine keeps the order of its
        list. The lowest begins first, in SGLang the highest. verl drops 0, so its priorities count from 1.
    command: Options of the server's command.
    settings: Configuration of a trainer, by dotted names.
    remarks: Remarks on its use, in sentences.
    """

    engine: str
    priority: IntArray | None
    command: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def hand_over(plan: IterationPlan, *, max_position: int | None = None) -> Handover:
    """Return a plan in the terms of its engine or trainer."""
    if plan.engine not in ENGINES:
        raise ValueError(f"engine is {plan.engine!r}; it must be one of {', '.join(ENGINES)}")
    return _HANDOVERS[plan.engine](plan, max_position)


def _vllm(plan: IterationPlan, max_position: int | None) -> Handover:
    words = ["--max-num-seqs", str(_slots(plan)), "--scheduling-policy", "priority"]
    words += _budget(plan, "--max-num-batched-tokens")
    words += _block(plan, "--block-size")
    words += [] if max_position is None else ["--max-model-len", str(max_position)]
    words += ["--no-enable-prefix-caching"] if plan.counted and plan.tree is None else []
    return Handover(
        "vllm",
        plan.ranks,
        ("vllm", "serve", "MODEL", *words),
        remarks=("A vLLM without --scheduling-policy priority takes the field and ignores it in silence.",),
    )


def _sglang(plan: IterationPlan, max_position: int | None) -> Handover:
    words = ["--max-running-requests", str(_slots(plan)), "--schedule-policy", "fcfs"]
    # Priorities are only an order: they must not preempt running requests.
    words += ["--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", str(2**31 - 1)]
    words += _budget(plan, "--chunked-prefill-size")
    words += _block(plan, "--page-size")
    words += [] if max_position is None else ["--context-length", str(max_position)]
    words += ["--disable-radix-cache"] if plan.counted and plan.tree is None else []
    most = max(len(share.requests) for share in plan.shares)
    return Handover(
        "sglang",
        most - plan.ranks,
        ("python", "-m", "sglang.launch_server", "--model-path", "MODEL", *words),
        remarks=("Other policies than fcfs and lof take priorities and ignore them.",),
    )


def _verl(plan: IterationPlan, max_position: int | None) -> Handover:
    rollout = "actor_rollout_ref.rollout"
    settings = {
        f"{rollout}.name": "vllm",
        f"{rollout}.max_num_seqs": str(_slots(plan)),
        f"+{rollout}.engine_kwargs.vllm.scheduling_policy": "priority",
    }
    cap = _budget(plan, f"{rollout}.max_num_batched_tokens")
    if cap:
        settings[cap[0]] = cap[1]
    return Handover(
        "verl",
        plan.ranks + 1,
        settings=settings,
        remarks=(
            "batchbound.integrations.verl.set_priorities puts the column into a batch, before"
            " generate_sequences fills it with the batch's own order.",
            "batchbound.integrations.verl.planned_load_balancer sends each prompt to its replica.",
        ),
    )


def _openrlhf(plan: IterationPlan, max_position: int | None) -> Handover:
    settings = {"vllm.num_engines": str(len(plan.shares))}
    remark = (
        "It serves the prompts of a batch in the order of its list, each with all its samples on one engine."
    )
    return Handover("openrlhf", None, settings=settings, remarks=(remark,))


def _trl(plan: IterationPlan, max_position: int | None) -> Handover:
    remark = (
        "It generates the prompts of a batch in the order of its list: dataset.select(order), with"
        " shuffle_dataset=False; or hand batchbound.Rollout to rollout_func."
    )
    return Handover("trl", None, settings={"shuffle_dataset": "False"}, remarks=(remark,))


_HANDOVERS = {"vllm": _vllm, "sglang": _sglang, "verl": _verl, "openrlhf": _openrlhf, "trl": _trl}


def _slots(plan: IterationPlan) -> int:
    return max(share.held_back or share.limits.sequences for share in plan.shares)


def _budget(plan: IterationPlan, option: str) -> list[str]:
    each = [share.limits.batched_tokens for share in plan.shares]
    return [option, str(min(each))] if plan.proven.batched_tokens == sum(each) else []


def _block(plan: IterationPlan, option: str) -> list[str]:
    size, proven = plan.shares[0].limits.block_tokens, plan.proven
    relied_on = proven.kv_tokens is not None and proven.block_tokens == size
    return [option, str(size)] if relied_on else []


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
