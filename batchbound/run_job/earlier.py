"""Files of earlier runs: lengths of completions, and plans."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..data.files.disk import InputError
from ..data.plan import Plan, PromptSource, relative_path
from ..data.prompts.columns import PromptColumns
from ..data.readers.length_source import LengthSource

_PLAN = ".plan.json"


def plan_beside(output: str | os.PathLike[str]) -> Path:
    """Return the plan's path, next to the completions."""
    return Path(output).with_suffix(_PLAN)


def next_plan(output: str | os.PathLike[str]) -> Path:
    """Return the path of the plan for the next run."""
    return Path(output).with_suffix(".next.json")


def trace_of_plan(plan: str | os.PathLike[str]) -> Path | None:
    """Return the trace's path for a plan of prompts, or None."""
    path = Path(plan)
    return (
        path.with_name(path.name.removesuffix(_PLAN) + ".trace.jsonl") if path.name.endswith(_PLAN) else None
    )


def trace_of(plan: str | os.PathLike[str]) -> Path | None:
    """Return the trace that a run left beside a plan of prompts, or None."""
    named = trace_of_plan(plan)
    beside = [] if named is None else [named, named.with_name("trace.jsonl")]
    return next((path for path in beside if path.is_file()), None)


def earlier_lengths(
    folder: Path, digest: str, columns: PromptColumns | None, tokenizer: str, longest: int | None
) -> LengthSource | None:
    """Return the lengths of the newest run of the same prompts.

    It is None if the folder holds no finished run of them.
    """
    named = relative_path(tokenizer, folder) if Path(tokenizer).is_dir() else tokenizer
    for prompts, completions in _runs(folder):
        if (prompts.sha256, prompts.columns, prompts.tokenizer) == (digest, columns, named):
            return replace(LengthSource.parse(f"completions:{completions}"), longest=longest)
    return None


def _runs(folder: Path) -> Iterator[tuple[PromptSource, Path]]:
    for path in sorted(folder.glob(f"*{_PLAN}"), key=lambda path: -path.stat().st_mtime):
        stem = path.name.removesuffix(_PLAN)
        completions = [path.with_name(stem + ending) for ending in (".jsonl", ".parquet")]
        written = [one for one in completions if one.is_file()]
        try:
            prompts = Plan.load(path).provenance.prompts if written else None
        except InputError:
            continue
        if prompts is not None:
            yield prompts, written[0]
