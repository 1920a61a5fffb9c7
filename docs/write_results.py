"""
Write docs/results.md from docs/results.json, which holds each table with its command and date.

    python docs/write_results.py                              # the page again
    python docs/write_results.py gaps FILE --date 2026-11-28  # first take up rows: a JSON list of lists

``tests/test_docs.py`` compares the page with the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "results.md"
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


if __name__ == "__main__":
    main()
