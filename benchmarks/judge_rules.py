"""Removes each refusal of the judges, one at a time, and reports those that no test misses."""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CERTIFICATES = (
    "tests/models/test_certificates.py",
    "tests/models/test_difference_certificates.py",
    "tests/models/test_enumeration_certificates.py",
)
JUDGES = {
    "data/schedule.py": ("tests/data/test_schedule.py",),
    "data/fleet.py": ("tests/data/test_fleet_schedule.py",),
    "heuristics/serving/kv_ledger.py": ("tests/heuristics/test_kv_ledger.py",),
    "models/certificates/iterations.py": ("tests/models/test_iteration_bound.py",),
    "models/certificates/claims.py": CERTIFICATES,
    "models/certificates/fleet.py": ("tests/models/test_fleet_certificates.py",),
    "models/certificates/states.py": ("tests/models/test_state_certificates.py",),
    "models/certificates/slot_ends.py": CERTIFICATES,
    "models/certificates/checker.py": CERTIFICATES,
    "executor/engines/self_check.py": ("tests/executor/test_self_check.py",),
}
"""Each judge and the fast tests that guard it."""


def refusals(source: str) -> Iterator[ast.stmt]:
    """Yield the statements that refuse: those that raise, or return a violation, under a condition."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.If):
            continue
        for last in (branch[-1] for branch in (node.body, node.orelse) if branch):
            value = last.value if isinstance(last, ast.Return) else None
            named = isinstance(value, ast.Call) and ast.unparse(value.func) == "Violation"
            if named or isinstance(last, ast.Raise):
                yield last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("judges", nargs="*", default=list(JUDGES), help="files of judges; all by default")
    missed = removed = 0
    for judge in parser.parse_args().judges:
        source = Path(judge).read_text()
        for refusal in sorted(refusals(source), key=lambda statement: statement.lineno):
            removed += 1
            missed += _unnoticed(judge, source, refusal)
    print(f"{removed} refusals removed, {missed} not missed by any test")
    sys.exit(missed > 0)


def _unnoticed(judge: str, source: str, refusal: ast.stmt) -> bool:
    """Say which test fails first on a copy without one refusal, and return whether none does."""
    lines, first = source.splitlines(keepends=True), refusal.lineno - 1
    lines[first : refusal.end_lineno] = [" " * refusal.col_offset + "pass\n"]
    with tempfile.TemporaryDirectory() as name:
        skipped = shutil.ignore_patterns(".*", "build", "docs", "benchmarks", "__pycache__")
        copy = Path(shutil.copytree(".", Path(name) / "copy", symlinks=True, ignore=skipped))
        (copy / judge).write_text("".join(lines))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", *JUDGES[judge]],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print(f"{judge}:{refusal.lineno}: {failed[0].split(' - ')[0] if failed else 'NO TEST FAILS'}", flush=True)
    return run.returncode == 0


if __name__ == "__main__":
    main()
