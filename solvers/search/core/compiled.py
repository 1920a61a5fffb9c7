"""Compiled library: its structures, and calls that Ctrl-C ends."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....data.arrays import IntArray
from .parameters import EventParameters, ExactParameters, RuinParameters, SpanParameters

Int32Array = npt.NDArray[np.int32]
INTS = ctypes.POINTER(ctypes.c_int32)
MOST = 2**29 - 1
"""Largest number of steps or tokens for the library."""

VERSION = 2
"""Version of the library's functions, as ``core.cpp`` returns it."""

POLL_SECONDS = 0.1
"""Seconds between looks for Ctrl-C."""


class Job(ctypes.Structure):
    """``core::Job`` in ``common.hpp``."""

    _fields_ = (
        ("requests", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("kv_capacity", ctypes.c_int64),
        ("token_cap", ctypes.c_int64),
        *((name, INTS) for name in ("steps", "tokens", "held")),
        *(
            (name, ctypes.c_double)
            for name in ("stage_base", "stage_floor", "per_token", "bend", "per_token_beyond", "step")
        ),
    )


class Plan(ctypes.Structure):
    """``core::Plan`` in ``common.hpp``."""

    _fields_ = (("start", INTS), ("stage", INTS), ("slot", INTS))


class LimitsStructure(ctypes.Structure):
    """``core::Limits`` in ``common.hpp``."""

    _fields_ = (
        ("seconds", ctypes.c_double),
        ("enough", ctypes.c_double),
        ("moves", ctypes.c_int64),
        ("stop", INTS),
        ("cpu_seconds", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


Parameters = SpanParameters | EventParameters | RuinParameters


@functools.cache
def compiled_core() -> ctypes.CDLL | None:
    """Return the compiled library, or None if it was not built.

    ``BATCHBOUND_CORE`` names another build, such as one with sanitizers.
    """
    beside = [Path(__file__).with_name(f"_core{suffix}") for suffix in EXTENSION_SUFFIXES]
    library = os.environ.get("BATCHBOUND_CORE")
    for path in [Path(library)] if library else beside:
        if path.exists():
            return _checked(ctypes.CDLL(str(path.resolve())))
    return None


def _checked(core: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library with typed functions, if its sources are these."""
    doubles = ctypes.sizeof(ctypes.c_double)
    expected = [ctypes.sizeof(structure) for structure in (Job, Plan, LimitsStructure)]
    kinds = (SpanParameters, EventParameters, RuinParameters, ExactParameters)
    expected += [doubles * len(fields(kind)) for kind in kinds]
    expected[-1] += doubles  # the tolerance
    same = hasattr(core, "core_version") and core.core_version() == VERSION
    if not same or [core.core_bytes(k) for k in range(len(expected))] != expected:
        raise RuntimeError("the compiled search is of another version: install batchbound again")
    job = [ctypes.POINTER(Job), ctypes.c_void_p, ctypes.POINTER(LimitsStructure)]
    outcome = [ctypes.POINTER(Plan), ctypes.POINTER(ctypes.c_int64)]
    by_walk = [*job, ctypes.c_uint64, ctypes.c_int32, *outcome]
    exhaustive = [*job, ctypes.c_double, *outcome, INTS]
    takes = dict.fromkeys(("core_spans", "core_events", "core_ruin_recreate"), by_walk)
    takes |= dict.fromkeys(("core_stage_states", "core_end_orders"), exhaustive)
    for name, kinds_taken in takes.items():
        function = getattr(core, name)
        function.restype, function.argtypes = ctypes.c_double, kinds_taken
    return core


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits of one search, and the seed of its moves."""

    seconds: float = math.inf
    moves: int | None = None
    enough: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Best plan of a search: first step, stage and slot, or replica, of each request.

    The cost is infinite if there is none.
    """

    start: Int32Array
    stage: Int32Array
    slot: Int32Array
    cost: float
    moves: int
    interrupted: bool
    ended: int = 0
    """Exact search: 0 for a proof, 1 at a limit, 2 without memory."""


def pointer(column: Int32Array) -> Any:
    """Return a column's address for C."""
    return column.ctypes.data_as(INTS)


def call(
    name: str, job: Job, parameters: Parameters, allowance: Allowance, plan: Sequence[IntArray], end: int
) -> Found:
    """Run a search from a plan.

    The plan is first step, stage and slot of each request, and the last step. The makespan that ends it
    is in decode steps, without the part that all schedules share. An interrupt ends the search, and the
    caller raises it again.
    """
    core = compiled_core()
    assert core is not None, "phases apply only where there is a library"
    start, stage, slot = (np.array(column, dtype=np.int32) for column in plan)
    values = astuple(parameters)
    stop, moves = ctypes.c_int32(0), ctypes.c_int64(0)
    limits = _limits(allowance, stop)
    arguments = (
        ctypes.byref(job),
        (ctypes.c_double * len(values))(*values),
        ctypes.byref(limits),
        allowance.seed,
        end,
        ctypes.byref(Plan(pointer(start), pointer(stage), pointer(slot))),
        ctypes.byref(moves),
    )
    costs: list[float] = []
    interrupted = _interruptible(lambda: costs.append(getattr(core, name)(*arguments)), stop)
    return Found(start, stage, slot, costs[0], moves.value, interrupted)


def call_exact(
    name: str, job: Job, parameters: ExactParameters, allowance: Allowance, best: float, tolerance: float
) -> Found:
    """Run an exact search for a makespan below ``best`` seconds.

    Both exclude the part that all schedules share. Less than ``tolerance`` makes no difference.
    """
    core = compiled_core()
    assert core is not None, "problems are solved exactly only where there is a library"
    start, stage = (np.zeros(job.requests, dtype=np.int32) for _ in range(2))
    values = (tolerance, *astuple(parameters))
    stop, moves, ended = ctypes.c_int32(0), ctypes.c_int64(0), ctypes.c_int32(0)
    limits = _limits(allowance, stop)
    arguments = (
        ctypes.byref(job),
        (ctypes.c_double * len(values))(*values),
        ctypes.byref(limits),
        best,
        ctypes.byref(Plan(pointer(start), pointer(stage), None)),
        ctypes.byref(moves),
        ctypes.byref(ended),
    )
    costs: list[float] = []
    interrupted = _interruptible(lambda: costs.append(getattr(core, name)(*arguments)), stop)
    return Found(start, stage, stage, costs[0], moves.value, interrupted, ended.value)


def _limits(allowance: Allowance, stop: ctypes.c_int32) -> LimitsStructure:
    """Return limits for C, with a flag that ends a search."""
    # Benchmarks make limits count CPU seconds by putting one clock in the place of the other.
    cpu = int(time.perf_counter is time.process_time)
    moves = allowance.moves or 0
    return LimitsStructure(allowance.seconds, allowance.enough, moves, ctypes.pointer(stop), cpu, 0)


def _interruptible(search: Callable[[], None], stop: ctypes.c_int32) -> bool:
    """Run a search; return whether Ctrl-C ended it.

    Python sees a signal only outside of C.
    """
    if threading.current_thread() is not threading.main_thread():
        search()
        return False
    ended, interrupted = threading.Event(), False

    def run() -> None:
        try:
            search()
        finally:
            ended.set()

    threading.Thread(target=run, name="batchbound search", daemon=True).start()
    while True:
        try:
            while not ended.wait(POLL_SECONDS):
                pass
            return interrupted
        except KeyboardInterrupt:
            interrupted, stop.value = True, 1
