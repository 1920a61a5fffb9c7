"""Removes each refusal of the judges, one at a time, and says which test misses it."""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from change_trials import JUDGES, Trial, module_of, passed_since, try_changes


class Removable(ast.NodeTransformer):
    """Puts a switch at each statement that raises, or returns a violation, under a condition."""

    def __init__(self, judge: str) -> None:
        self.judge, self.names = judge, list[str]()

    def visit_If(self, node: ast.If) -> ast.If:
        """Put a switch at the last statement of a branch that refuses."""
        self.generic_visit(node)
        for branch in (node.body, node.orelse):
            last = branch[-1] if branch else None
            value = last.value if isinstance(last, ast.Return) else None
            named = isinstance(value, ast.Call) and ast.unparse(value.func) == "Violation"
            if last is not None and (named or isinstance(last, ast.Raise)):
                self.names.append(f"{self.judge}:{last.lineno}")
                kept = ast.parse(f"__import__('change_trials').kept({self.names[-1]!r})", mode="eval").body
                branch[-1] = ast.If(kept, [last], [])
        return node


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("judges", nargs="*", help="files of judges; all by default")
    judges = parser.parse_args().judges or list(JUDGES)
    sources, names, unnoticed = {}, [], []
    for judge in judges:
        removable = Removable(judge)
        tree = removable.visit(ast.parse(Path(judge).read_text(encoding="utf-8")))
        sources[module_of(judge)] = ast.unparse(ast.fix_missing_locations(tree))
        names += removable.names

    def told(refusal: str, missed: str | None) -> None:
        print(f"{refusal}: {missed or 'NO TEST FAILS'}", flush=True)
        if missed is None:
            unnoticed.append(refusal)

    try_changes(judges, sources, Trial(names, passed_since, str, told))
    print(f"{len(names)} refusals removed, {len(unnoticed)} not missed by any test")
    sys.exit(bool(unnoticed))


if __name__ == "__main__":
    main()
