"""The arrows of the design, enforced: who may import whom, and what stays unloaded until it is needed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "data": set[str](),
    "models": {"data"},
    "heuristics": {"data", "models"},
    "solvers": {"data", "models"},
    "executor": {"data", "models", "heuristics"},
}
HEAVY = ("torch", "transformers", "ortools", "pyscipopt", "pulp", "scipy", "pandas", "matplotlib")


def imports_of_ours(file: Path, folder: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield node.lineno, folder
        elif isinstance(node, ast.ImportFrom) and node.level > 1:
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module if node.module.split(".")[0] == "batchbound" else ""
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name if alias.name.split(".")[0] == "batchbound" else ""


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_arrows_point_one_way(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder, ""}
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, name in imports_of_ours(file, folder)
        if name not in allowed
    ]
    assert not wrong


def test_importing_batchbound_loads_nothing_heavy() -> None:
    modules = ", ".join(
        f"batchbound.{name}" for name in ("data", "models", "heuristics", "solvers", "executor")
    )
    code = (
        f"import sys, batchbound, batchbound.cli, {modules}\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_planning_for_a_tiny_model_loads_no_engine(tmp_path: Path) -> None:
    request = {"custom_id": "a", "body": {"prompt": "Name a prime.", "max_tokens": 4}}
    (tmp_path / "in.jsonl").write_text(json.dumps(request) + "\n")
    words = ["plan", "in.jsonl", "--model", "tiny:llama", "--slots", "1", "--time-limit", "0.1", "--json"]
    code = (
        f"import sys\nfrom batchbound.cli import main\nassert main({words!r}) == 0\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    assert json.loads((tmp_path / "plan.json").read_text())["limits"]["max_position"] == 512


def test_the_five_folders_are_reached_through_the_package() -> None:
    for folder in MAY_IMPORT:
        link = ROOT / "batchbound" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder
