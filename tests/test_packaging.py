"""The package as it is installed: without its extras, and next to a clone of the same name."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from test_docs import ROOT

WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(name, name=name)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in {names} else found(name, *more)
sys.meta_path.insert(0, Missing())
from batchbound.cli import main
sys.exit(main(sys.argv[1:]))
"""
SOLVERS, ARROW = ("ortools", "pyscipopt", "pulp"), ("pyarrow",)


def without(names: tuple[str, ...], *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Carry out a command in a process in which some packages cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(names=names), *words],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_plan_needs_no_solver_but_highs(tmp_path: Path) -> None:
    words = ("plan", "table3:0:40", "--slots", "8", "--cost", "paper", "--work", "2")
    planned = without(SOLVERS, *words, folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert ".[solvers]" not in planned.stderr
    assert without(SOLVERS, "verify", folder=tmp_path).returncode == 0


@pytest.mark.slow
def test_tables_of_text_need_no_arrow_and_parquet_names_its_extra(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("id,input_tokens,output_tokens\na,5,7\nb,9,3\n", encoding="utf-8")
    (tmp_path / "lengths.parquet").write_bytes(b"PAR1")
    words = ("--slots", "2", "--work", "1")
    assert without(ARROW, "plan", "lengths.csv", *words, folder=tmp_path).returncode == 0
    refused = without(ARROW, "plan", "lengths.parquet", *words, "-o", "other.json", folder=tmp_path)
    assert refused.returncode == 2
    assert "run `pip install '.[parquet]'`" in refused.stderr


def test_a_script_next_to_a_clone_imports_the_package(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    source = ROOT / project["tool"]["setuptools"]["package-dir"][""]
    assert [entry.name for entry in source.iterdir() if entry.suffix != ".egg-info"] == ["batchbound"]
    (tmp_path / "batchbound").symlink_to(ROOT)
    (tmp_path / "script.py").write_text("from batchbound import plan\n", encoding="utf-8")
    # An editable installation puts that folder on the path.
    variables = os.environ | {"PYTHONPATH": str(source)}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=variables, check=True)


def test_an_import_that_lacks_torch_names_what_to_install(tmp_path: Path) -> None:
    script = WITHOUT.split("from batchbound.cli")[0]
    done = subprocess.run(
        [sys.executable, "-c", script.format(names=("torch",)) + "from batchbound import LLM"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr.endswith("batchbound.LLM needs torch: in the clone, run `pip install '.[engine]'`\n")
