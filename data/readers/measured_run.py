"""Published measured runs of serving engines."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import FloatArray
from ..costs.cost import LONGEST_TIME
from ..files.disk import InputError, read_json_object
from ..files.jsonl import json_lines
from ..files.record import Positive, record
from ..workload import LONGEST, Workload

_HINT = "Correct the value, or leave it out."


@dataclass(frozen=True, slots=True)
class _Request:
    input_toks: Positive
    output_toks: Positive
    queued_ts: float
    first_token_ts: float
    last_token_ts: float
    request_id: Any = None

    def __post_init__(self) -> None:
        moments = (self.queued_ts, self.first_token_ts, self.last_token_ts)
        if not all(abs(moment) <= LONGEST_TIME for moment in moments):
            raise ValueError("a time is not a number of seconds")
        if max(self.input_toks, self.output_toks) > LONGEST:
            raise ValueError(f"more tokens than any model takes ({LONGEST})")


@dataclass(frozen=True, slots=True)
class _Engine:
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    tensor_parallel_size: Positive | None = None
    data_parallel_size: Positive | None = None
    enable_expert_parallel: bool | None = None
    pipeline_parallel_size: Any = None
    speculative_config: Any = None
    decode_context_parallel_size: Any = None


@dataclass(frozen=True, slots=True)
class _Memory:
    num_kv_tokens: Positive | None = None
    block_size: Positive | None = None
    enable_prefix_caching: bool | None = None


@dataclass(frozen=True, slots=True)
class _Compilation:
    cudagraph_capture_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Scheduler:
    async_scheduling: bool | None = None


@dataclass(frozen=True, slots=True)
class _Resolved:
    scheduler_config: _Scheduler | None = None
    compilation_config: _Compilation | None = None


@dataclass(frozen=True, slots=True)
class _Hardware:
    device_name: str | None = None


@dataclass(frozen=True, slots=True)
class _Meta:
    model: Any = "unknown"
    engine_kwargs: _Engine = field(default_factory=_Engine)
    kv_cache: _Memory = field(default_factory=_Memory)
    hardware: _Hardware | None = None
    resolved_config: _Resolved = field(default_factory=_Resolved)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """One run of a serving engine.

    workload: Requests with actual completion lengths; arrivals in seconds after the first.
    first_token, finished: Seconds after the first arrival of each request's first and last token, shape
    (requests,).
    sequences, batched_tokens: Most requests in progress, and most tokens of an iteration.
    kv_capacity: Measured tokens of KV cache; None if unknown.
    block_tokens: Tokens of a KV block.
    graph_tokens: Numbers of tokens with captured graphs; others up to the largest are rounded up.
    ahead: True if the engine schedules an iteration while the previous one runs.
    reuse: True if the content of freed blocks can be reused.
    tensor_parallel, data_parallel: Devices that share a layer, and replicas of the whole model.
    expert_parallel: True if whole experts are distributed over the devices.
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
    """Read a measured vLLM run in LLMServingSim's format.

    Fields missing in ``meta.json`` take the defaults of vLLM 0.19.
    """
    folder = Path(folder)
    path = folder / "meta.json"
    meta = record(_Meta, read_json_object(path), file=path, hint=_HINT)
    engine, memory, resolved = meta.engine_kwargs, meta.kv_cache, meta.resolved_config
    _refuse_unsimulated(engine, path)
    rows = _requests(folder / "requests.jsonl")
    queued, first, last = np.array([(row.queued_ts, row.first_token_ts, row.last_token_ts) for row in rows]).T
    workload = Workload(
        ids=np.array(
            [str(row.request_id or f"request-{at}") for at, row in enumerate(rows)], dtype=np.object_
        ),
        input_tokens=np.array([row.input_toks for row in rows]),
        output_tokens=np.array([row.output_toks for row in rows]),
        arrival=queued - queued.min(),
    )
    sequences, room, block = engine.max_num_seqs or 256, memory.num_kv_tokens, memory.block_size or 16
    if room is not None and room < block:
        what = f"{room} tokens make no block of {block}"
        raise InputError(what, file=path, where="field 'kv_cache'", hint=_HINT)
    batched = engine.max_num_batched_tokens or 2048
    if batched < sequences:
        where = "field 'engine_kwargs.max_num_batched_tokens'"
        what = f"{batched} tokens an iteration are fewer than {sequences} sequences (max_num_seqs)"
        raise InputError(what, file=path, where=where, hint=_HINT)
    if room is not None:
        for name, row in zip(workload.ids, rows, strict=True):
            needed = row.input_toks + row.output_toks - 1
            if needed > room // block * block:
                what = f"{needed} tokens of KV cache do not fit into {room // block} blocks of {block}"
                hint = "Correct the request, or 'kv_cache' in meta.json."
                where = f"request {str(name)!r}"
                raise InputError(what, file=folder / "requests.jsonl", where=where, hint=hint)
    captured = (resolved.compilation_config or _Compilation()).cudagraph_capture_sizes
    return MeasuredRun(
        workload=workload,
        first_token=first - queued.min(),
        finished=last - queued.min(),
        sequences=sequences,
        batched_tokens=batched,
        kv_capacity=room,
        block_tokens=block,
        graph_tokens=default_graph_tokens(sequences) if captured is None else captured,
        ahead=(resolved.scheduler_config or _Scheduler()).async_scheduling is not False,
        reuse=memory.enable_prefix_caching is not False,
        model=str(meta.model),
        device=(meta.hardware or _Hardware()).device_name or folder.name.partition("-")[0],
        tensor_parallel=engine.tensor_parallel_size or 1,
        data_parallel=engine.data_parallel_size or 1,
        expert_parallel=engine.enable_expert_parallel or False,
    )


def _refuse_unsimulated(engine: _Engine, path: Path) -> None:
    for name, usual in (
        ("pipeline_parallel_size", 1),
        ("speculative_config", None),
        ("decode_context_parallel_size", 1),
    ):
        value = getattr(engine, name)
        if value not in (usual, None):
            hint, where = "Give a run without it.", f"field 'engine_kwargs.{name}'"
            raise InputError(f"{value!r} is not simulated", file=path, where=where, hint=hint)


def default_graph_tokens(sequences: int) -> tuple[int, ...]:
    """Return vLLM's default numbers of tokens with captured graphs."""
    largest = min(2 * sequences, 512)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return tuple(size for size in sizes if size <= largest)


def _requests(path: Path) -> list[_Request]:
    names = [entry.name for entry in fields(_Request)[:-1]]
    hint = f"Each line is a request with the fields {', '.join(names)}."
    return [record(_Request, row, file=path, line=line, hint=hint) for line, row in json_lines(path)]
