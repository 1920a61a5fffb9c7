"""Chrome trace events of a run, for Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

import numpy as np

from ...data.files.disk import atomic_write
from ...data.trace import Trace

Event = dict[str, object]


def save_perfetto(path: str | os.PathLike[str], traces: Sequence[Trace]) -> None:
    """Write runs as one Chrome trace file, atomically."""
    with atomic_write(path) as stream:
        stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for replica, trace in enumerate(traces):
            for event in chrome_events(trace, replica=replica):
                stream.write(separator + json.dumps(event))
                separator = ",\n"
        stream.write("\n]}\n")


def chrome_events(trace: Trace, *, replica: int = 0) -> list[Event]:
    """Return a run's Chrome trace events, in microseconds.

    There is a process per replica and a thread per slot. A request is a slice in the thread of its slot. It
    spans the start of its (last) prefill stage to its last token, with the prefill nested in it. The stages
    have a thread of their own after the slots, and two counters show the active slots and the KV cache held.
    """
    engine = trace.slots
    events = [_meta("process_name", replica, 0, {"name": f"replica {replica}"})]
    for thread in (*np.unique(trace.slot_of[trace.slot_of >= 0]).tolist(), engine):
        name = "stages" if thread == engine else f"slot {thread}"
        events.append(_meta("thread_name", replica, thread, {"name": name}))
        events.append(_meta("thread_sort_index", replica, thread, {"sort_index": thread}))
    for number, stage in enumerate(trace.stages):
        arguments = {
            "stage": number,
            "decode_steps": stage.decode_steps,
            "active": stage.active,
            "tokens": stage.tokens,
            "kv_tokens": stage.kv_tokens,
            "padded_kv_tokens": stage.padded_kv_tokens,
        }
        name = stage.kind if stage.kind == "prefill" else f"{stage.decode_steps} x decode"
        events.append(_slice(name, "stage", replica, engine, stage.start, stage.end, arguments))
        if stage.kind == "decode":
            kv_tokens = stage.kv_tokens / stage.decode_steps
            events.append(_counter("active slots", replica, stage.start, stage.active))
            events.append(_counter("KV tokens held", replica, stage.start, round(kv_tokens)))
    for row in np.flatnonzero(np.isfinite(trace.finished)).tolist():
        stage = trace.stages[trace.stage_of[row]]
        slot, end = int(trace.slot_of[row]), float(trace.finished[row])
        facts = {"queued_s": float(trace.queued[row]), "tokens": int(trace.tokens[row])}
        events.append(_slice(trace.ids[row], "request", replica, slot, stage.start, end, facts))
        events.append(_slice("prefill", "prefill", replica, slot, stage.start, stage.end, {}))
    return events


def _slice(
    name: str, category: str, pid: int, tid: int, start: float, end: float, arguments: Mapping[str, object]
) -> Event:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": round(start * 1e6, 3),
        "dur": round((end - start) * 1e6, 3),
        "pid": pid,
        "tid": tid,
        "args": dict(arguments),
    }


def _counter(name: str, pid: int, time: float, value: int) -> Event:
    return {"name": name, "ph": "C", "ts": round(time * 1e6, 3), "pid": pid, "tid": 0, "args": {name: value}}


def _meta(name: str, pid: int, tid: int, arguments: Mapping[str, object]) -> Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": dict(arguments)}
