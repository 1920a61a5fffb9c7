"""
Write docs/results.md from docs/results.json, which holds each table with its command and date.

The table of gains of README.md is filled from the same tables, between its marks.

    python docs/write_results.py                              # the page again
    python docs/write_results.py gaps FILE --date 2026-11-28  # first take up rows: a JSON list of lists

``tests/test_docs.py`` compares the page with the file.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "results.md"
README = PAGE.parent.parent / "README.md"
FIGURES = PAGE.with_suffix(".json")
HEAD = """# Results

A question a table, with the command that prints it and the date. The machine has two shared CPU cores, unless
a caption names another; one thread a process, limits in CPU seconds. A gap is the makespan above the proven
lower bound. This page is made by `python docs/write_results.py` from `docs/results.json`.
"""


def table(found: Mapping[str, Any]) -> str:
    """Return one question: the table, a sentence of reading help, the caption."""
    lines = ["| " + " | ".join(row) + " |" for row in (found["columns"], *found["rows"])]
    cells = "\n".join([lines[0], "|---" * len(found["columns"]) + "|", *lines[1:]])
    note = f"{found['note']}\n\n" if found.get("note") else ""
    return f"### {found['question']}\n\n{cells}\n\n{note}{found['command']} ({found['date']})\n"


def page(figures: Mapping[str, Any]) -> str:
    """Return the whole page."""
    parts = [HEAD]
    section = ""
    for found in figures.values():
        if found["section"] != section:
            section = found["section"]
            parts.append(f"## {section}\n")
        parts.append(table(found))
    return "\n".join(parts)


Figures = Mapping[str, Any]


def cell(figures: Figures, table: str, column: str, *beginning: str) -> str:
    """Return a cell of a table: of the row that begins with these cells."""
    columns, rows = figures[table]["columns"], figures[table]["rows"]
    (row,) = (row for row in rows if all(map(str.startswith, row, beginning)))
    text: str = row[columns.index(column)]
    return text


def number(text: str) -> float:
    """Return the first number of a text."""
    match = re.search(r"\d[\d,]*(?:\.\d+)?", text)
    assert match is not None, text
    return float(match[0].replace(",", ""))


def percent(share: float) -> str:
    """Return a share as a whole percentage."""
    return f"{100 * share:.0f} %"


GENERATE = "`generate` of transformers"


def lm_eval(figures: Figures) -> str:
    """Return the factors of an evaluation with fixed and with drawn worked examples, in float32."""
    fixed, drawn = (
        number(cell(figures, "lm_eval", "times", f"completions, {kind} examples"))
        for kind in ("fixed", "drawn")
    )
    return f"**{fixed:.0f} times** less CPU time; {drawn:.1f} with drawn examples"


def beginnings(figures: Figures) -> str:
    """Return the least and the most factor on interleaved prompts with a KV cache below their tree."""
    rows = [row for row in figures["prefix_real"]["rows"] if "interleaved, 0.3" in row[0]]
    factors = sorted(number(row[2]) / number(row[4]) for row in rows)
    return f"**{factors[0]:.1f} to {factors[-1]:.1f} times** less time"


def samples(figures: Figures) -> str:
    """Return the factors on groups of samples, of a real and of a tiny model."""
    real = cell(figures, "samples", "against `LLM.generate`", GENERATE)
    tiny = number(cell(figures, "groups", "against `LLM`", "one `generate` of transformers for all"))
    return f"**{real} times** less CPU time; {tiny:.0f} on a model of 7M weights"


def known_lengths(figures: Figures) -> str:
    """Return the least and the most iterations saved where slots bind."""
    saved = [cell(figures, "server", "fewer", step) for step in ("step 4", "step 5, 192")]
    return f"**{from_to(saved)}** fewer iterations"


def two_runs(figures: Figures, *jobs: str) -> str:
    """Return the decode steps saved by the first and by the second runs of jobs."""
    first, second = (
        [cell(figures, "two_runs", "fewer", job, which) for job in jobs] for which in ("first", "second")
    )
    if {*first, *second} == {"0 %"}:
        return "nothing, and it says so"
    if {*first} == {"0 %"}:
        return f"nothing at first, **{from_to(second)}** fewer decode steps in the second run"
    return f"**{from_to(first)}** fewer decode steps, {from_to(second)} in the second run"


def from_to(cells: Sequence[str]) -> str:
    """Return the least and the most of some percentages."""
    low, high = (pick(map(number, cells)) for pick in (min, max))
    return f"{low:.0f} %" if low == high else f"{low:.0f} to {high:.0f} %"


MIXED = ("two kinds, a cap each", "four kinds, a cap each")

GAINS: tuple[tuple[str, Callable[[Figures], str], str, str], ...] = (
    ("evaluate with equal worked examples", lm_eval, "lm-eval's `hf`, batches of 16", "lm_eval"),
    (
        "send mixed prompts that begin alike; 30 % fit its KV cache",
        beginnings,
        "vLLM 0.32 in file order",
        "prefix_real",
    ),
    ("train with groups of 8 samples", samples, "`generate` on the whole batch, TRL's default", "samples"),
    ("send prompts of known lengths", known_lengths, "vLLM 0.32 in file order", "server"),
    ("mix caps", lambda figures: two_runs(figures, *MIXED), "first come, first served", "two_runs"),
    ("mix kinds of prompts", lambda figures: two_runs(figures, "two kinds, one cap"), "the same", "two_runs"),
    ("have one kind and one cap", lambda figures: two_runs(figures, "one kind"), "the same", "two_runs"),
)
"""Persons of the README, what they gain and against what, and the table of the figures."""


def gains(figures: Figures) -> str:
    """Return the README's table of gains."""
    lines = ["| you | you get | against | made by |", "|---|---|---|---|"]
    for who, gain, against, name in GAINS:
        command = figures[name]["command"]
        (script,) = set(re.findall(r"benchmarks/(\w+)\.py", command))
        link = f"[`{script}.py`](docs/results.md#{anchor(figures[name]['question'])})"
        lines.append(f"| {who} | {gain(figures)} | {against} | {link} |")
    return "\n".join(lines)


def anchor(heading: str) -> str:
    """Return the address of a heading within its page."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).lower())


def readme(text: str, figures: Figures) -> str:
    """Return the README with its table of gains filled in."""
    marks = re.compile(r"(<!-- gains -->\n).*?(<!-- end -->)", re.DOTALL)
    filled, count = marks.subn(lambda mark: f"{mark[1]}{gains(figures)}\n{mark[2]}", text)
    assert count == 1
    return filled


def main() -> None:
    """Take up rows, if they are named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    parser.add_argument("table", nargs="?", choices=list(figures))
    parser.add_argument("rows", nargs="?", type=Path, metavar="FILE")
    parser.add_argument("--date", help="of the rows, as YYYY-MM-DD")
    args = parser.parse_args()
    if args.rows is not None:
        if args.date is None:
            parser.error("--date is missing: say when the rows were measured")
        figures[args.table]["rows"] = json.loads(args.rows.read_text(encoding="utf-8"))
        figures[args.table]["date"] = args.date
        FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(figures), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8"), figures), encoding="utf-8")


if __name__ == "__main__":
    main()
