"""Changes the judges line by line with mutmut, and says which changes no test notices."""

from __future__ import annotations

import argparse
import ast
import difflib
from collections import Counter
from pathlib import Path

from change_trials import JUDGES, Trial, module_of, try_changes
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.state import state
from mutmut.utils.format_utils import mangled_name_from_mutant_name


def _functions_reached() -> set[str]:
    reached = set(state()._stats)
    state()._stats.clear()
    return reached


def _functions(source: str) -> dict[str, list[str]]:
    """Return the lines of each function's body in a changed source: mutmut's own diff takes 20 s each."""
    lines = source.splitlines()
    return {
        node.name: lines[node.lineno : node.end_lineno]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }


def _change(name: str, functions: dict[str, list[str]]) -> list[str]:
    """Return the lines that a change takes away and puts in."""
    before = functions[name.rpartition("__mutmut_")[0] + "__mutmut_orig"]
    lines = difflib.unified_diff(before, functions[name], n=0, lineterm="")
    return [line for line in lines if line[:1] in ("-", "+") and line[:3] not in ("---", "+++")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("judges", nargs="*", help="files of judges; all by default")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try each N-th change only")
    options = parser.parse_args()
    judges = options.judges or list(JUDGES)
    sources, functions, changes = dict[str, str](), dict[str, dict[str, list[str]]](), list[str]()
    all_of, killed = Counter[str](), Counter[str]()
    for judge in judges:
        module, made = module_of(judge), mutate_file_contents(judge, Path(judge).read_text(encoding="utf-8"))
        sources[module], functions[module] = made.code, _functions(made.code)
        changes += [f"{module}.{name}" for name in made.mutant_names[:: options.every]]

    def told(change: str, missed: str | None) -> None:
        module, _, name = change.rpartition(".")
        all_of[module] += 1
        killed[module] += missed is not None
        if missed is None:
            print(f"# {change}", *_change(name, functions[module]), sep="\n", flush=True)

    try:
        try_changes(judges, sources, Trial(changes, _functions_reached, mangled_name_from_mutant_name, told))
    finally:
        print(f"\n{len(changes)} changes, {all_of.total()} judged\n")
        print("| module | judged | killed | score |\n|---|---|---|---|")
        rows = [(module.removeprefix("batchbound."), all_of[module], killed[module]) for module in all_of]
        for name, judged, missed in [*rows, ("together", all_of.total(), killed.total())]:
            print(f"| `{name}` | {judged} | {missed} | {missed / max(judged, 1):.1%} |")


if __name__ == "__main__":
    main()
