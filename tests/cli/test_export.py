"""``batchbound export``: what other solvers make of the file."""

from __future__ import annotations

import re
from pathlib import Path

import pulp  # type: ignore[import-untyped]
import pytest
from builders import mostly_slow

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.models.formulations.linear_files import read_mps
from batchbound.models.programme import SilentHighs
from batchbound.solvers.backends.linear import solve_linear
from batchbound.solvers.result import Limits
from batchbound.solvers.solve import solve

pytestmark = pytest.mark.usefixtures("solve_here")
TINY = ["table3:0:5", "--slots", "2"]


@pytest.mark.parametrize("formulation", mostly_slow(["repaired", "slot-free"], fast=["slot-free"]))
def test_the_models_optimum_is_the_schedules(formulation: str, tmp_path: Path) -> None:
    file = tmp_path / "model.mps"
    assert main(["export", *TINY, "--formulation", formulation, "-o", str(file)]) == 0
    found = solve_linear(read_mps(file), "highs", Limits(seconds=60))
    best = solve(Problem(generate("table3", 0, 5), CostModel.paper(), 2), "exact", limits=Limits(seconds=60))
    assert found.values is not None
    assert best.makespan is not None
    value = read_mps(file).objective_value(read_mps(file).rounded(found.values))
    assert value == pytest.approx(best.makespan, rel=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "more", [(), pytest.param(("--prefill-token-cap", "200"), marks=pytest.mark.slow)], ids=["free", "capped"]
)
def test_pulp_reads_an_export_with_a_constant(more: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "model.mps"
    assert main(["export", *TINY, *more, "-o", str(file)]) == 0
    assert read_mps(file).offset == 0
    _, problem = pulp.LpProblem.fromMPS(str(file))
    problem.solve(pulp.PULP_CBC_CMD(msg=False))
    cap = int(more[1]) if more else None
    job = Problem(generate("table3", 0, 5), CostModel.paper(), 2, prefill_token_cap=cap)
    best = solve(job, "exact", limits=Limits(seconds=60))
    assert pulp.value(problem.objective) == pytest.approx(best.makespan)


def test_the_packing_counts_decode_steps_of_the_fullest_slot(tmp_path: Path) -> None:
    file = tmp_path / "model.mps"
    assert main(["export", *TINY, "--formulation", "packing", "-o", str(file)]) == 0
    problem = Problem(generate("table3", 0, 5), CostModel.paper(), 2)
    by_hand = min(
        max(sum(each), int(problem.decode_steps.sum()) - sum(each))
        for mask in range(2**5)
        for each in [[int(n) for k, n in enumerate(problem.decode_steps) if mask >> k & 1]]
    )
    found = solve_linear(read_mps(file), "highs", Limits(seconds=60))
    assert found.bound == pytest.approx(by_hand)


def test_what_a_formulation_cannot_say_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.mps"
    command = ["export", *TINY, "--kv-capacity", "90000", "--formulation", "packing", "-o", str(file)]
    assert main(command) == 2
    assert "--formulation packing: the packing has no row for a KV capacity" in capsys.readouterr().err
    assert not file.exists()


def test_a_model_is_replaced_where_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.mps"
    assert main(["export", *TINY, "-o", str(file)]) == 0
    before = file.read_bytes()
    assert main(["export", *TINY, "--formulation", "packing", "-o", str(file)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["export", *TINY, "--formulation", "packing", "-o", str(file), "--overwrite"]) == 0
    assert file.read_bytes() != before


def test_another_kind_of_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", *TINY, "-o", str(tmp_path / "model.xml")]) == 2
    assert "Name a .mps or .lp file" in capsys.readouterr().err


@pytest.mark.parametrize("formulation", ["literal", "packing"])
def test_an_lp_file_is_the_same_model_with_equation_numbers_in_its_rows(
    formulation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {}
    for suffix in ("mps", "lp"):
        file = tmp_path / f"model.{suffix}"
        command = ["export", "table3:0:2", *TINY[1:], "--formulation", formulation, "-o", str(file)]
        assert main(command) == 0
        solver = SilentHighs()
        solver.readModel(str(file))
        solver.run()
        size = solver.getNumRow(), solver.getNumCol()
        values[suffix] = (*size, pytest.approx(solver.getInfo().objective_function_value))
    assert values["mps"] == values["lp"]
    rows = re.findall(r"^ (eq\d+)_[\d_]+: ", (tmp_path / "model.lp").read_text(), re.MULTILINE)
    assert set(rows) >= ({"eq26", "eq27", "eq28"} if formulation == "packing" else {"eq2", "eq4", "eq12"})
    assert "HiGHS" not in capsys.readouterr().out
