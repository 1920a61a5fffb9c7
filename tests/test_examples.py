"""Each example runs to its end, in an empty folder, as its first lines say."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
from fake_server import FakeServer
from scripts import ended, program
from test_tutorials import ELSEWHERE, inputs

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
RUN = {
    "audit_lengths.py": [],
    "evaluation.sh": ["tiny:llama", "prompts.jsonl", "4"],
    "export_mps.sh": ["table3:0:4"],
    "own_solver.py": [],
    "parquet_fleet.sh": ["tiny:llama", "questions.parquet", "question", "2", "4"],
    "vllm_order.sh": ["fake", "prompts.jsonl", "4"],
}
NEEDS = {"parquet_fleet.sh": "ray"}


def carry_out(name: str, folder: Path, server: str) -> subprocess.CompletedProcess[str]:
    """Run an example with the tests' ``batchbound`` first on the path."""
    (folder / "bin").mkdir()
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SERVER": server,
    }
    if name.endswith(".py"):
        return ended(EXAMPLES / name, RUN[name], folder, environment)
    with program(folder / "bin"):
        command = ["bash", str(EXAMPLES / name), *RUN[name]]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )


def test_every_example_is_run_by_some_test() -> None:
    there = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".sh")}
    assert there == RUN.keys() | ELSEWHERE.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_an_example_runs_to_its_end(name: str, tmp_path: Path) -> None:
    if find_spec(NEEDS.get(name, "batchbound")) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    inputs(tmp_path)
    pd.DataFrame({"question": [f"Say {k}." for k in range(9)]}).to_parquet(tmp_path / "questions.parquet")
    with FakeServer(slots=4) as server:
        done = carry_out(name, tmp_path, server.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
def test_the_notebooks_cells_run_in_order() -> None:
    notebook = json.loads((EXAMPLES / "plan_and_prove.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
