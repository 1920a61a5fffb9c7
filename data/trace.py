"""What an engine did: every stage it ran and every request it served, simulated or real."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .costs.cost import CostModel, FloatArray, IntArray
from .files.disk import InputError, atomic_write, read_text
from .files.json_fields import JsonFields

TRACE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """
    One prefill stage, or decode rounds in a row over the same slots.

    Parameters
    ----------
    kind
        ``"prefill"`` or ``"decode"``.
    start, end
        Seconds after the job's start.
    rounds
        Decode rounds in a row; 0 for a prefill stage.
    active
        Slots that were prefilled, or that decoded.
    tokens
        Tokens processed: of the prompts, or one per active slot and round.
    kv_tokens
        Tokens of keys and values held by the active slots, summed over the rounds.
    padded_kv_tokens
        The same, and what attention read in all these rounds that no row needed, averaged over the layers.
    """

    kind: str
    start: float
    end: float
    rounds: int
    active: int
    tokens: int
    kv_tokens: int
    padded_kv_tokens: int

    @property
    def seconds(self) -> float:
        """Seconds the stage took."""
        return self.end - self.start

    def model_seconds(self, cost: CostModel, *, overheads: bool = True) -> float:
        """
        Return the seconds a cost model gives the stage.

        Parameters
        ----------
        cost
            The model.
        overheads
            Whether to count what the engine adds: padding that attention read, and the change of the batch.
        """
        if self.kind == "prefill":
            return cost.prefill_seconds(self.tokens)
        seconds = self.rounds * cost.decode_seconds(self.active)
        if not overheads:
            return seconds + cost.decode_per_kv_token * self.kv_tokens
        return seconds + cost.decode_per_kv_token * self.padded_kv_tokens + cost.decode_per_change


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """
    Stage records and request records of one run.

    Parameters
    ----------
    ids
        The requests' names, in the workload's order.
    slots
        Slots of the engine.
    stages
        In the order they ran.
    stage_of, slot_of
        The prefill stage (index into ``stages``) and the slot of each request, shape (requests,);
        of its last prefill, if it was evicted in between.
    queued, prefilled, first_token, finished
        Seconds after the job's start at which each request arrived, began to be prefilled (first time), had
        its first token, and had its last, shape (requests,).
    tokens
        Tokens each answer has, shape (requests,).
    evictions
        Requests put back into the queue after they had been prefilled.
    engine
        What ran it: the engine's name, and what it says about model, device and versions.
    readings
        Of the machine's speed just before and after: the seconds that a fixed piece of work took
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
        """Return the trace of an engine that had nothing to do."""
        columns: dict[str, npt.NDArray[Any]] = {
            name: np.array([], dtype=dtype) for name, dtype in _REQUEST_COLUMNS.items()
        }
        return cls(ids=(), slots=slots, stages=(), evictions=0, engine={}, **columns)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def makespan(self) -> float:
        """Seconds from the job's start to the end of its last stage."""
        return self.stages[-1].end if self.stages else 0.0

    @property
    def prefill_stages(self) -> int:
        """Number of prefill stages."""
        return sum(stage.kind == "prefill" for stage in self.stages)

    @property
    def decode_rounds(self) -> int:
        """Number of decode rounds."""
        return sum(stage.rounds for stage in self.stages)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON lines: a header, then one line per stage, then one per request."""
        header = {
            "batchbound_trace": TRACE_VERSION,
            "slots": self.slots,
            "evictions": self.evictions,
            "engine": dict(self.engine),
            "stages": len(self.stages),
            "requests": len(self),
            "readings": self.readings.tolist(),
        }
        with atomic_write(path) as stream:
            stream.write(json.dumps(header) + "\n")
            for stage in self.stages:
                stream.write(json.dumps(asdict(stage)) + "\n")
            columns = {name: getattr(self, name).tolist() for name in _REQUEST_COLUMNS}
            for row, name in enumerate(self.ids):
                record = {"id": name} | {column: values[row] for column, values in columns.items()}
                stream.write(json.dumps(record) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """
        Return the trace that :meth:`save` wrote.

        Raises
        ------
        InputError
            If the file is not a whole trace of this version.
        """
        rows: list[dict[str, object]] = []
        for number, line in enumerate(read_text(path).rstrip("\n").split("\n"), 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                place = f"line {number}"
                raise InputError(
                    f"not valid JSON ({error.msg})", file=path, where=place, hint="Run again."
                ) from None
            rows.append(row)
        header = rows[0] if rows else {}
        if not isinstance(header, dict) or header.get("batchbound_trace") != TRACE_VERSION:
            hint = "Give the trace.jsonl that `batchbound run` wrote."
            if isinstance(header, dict) and "batchbound_server_run" in header:
                hint = "It is of a server: `batchbound audit` reads it."
            raise InputError(f"not a batchbound trace of version {TRACE_VERSION}", file=path, hint=hint)
        try:
            read = JsonFields(header, path, hint="Run again.", line=1)
            count, slots = read.at_least(0, "stages"), read.at_least(1, "slots")
            stages = tuple(_stage(row, path, line) for line, row in enumerate(rows[1 : 1 + count], 2))
            requests = rows[1 + count :]
            if len(stages) != count or len(requests) != header["requests"]:
                raise InputError(
                    "the file ends before the trace does", file=path, hint="Run again, or copy it whole."
                )
            columns: dict[str, npt.NDArray[Any]] = {
                name: np.array([row[name] for row in requests], dtype=dtype)
                for name, dtype in _REQUEST_COLUMNS.items()
            }
            if not np.isfinite(columns["queued"]).all():
                raise ValueError("a request's queued is not a number of seconds")
            for name, most in (("stage_of", count), ("slot_of", slots)):
                if ((columns[name] < -1) | (columns[name] >= most)).any():
                    raise ValueError(f"a request's {name} is out of range")
            readings = np.array(header.get("readings", []), dtype=np.float64)
            if readings.ndim != 1 or not (np.isfinite(readings) & (readings > 0)).all():
                raise ValueError("a reading of the machine's speed is not a number of seconds")
            return cls(
                ids=tuple(str(row["id"]) for row in requests),
                slots=slots,
                stages=stages,
                evictions=read.at_least(0, "evictions"),
                engine=read.mapping("engine"),
                readings=readings,
                **columns,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"not a whole trace ({error})", file=path, hint="Run again.") from None


_REQUEST_COLUMNS: dict[str, type] = {
    "stage_of": np.int64,
    "slot_of": np.int64,
    "queued": np.float64,
    "prefilled": np.float64,
    "first_token": np.float64,
    "finished": np.float64,
    "tokens": np.int64,
}


def _stage(value: object, file: str | os.PathLike[str], line: int) -> Stage:
    read = JsonFields(value, file, hint="Run again.", line=line)
    kind = read.text("kind")
    if kind not in ("prefill", "decode"):
        raise read.error("kind", f"{kind!r} is neither prefill nor decode")
    return Stage(
        kind=kind,
        start=read.number("start"),
        end=read.number("end"),
        rounds=read.at_least(int(kind == "decode"), "rounds"),
        **{name: read.at_least(0, name) for name in ("active", "tokens", "kv_tokens", "padded_kv_tokens")},
    )
