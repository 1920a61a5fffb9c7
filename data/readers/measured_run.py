"""Runs of serving engines that others measured: what was asked, and when each completion came."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..costs.cost import FloatArray
from ..files.disk import InputError, read_json_object
from ..files.json_fields import JsonFields
from ..files.jsonl import json_lines
from ..workload import Workload

_LENGTHS = ("input_toks", "output_toks")
_GRAPHS = "cudagraph_capture_sizes"
_FIELDS = (*_LENGTHS, "queued_ts", "first_token_ts", "last_token_ts")


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """
    One run of a serving engine.

    Parameters
    ----------
    workload
        The requests with the lengths their completions had; arrivals in seconds after the first.
    first_token, finished
        Seconds after the first arrival at which each request had its first and its last token,
        shape (requests,).
    sequences, batched_tokens
        Most requests under way, and most tokens of an iteration.
    kv_capacity
        Tokens of keys and values, measured; None if the run does not say.
    block_tokens
        Tokens of a block of them.
    graph_tokens
        Numbers of tokens for which the engine captured graphs; others up to the largest are rounded up.
    ahead
        Whether the engine schedules an iteration while the one before it runs.
    reuse
        Whether the content of freed blocks can be taken up again.
    model, device
        What ran.
    tensor_parallel, data_parallel
        Devices that share a layer, and replicas of the whole model.
    expert_parallel
        Whether the devices share out whole experts.
    """

    workload: Workload
    first_token: FloatArray
    finished: FloatArray
    sequences: int
    batched_tokens: int
    kv_capacity: int | None
    block_tokens: int
    graph_tokens: tuple[int, ...]
    ahead: bool
    reuse: bool
    model: str
    device: str
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last token."""
        return float(self.finished.max())


def read_vllm_run(folder: str | os.PathLike[str]) -> MeasuredRun:
    """
    Return a measured vLLM run in LLMServingSim's format.

    What its ``meta.json`` leaves out is taken as vLLM 0.19 has it by default.

    Parameters
    ----------
    folder
        Holds ``meta.json`` and ``requests.jsonl``; its name begins with the device's.

    Raises
    ------
    InputError
        If a file is missing, a request lacks a field, or the engine did what is not simulated: pipeline
        stages on several devices, speculative decoding.
    """
    folder = Path(folder)
    meta = read_json_object(folder / "meta.json")
    read = JsonFields(meta, folder / "meta.json", hint="Correct the value, or leave it out.")
    resolved, memory = _object(meta, "resolved_config"), _object(meta, "kv_cache")
    rows = _requests(folder / "requests.jsonl")
    column = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in _FIELDS}
    start = float(column["queued_ts"].min())
    workload = Workload(
        ids=np.array([str(row.get("request_id", f"request-{at}")) for at, row in enumerate(rows)]),
        input_tokens=column["input_toks"].astype(np.int64),
        output_tokens=column["output_toks"].astype(np.int64),
        arrival=column["queued_ts"] - start,
    )
    engine = _object(meta, "engine_kwargs")
    _refuse_unsimulated(engine, read)
    most = _count(read, "engine_kwargs", "max_num_seqs") or 256
    scheduler = _object(resolved, "scheduler_config")
    captured = JsonFields(
        resolved.get("compilation_config"), read.file, "resolved_config.compilation_config", read.hint
    )
    room, block = _count(read, "kv_cache", "num_kv_tokens"), _count(read, "kv_cache", "block_size") or 16
    if room is not None and room < block:
        what = f"{room} tokens make no block of {block}"
        raise InputError(what, file=read.file, where="field 'kv_cache'", hint=read.hint)
    return MeasuredRun(
        workload=workload,
        first_token=column["first_token_ts"] - start,
        finished=column["last_token_ts"] - start,
        sequences=most,
        batched_tokens=_count(read, "engine_kwargs", "max_num_batched_tokens") or 2048,
        kv_capacity=room,
        block_tokens=block,
        graph_tokens=default_graph_tokens(most)
        if captured.get(_GRAPHS) is None
        else captured.integers(_GRAPHS),
        ahead=bool(scheduler.get("async_scheduling", True)),
        reuse=bool(memory.get("enable_prefix_caching", True)),
        model=str(meta.get("model", "unknown")),
        device=folder.name.partition("-")[0],
        tensor_parallel=_count(read, "engine_kwargs", "tensor_parallel_size") or 1,
        data_parallel=_count(read, "engine_kwargs", "data_parallel_size") or 1,
        expert_parallel=bool(engine.get("enable_expert_parallel", False)),
    )


def _refuse_unsimulated(engine: Mapping[str, object], read: JsonFields) -> None:
    for name, usual in (
        ("pipeline_parallel_size", 1),
        ("speculative_config", None),
        ("decode_context_parallel_size", 1),
    ):
        value = engine.get(name, usual)
        if value not in (usual, None):
            hint = "Give a run without it."
            where = f"field 'engine_kwargs.{name}'"
            raise InputError(f"{value!r} is not simulated", file=read.file, where=where, hint=hint)


def default_graph_tokens(sequences: int) -> tuple[int, ...]:
    """Return the numbers of tokens vLLM captures graphs for by default, with so many sequences at most."""
    most = min(2 * sequences, 512)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return tuple(size for size in sizes if size <= most)


def _requests(path: Path) -> list[dict[str, object]]:
    hint = f"Each line is a request with the fields {', '.join(_FIELDS)}."
    rows = []
    for line, row in json_lines(path):
        read = JsonFields(row, path, hint=hint, line=line)
        for name in _FIELDS:
            read.number(name)
        for name in _LENGTHS:
            read.at_least(1, name)
        rows.append(row)
    return rows


def _object(value: Mapping[str, object], name: str) -> Mapping[str, object]:
    entry = value.get(name)
    return entry if isinstance(entry, dict) else {}


def _count(meta: JsonFields, within: str, name: str) -> int | None:
    """Return a whole number of at least one in an object of the meta data, or None if it is not there."""
    if not isinstance(meta.get(within), dict) or meta.inside(within).get(name) is None:
        return None
    return meta.inside(within).at_least(1, name)
