"""``batchbound demo``: plan and run bundled prompts on a small model."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from ...data.files.disk import InputError
from ...data.files.outputs import refuse_outputs
from ...data.readers.requests import bundled_prompts_path
from ...run_job.earlier import plan_beside
from ..output import note
from ..parser import Parser
from ..streams import say

MODEL = "tiny:speller"
SHOWN = 3
"""Number of completions to print."""


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "-o",
        "--output",
        default="demo-output",
        metavar="FOLDER",
        help="folder of the files (default %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an earlier demo")


def run(args: argparse.Namespace) -> int:
    """Run the prompts and print some completions."""
    from .. import main

    folder = Path(args.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be made ({error.strerror})"
        raise InputError(why, file=folder, hint="Name another folder.") from None
    answers, trace = str(folder / "answers.jsonl"), str(folder / "answers.trace.jsonl")
    refuse_outputs([answers, trace, plan_beside(answers)], args.overwrite)
    prompts = min(str(bundled_prompts_path()), os.path.relpath(bundled_prompts_path()), key=len)
    words = ["run", prompts, "--model", MODEL, "--threads", "1", "--slots", "8", "-o", answers, "--overwrite"]
    note(f"$ batchbound {' '.join(words)}")
    status = main(words)
    if status:
        return status
    say("completions:")
    for prompt, completion in read_pairs(prompts, answers)[:SHOWN]:
        short = completion if len(completion) <= 44 else f"{completion[:40]} ..."
        say(f"  {prompt:32.32} {short}")
    return 0


def read_pairs(prompts: str, answers: str) -> list[tuple[str, str]]:
    """Return pairs of prompt and completion, in file order."""
    told = {}
    for line in Path(answers).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        told[row["custom_id"]] = row["response"]["body"]["choices"][0]["message"]["content"]
    rows = [json.loads(line) for line in Path(prompts).read_text(encoding="utf-8").splitlines()]
    return [(row["body"]["messages"][0]["content"], told[row["custom_id"]]) for row in rows]
