"""Kinds of batchbound's own files, for error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from .errors import InputError
from .sources import first_bytes, is_url, refuse_streams

KINDS = {
    "batchbound_plan": "a plan",
    "batchbound_steps_plan": "a plan of several steps, of an earlier version",
    "batchbound_steps_progress": "the progress of a run of several steps, of an earlier version",
    "batchbound_iteration_plan": "a plan for servers that mix prompts with generated tokens",
    "batchbound_iteration_cost": "what an iteration of a server costs",
    "batchbound_trace": "the trace of a run",
    "batchbound_server_run": "the trace of a run on a server",
    "batchbound_replay": "a replay on a server",
    "batchbound_report": "a report",
    "batchbound_cost": "a cost model",
    "batchbound_layer_profile": "a layer profile",
}
"""Kinds of files by their first field."""

_STEPS = "Steps are planned one at a time: drive them with batchbound.rollout_function."

_HINTS = {
    "batchbound_plan": "Give the file of requests that it was made of.",
    "batchbound_steps_plan": _STEPS,
    "batchbound_steps_progress": _STEPS,
    "batchbound_iteration_plan": "Send its requests with `batchbound run PLAN --server URL`.",
    "batchbound_iteration_cost": "Name it with `batchbound plan --for ENGINE --cost`.",
    "batchbound_trace": "`batchbound report PLAN TRACE` reads it.",
    "batchbound_server_run": "`batchbound audit TRACE` reads it, and draws it with --html FILE.",
    "batchbound_replay": "`batchbound verify` reads it.",
    "batchbound_cost": "Name it with --cost.",
    "batchbound_layer_profile": "Name it with --profile.",
}


def refuse_other_kinds(path: str | os.PathLike[str], wanted: str, taken: Collection[str] = ()) -> None:
    """Raise InputError if a file of ours is of another kind."""
    name = _kind_of(path)
    if name in KINDS and name not in taken:
        hint = _HINTS.get(name, "Give another file.")
        raise InputError(f"is {KINDS[name]}, {wanted}", file=path, hint=hint)


def is_of_kind(path: str | os.PathLike[str], kind: str) -> bool:
    """Return whether a file of ours is of a kind."""
    return _kind_of(path) == kind


def _kind_of(path: str | os.PathLike[str]) -> str:
    refuse_streams(path)
    if not (is_url(path) or Path(path).is_file()):
        return ""
    match = re.match(rb'\s*\{\s*"(batchbound_\w+)"', first_bytes(path, 200))
    return match[1].decode() if match else ""
