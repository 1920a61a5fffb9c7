"""
Write the measured tables of ``docs/papers.md`` from ``docs/papers.json``, and that from benchmarks' JSON.

    python docs/write_papers.py                        # the tables again
    python docs/write_papers.py hybrid FILE            # of table3.py --seeds 10 --json FILE
    python docs/write_papers.py baton FILE             # of baton.py --set mixed --slots 4 8 --json FILE
    python docs/write_papers.py econoserve FILE --row "stated memory" --options "--minutes 3 --demand 0.9"
                                                       # of econoserve systems --traces sharegpt OPTIONS

``tests/test_docs.py`` compares the page with the file.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "papers.md"
FIGURES = PAGE.with_suffix(".json")
_TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)

RULES = {
    "": "without the rule",
    "lagrangian": "rule per decode step",
    "lagrangian-token": "rule per token",
    "lagrangian-literal": "all tokens decoded",
}
HYBRID = (
    ("first come, first served", ("fcfs", False), False, "201.00"),
    ("optimal packing", ("packing", True), False, "197.08"),
    ("round-robin + Algorithm 1", ("algorithm1", False), True, "193.33, with the rule"),
    ("packing + Algorithm 1", ("packing-algorithm1", True), True, "190.58, with the rule"),
)
"""Label, policy and whether it is packed, whether the rule can be added, published seconds."""
BATON = {
    "static generate": "static",
    "PD": "P&D",
    "vector shaping": "BATON",
    "vector embedding": "BATON, P&D",
}
BATON_PUBLISHED = {4: (1.01, 1.07, 1.86), 8: (1.01, 1.93, 2.49)}
"""Seconds of the static batches over those of the three others, from its Table 1."""
SERVED = {"econoserve": "EconoServe as printed", "vllm*": "vLLM", "vllm-v1*": "vLLM, version 1",
          "sarathi*": "Sarathi-Serve"}  # fmt: skip
COLUMNS = ("completion", "tokens_per_s", "slo_satisfaction", "served_tokens")


def hybrid(found: Any) -> dict[str, Any]:
    """Return the mean seconds of each policy."""
    kept = {f"{row['policy']}{'+packing' * row['packed']}": row["makespan_s"] for row in found["rows"]}
    return {"seeds": found["seeds"], "makespan_s": kept}


def hybrid_table(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return policies by rule."""
    rows = [["", *RULES.values(), "published"]]
    for label, (policy, packed), ruled, published in HYBRID:
        names = [policy, *(rule for rule in RULES if rule and ruled)]
        cells = [f"{figures['makespan_s'][name + '+packing' * packed]:.2f}" for name in names]
        rows.append([label, *cells, *[""] * (len(RULES) - len(cells)), published])
    return rows


def baton(found: Any) -> dict[str, Any]:
    """Return the CPU seconds of each way on the 120 queries, by batch size."""
    return {
        str(each["slots"]): {way: row["cpu_seconds"] for way, row in each["ways"].items()}
        for each in found
        if each["set"] == "mixed" and each["slots"] in BATON_PUBLISHED
    }


def baton_table(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return how many times the static batches' seconds each way saves."""
    rows = [["batch", "way", "CPU s", "static over it", "published"]]
    for slots, seconds in figures.items():
        published = dict(zip(list(BATON)[1:], BATON_PUBLISHED[int(slots)], strict=True))
        for way, took in seconds.items():
            known = published.get(way.split(",")[0])
            gain = seconds["static generate"] / took
            rows.append([slots, way, f"{took:.1f}", f"{gain:.2f}", "" if known is None else f"{known:.2f}"])
    return rows


def econoserve(found: Any) -> dict[str, Any]:
    """Return what four systems reached on ShareGPT."""
    of = found["sharegpt"]
    return {system: {column: of[system][column] for column in COLUMNS} for system in SERVED}


def econoserve_table(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return a row a setting: completion, tokens a second, share in time, mean length served."""
    rows = [
        [
            "completion, tokens/s, SLO, mean length served",
            *SERVED.values(),
            "options of `systems --traces sharegpt`",
        ]
    ]
    for setting, one in figures.items():
        cells = [
            "{:.1f} s, {:.0f}, {:.3f}, {:.0f}".format(*(one[system][column] for column in COLUMNS))
            for system in SERVED
        ]
        rows.append([setting, *cells, f"`{one['options']}`"])
    return rows


TABLES: Mapping[str, Callable[[Mapping[str, Any]], list[list[str]]]] = {
    "hybrid": hybrid_table,
    "baton": baton_table,
    "econoserve": econoserve_table,
}


def page(text: str, figures: Mapping[str, Any]) -> str:
    """Return the page with its tables made of the figures."""

    def made(found: re.Match[str]) -> str:
        if found[2] not in figures:
            return found[0]
        head, *rows = TABLES[found[2]](figures[found[2]])
        lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
        return found[1] + "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + found[3]

    return _TABLE.sub(made, text)


def main() -> None:
    """Take up what a benchmark wrote, if one is named, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", choices=TABLES)
    parser.add_argument("found", nargs="?", type=Path, metavar="FILE")
    parser.add_argument("--row", help="of econoserve's table")
    parser.add_argument("--options", help="that the benchmark was run with")
    args = parser.parse_args()
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    if args.found is not None:
        found = json.loads(args.found.read_text(encoding="utf-8"))
        if args.table == "econoserve":
            figures.setdefault("econoserve", {})[args.row] = econoserve(found) | {"options": args.options}
        else:
            figures[args.table] = {"hybrid": hybrid, "baton": baton}[args.table](found)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), figures), encoding="utf-8")


if __name__ == "__main__":
    main()
