"""
Run a job twice as ``batchbound run`` does: what an order gains when lengths are unknown, then known.

Jobs: ``gsm8k`` has questions of one kind under one cap. ``caps`` has yes-no questions and stories in turn,
each kind under a cap of its own. ``kinds`` has the same questions under one cap, kind by kind. ``mixed`` has
four kinds in turn, each under its own cap. ``speller`` has the four kinds of the guide on evaluation, for
``--model tiny:speller``. Decode steps are exact: those of
the run, of first come, first served simulated on the completions that came out, and of a plan of their
lengths. Seconds are the run's own.

Run: ``python benchmarks/two_runs.py --model MODEL -o FILE``, with BATCHBOUND_DATA set for ``gsm8k``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PLACES = ("a forest", "a harbour", "a bakery", "a library", "an airport", "a farm", "a theatre", "a mine")

NAMES = {
    "gsm8k": "one kind, one cap",
    "caps": "two kinds, a cap each",
    "kinds": "two kinds, one cap",
    "mixed": "four kinds, a cap each",
    "speller": "`tiny:speller`, four kinds, a cap each",
}

WORDS = ("walnut", "sparrow", "kettle", "feather", "lantern", "basket", "velvet", "harbor")

OF_SPELLER = {"Spell {n}.": 60, "Reverse {w}.": 10, "Say {w} {t} times.": 90, "Is {n} even?": 4}


def questions(job: str, count: int, cap: int) -> Iterator[tuple[str, int]]:
    """Yield each question and its cap."""
    if job == "gsm8k":
        file = Path(os.environ.get("BATCHBOUND_DATA", "../shared/data")) / "gsm8k" / "test.jsonl"
        with file.open(encoding="utf-8") as lines:
            for _, line in zip(range(count), lines, strict=False):
                yield json.loads(line)["question"], cap
        return
    if job == "speller":
        for k in range(count):
            text, most = list(OF_SPELLER.items())[k % 4]
            yield text.format(n=137 * k + 11, w=WORDS[k // 4 % 8], t=2 + k % 7), most
        return
    if job == "mixed":
        for k in range(count):
            place = PLACES[k // 4 % 8]
            yield (
                (f"Is {137 * k + 11} an even number? Answer yes or no.", 4),
                (f"Name {2 + k % 5} things that one sees in {place}.", cap // 4),
                (f"Describe {place} in {1 + k % 3} sentences.", cap // 2),
                (f"Write a story of {3 + k % 9} sentences in {place}.", cap),
            )[k % 4]
        return
    short = [f"Is {137 * k + 11} an even number? Answer yes or no." for k in range(count // 2)]
    tales = [f"Write a story of {3 + k} sentences in {PLACES[k % 8]}." for k in range(count // 2)]
    if job == "caps":
        for question, tale in zip(short, tales, strict=True):
            yield question, 4
            yield tale, cap
    else:
        yield from ((text, cap) for text in [*short, *tales])


def batch_of(job: str, count: int, cap: int) -> str:
    """Return the job as OpenAI batch JSONL."""
    rows = []
    for k, (text, most) in enumerate(questions(job, count, cap)):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": most, "temperature": 0}
        row = {"custom_id": f"q{k}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        rows.append(json.dumps(row))
    return "\n".join(rows) + "\n"


def gain_of_run(folder: Path, args: argparse.Namespace, *more: str) -> Mapping[str, Any]:
    """Run the job in a folder; return the gain that the command prints."""
    command = [sys.executable, "-m", "batchbound", "run", "prompts.jsonl", "--model", args.model, "--json"]
    command += ["--slots", str(args.slots), "--threads", "1", "--quiet", *more]
    printed = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    gain: dict[str, Any] = json.loads(printed.splitlines()[-1])["gain"]
    return gain


def row_of(job: str, which: str, gain: Mapping[str, Any]) -> list[str]:
    """Return a row of the table: the job, the run, and its decode steps against others."""
    first, ours = gain["first_come"], gain["this_run"]
    saved = 1 - ours["decode_steps"] / first["decode_steps"]
    seconds = 1 - ours["seconds"] / first["seconds"]
    known = gain["known"]["decode_steps"] if gain["known"] else "not planned"
    above = f"{round(100 * (ours['seconds'] / gain['least'] - 1))} %" if gain["least"] else "no bound"
    return [
        NAMES[job],
        which,
        f"{first['decode_steps']:,}",
        f"{ours['decode_steps']:,}",
        f"{round(100 * saved)} %",
        f"{round(100 * seconds)} %",
        f"{known}",
        above,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="as batchbound run takes it")
    parser.add_argument("--jobs", nargs="+", choices=NAMES, default=list(NAMES)[:4])
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--cap", type=int, default=96)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path, help="rows for docs/write_results.py, as JSON")
    args = parser.parse_args()
    rows = []
    for job in args.jobs:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "prompts.jsonl").write_text(batch_of(job, args.prompts, args.cap), encoding="utf-8")
            for which, more in (("first", ()), ("second", ("--overwrite",))):
                rows.append(row_of(job, which, gain_of_run(folder, args, *more)))
                print(" | ".join(rows[-1]), flush=True)
    if args.output:
        args.output.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
