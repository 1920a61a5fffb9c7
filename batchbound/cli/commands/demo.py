"""``batchbound demo``: the whole path on bundled prompts and a small model, in under a minute."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...data.files.disk import InputError
from ...data.files.outputs import refuse_outputs
from ...data.readers.requests import bundled_prompts_path
from ..output import note
from ..parser import Parser
from ..streams import say

MODEL = "tiny:speller"
SHOWN = 9
"""Completions printed: one of each kind of prompt."""


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
    """Profile, plan, run and report, by the commands a user would type, and show what came of it."""
    from .. import main

    folder = Path(args.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be made ({error.strerror})"
        raise InputError(why, file=folder, hint="Name another folder.") from None
    cost, plan, answers, trace, picture = (
        str(folder / name) for name in ("cost.json", "plan.json", "answers.jsonl", "trace.jsonl", "gantt.png")
    )
    refuse_outputs([cost, plan, answers, trace, picture], args.overwrite)
    prompts = str(bundled_prompts_path())
    model = ["--model", MODEL, "--threads", "1"]
    # As it is typed anew where one of them was interrupted.
    for words in (
        ["profile", *model, "--slots", "8", "--prompt-tokens", "64", "-o", cost, "--overwrite"],
        ["plan", prompts, "--model", MODEL, "--slots", "8", "--cost", cost, "-o", plan, "--overwrite"],
        ["run", plan, *model, "-o", answers, "--trace", trace, "--overwrite"],
        ["report", plan, trace, "--gantt", picture, "--overwrite"],
    ):
        note(f"$ batchbound {' '.join(words)}")
        status = main(words)
        if status:
            return status
    say(f"\nThe first of 48 completions, all of them in {answers}:")
    for prompt, completion in read_pairs(prompts, answers)[:SHOWN]:
        short = completion if len(completion) <= 60 else f"{completion[:56]} ..."
        say(f"  {prompt:42} {short}")
    return 0


def read_pairs(prompts: str, answers: str) -> list[tuple[str, str]]:
    """Return each prompt of a batch with one message, and its completion, in the order of the file."""
    told = {}
    for line in Path(answers).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        told[row["custom_id"]] = row["response"]["body"]["choices"][0]["message"]["content"]
    rows = [json.loads(line) for line in Path(prompts).read_text(encoding="utf-8").splitlines()]
    return [(row["body"]["messages"][0]["content"], told[row["custom_id"]]) for row in rows]
