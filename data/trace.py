"""Trace of a simulated or real engine: stages and requests."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from .arrays import FloatArray, IntArray
from .costs.cost import LONGEST_TIME, CostModel
from .files.disk import InputError, atomic_write, parsed_json, read_text, text_lines
from .files.kinds import refuse_other_kinds
from .files.record import Count, Positive, plain, record
from .workload import LONGEST

StageKind = Literal["prefill", "decode"]
Moment = Annotated[float, msgspec.Meta(ge=-LONGEST_TIME, le=LONGEST_TIME)]
"""Seconds after the job's start, as valid in a file."""

DISTINCT = "distinct_tokens"
"""Key of the prompt tokens among a trace's engine facts, with shared beginnings counted once."""

PLANNED = "plan"
"""Key of the plan's digest among a trace's engine facts."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One prefill stage, or decode steps over the same slots.

    kind: ``"prefill"`` or ``"decode"``.
    start, end: Seconds after the job's start.
    decode_steps: Number of decode steps; 0 for a prefill stage.
    active: Number of slots that were prefilled or decoded.
    tokens: Prompt tokens, or one per active slot and decode step.
    kv_tokens: KV tokens of the active slots, summed over the decode steps.
    padded_kv_tokens: ``kv_tokens`` with the padding that attention read, averaged over the layers.
    """

    kind: StageKind
    start: Moment
    end: Moment
    decode_steps: Count
    active: Count
    tokens: Count
    kv_tokens: Count
    padded_kv_tokens: Count

    def __post_init__(self) -> None:
        if self.decode_steps == 0 and self.kind == "decode":
            raise ValueError("a decode stage has no decode steps")
        if self.end < self.start:
            raise ValueError("a stage ends before it begins")

    @property
    def seconds(self) -> float:
        """Seconds of the stage."""
        return self.end - self.start

    def model_seconds(self, cost: CostModel, *, overheads: bool = True) -> float:
        """Return the seconds of the stage by a cost model."""
        if self.kind == "prefill":
            # A stage without tokens continues evicted requests from their KV cache.
            return cost.prefill_seconds(self.tokens) if self.tokens else 0.0
        seconds = self.decode_steps * cost.decode_seconds(self.active)
        if not overheads:
            return seconds + cost.decode_per_kv_token * self.kv_tokens
        return seconds + cost.decode_per_kv_token * self.padded_kv_tokens + cost.decode_per_change


