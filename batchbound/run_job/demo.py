"""Bundled prompts on a small local model."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..data.files.disk import InputError
from ..data.files.outputs import refuse_outputs
from ..data.readers.requests import bundled_prompts_path
from ..options.demo import DemoOptions
from ..options.run import JobOptions
from .earlier import plan_beside

MODEL = "tiny:speller"


def demo_job(options: DemoOptions) -> JobOptions:
    """Return the options of the demo's run; make the folder of its files."""
    folder = Path(options.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be made ({error.strerror})"
        raise InputError(why, file=folder, hint="Name another folder.") from None
    prompts = min(str(bundled_prompts_path()), os.path.relpath(bundled_prompts_path()), key=len)
    output = folder / "answers.jsonl"
    job = JobOptions(prompts, MODEL, threads=1, slots=8, output=output, overwrite=True)
    refuse_outputs([job.answers, job.times, plan_beside(output)], options.overwrite)
    return job


def read_pairs(prompts: str, answers: str) -> list[tuple[str, str]]:
    """Return pairs of prompt and completion, in file order."""
    told = {}
    for line in Path(answers).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        told[row["custom_id"]] = row["response"]["body"]["choices"][0]["message"]["content"]
    rows = [json.loads(line) for line in Path(prompts).read_text(encoding="utf-8").splitlines()]
    return [(row["body"]["messages"][0]["content"], told[row["custom_id"]]) for row in rows]