@dataclass(frozen=True, slots=True, eq=False)
class TraceHeader:
    """First line of a trace file.

    slots, evictions, engine, readings: Fields of :class:`Trace`.
    stages, requests: Numbers of lines that follow.
    """

    JSON_HEADER: ClassVar = ("batchbound_trace", 2)
    JSON_HINT: ClassVar = "Give the trace.jsonl that `batchbound run` wrote, or run again."

    slots: Positive
    stages: Count
    requests: Count
    evictions: Count
    engine: Mapping[str, object]
    readings: FloatArray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if self.readings.ndim != 1 or not (np.isfinite(self.readings) & (self.readings > 0)).all():
            raise ValueError("a reading of the machine's speed is not a number of seconds")


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Line of a request in a trace file.

    Its fields are entries of :class:`Trace`; -1 and None mean that the event has not happened.
    """

    id: str
    stage_of: Annotated[int, msgspec.Meta(ge=-1)]
    slot_of: Annotated[int, msgspec.Meta(ge=-1)]
    queued: Moment
    prefilled: Moment | None
    first_token: Moment | None
    finished: Moment | None
    tokens: Count


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Records of the stages and requests of one run.

    Parameters
    ----------
    ids
        Names of the requests, in the workload's order.
    slots
        Slots of the engine.
    stages
        Stages in order.
    stage_of, slot_of
        Prefill stage (index into ``stages``) and slot of each request, shape (requests,); of the last prefill
        after an eviction.
    queued, prefilled, first_token, finished
        Seconds after the job's start at which each request arrived, began to be prefilled (first time), had
        its first token, and had its last, shape (requests,).
    tokens
        Tokens of each completion, shape (requests,).
    evictions
        Number of times that a request returned to the queue after its prefill.
    engine
        Name of the engine, and its model, device and versions.
    readings
        Machine speed just before and after, as seconds of a fixed piece of work
        (:mod:`~batchbound.data.costs.reference_time`), shape (readings,).
    """

    ids: tuple[str, ...]
    slots: int
    stages: tuple[Stage, ...]
    stage_of: IntArray
    slot_of: IntArray
    queued: FloatArray
    prefilled: FloatArray
    first_token: FloatArray
    finished: FloatArray
    tokens: IntArray
    evictions: int = 0
    engine: Mapping[str, object] = field(default_factory=dict)
    readings: FloatArray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def empty(cls, slots: int) -> Trace:
        """Return the trace of an engine without work."""
        columns: dict[str, npt.NDArray[Any]] = {
            name: np.array([], dtype=dtype) for name, dtype in _REQUEST_COLUMNS.items()
        }
        return cls(ids=(), slots=slots, stages=(), evictions=0, engine={}, **columns)

    @classmethod
    def joined(cls, parts: Sequence[Trace], order: Sequence[int]) -> Trace:
        """Join consecutive parts; ``order`` sorts their requests."""
        stages: list[Stage] = []
        columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _REQUEST_COLUMNS}
        start = 0.0
        for part in parts:
            for name, values in columns.items():
                shift = {"stage_of": len(stages), "slot_of": 0, "tokens": 0}.get(name, start)
                values.append(getattr(part, name) + shift)
            stages += [
                replace(stage, start=stage.start + start, end=stage.end + start) for stage in part.stages
            ]
            start += part.makespan
        ids = [name for part in parts for name in part.ids]
        engine = dict(parts[-1].engine)
        if all(part.distinct_tokens is not None for part in parts):
            engine[DISTINCT] = sum(part.distinct_tokens or 0 for part in parts)
        sorted_columns: dict[str, npt.NDArray[Any]] = {
            name: np.concatenate(values)[list(order)] for name, values in columns.items()
        }
        return cls(
            ids=tuple(ids[i] for i in order),
            slots=parts[0].slots,
            stages=tuple(stages),
            evictions=sum(part.evictions for part in parts),
            engine=engine,
            readings=np.concatenate([part.readings for part in parts]),
            **sorted_columns,
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def distinct_tokens(self) -> int | None:
        """Prompt tokens, with beginnings that the engine shares counted once; None if it shares none."""
        tokens = self.engine.get(DISTINCT)
        return tokens if isinstance(tokens, int) else None

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that stages computed."""
        return sum(stage.tokens for stage in self.stages if stage.kind == "prefill")

    @property
    def makespan(self) -> float:
        """Seconds from the job's start to the end of its last stage."""
        return self.stages[-1].end if self.stages else 0.0

    @property
    def prefill_stages(self) -> int:
        """Number of prefill stages."""
        return sum(stage.kind == "prefill" for stage in self.stages)

    @property
    def decode_steps(self) -> int:
        """Number of decode steps."""
        return sum(stage.decode_steps for stage in self.stages)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON lines: header, stages, requests."""
        header = TraceHeader(
            self.slots, len(self.stages), len(self), self.evictions, self.engine, self.readings
        )
        columns = [
            [None if value != value else value for value in getattr(self, column.name).tolist()]
            for column in fields(ServedRequest)[1:]
        ]
        requests = (ServedRequest(*row) for row in zip(self.ids, *columns, strict=True))
        with atomic_write(path) as stream:
            for line in (header, *self.stages, *requests):
                stream.write(json.dumps(plain(line), allow_nan=False) + "\n")

    @staticmethod
    def header(path: str | os.PathLike[str]) -> TraceHeader:
        """Return the first line of the file that :meth:`save` wrote."""
        first = next(iter(text_lines(path)), "")
        return record(
            TraceHeader, parsed_json(first, path, line=1, hint=TraceHeader.JSON_HINT), file=path, line=1
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Return the trace that :meth:`save` wrote.

        Raises
        ------
        InputError
            If the file is not a whole trace of this version.
        """
        hint = TraceHeader.JSON_HINT
        lines = read_text(path).rstrip("\n").split("\n")
        rows = [parsed_json(text, path, line=number, hint=hint) for number, text in enumerate(lines, 1)]
        if isinstance(rows[0], dict) and "batchbound_server_run" in rows[0]:
            refuse_other_kinds(path, "not of a plan")
        header = record(TraceHeader, rows[0], file=path, line=1)
        count = header.stages
        expected = 1 + count + header.requests
        if len(rows) != expected:
            what = f"{len(rows)} lines, and its header tells of {expected}"
            raise InputError(what, file=path, hint="Run again, or copy it whole.")
        stages = [
            record(Stage, row, file=path, line=line, hint=hint)
            for line, row in enumerate(rows[1 : 1 + count], 2)
        ]
        requests = [
            record(ServedRequest, row, file=path, line=line, hint=hint)
            for line, row in enumerate(rows[1 + count :], 2 + count)
        ]
        for line, request in enumerate(requests, 2 + count):
            for name, limit in (("stage_of", count), ("slot_of", header.slots)):
                value, where = getattr(request, name), f"line {line}, field '{name}'"
                if value >= limit:
                    raise InputError(f"{value} is not below {limit}", file=path, where=where, hint=hint)
            if request.finished is not None and not 1 <= request.tokens <= LONGEST:
                what = f"{request.tokens} tokens of a request that finished"
                raise InputError(what, file=path, where=f"line {line}, field 'tokens'", hint=hint)
        columns: dict[str, npt.NDArray[Any]] = {
            name: np.array([getattr(request, name) for request in requests], dtype=dtype)
            for name, dtype in _REQUEST_COLUMNS.items()
        }
        return cls(
            ids=tuple(request.id for request in requests),
            slots=header.slots,
            stages=tuple(stages),
            evictions=header.evictions,
            engine=header.engine,
            readings=header.readings,
            **columns,
        )


def add_fact(path: str | os.PathLike[str], name: str, fact: object) -> None:
    """Add a fact about the engine to a written trace."""
    with open(path, encoding="utf-8") as source, atomic_write(path) as stream:
        header = json.loads(source.readline())
        header["engine"][name] = fact
        stream.write(json.dumps(header, allow_nan=False) + "\n")
        shutil.copyfileobj(source, stream)


_REQUEST_COLUMNS: dict[str, type] = {
    "stage_of": np.int64,
    "slot_of": np.int64,
    "queued": np.float64,
    "prefilled": np.float64,
    "first_token": np.float64,
    "finished": np.float64,
    "tokens": np.int64,
}
