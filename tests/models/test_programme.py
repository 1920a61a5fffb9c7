"""Linear programmes against another solver's, and by hand."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from batchbound.data.arrays import FloatArray
from batchbound.models.programme import Programme

MOST = 5.0


@st.composite
def rows_and_columns(draw: st.DrawFn) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return a small cost, matrix and limit."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    some = st.integers(-3, 4).map(float)
    shapes = ((columns,), (rows, columns), (rows,))
    cost, matrix, high = (draw(arrays(np.float64, shape, elements=some)) for shape in shapes)
    return cost, matrix, high


@settings(max_examples=40)
@given(rows_and_columns(), st.booleans())
def test_the_optimum_is_another_solvers(
    drawn: tuple[FloatArray, FloatArray, FloatArray], interior: bool
) -> None:
    cost, matrix, high = drawn
    found = Programme.within(cost, matrix, high).solved(interior=interior)
    other = linprog(cost, A_ub=matrix, b_ub=high)
    assert (found is not None) == (other.status == 0)
    if found is not None:
        assert found.cost == pytest.approx(other.fun, abs=1e-6)
        # The prices of the rows are a solution of the dual programme.
        assert (found.prices <= 1e-9).all()
        assert (matrix.T @ found.prices <= cost + 1e-6).all()
        assert float(high @ found.prices) == pytest.approx(other.fun, abs=1e-6)


@settings(max_examples=40)
@given(rows_and_columns())
def test_the_best_whole_values_are_another_solvers(drawn: tuple[FloatArray, FloatArray, FloatArray]) -> None:
    cost, matrix, high = drawn
    programme = replace(Programme.within(cost, matrix, high), upper=np.full(len(cost), MOST))
    found = programme.solved_whole()
    other = milp(
        cost,
        integrality=np.ones(len(cost), dtype=np.int64),
        bounds=Bounds(0, MOST),
        constraints=LinearConstraint(matrix, -np.inf, high),
    )
    assert (found is not None) == (other.status == 0)
    if found is not None:
        assert (np.abs(found - np.rint(found)) < 1e-6).all()
        assert cost @ found == pytest.approx(other.fun, abs=1e-6)


def test_entries_in_one_place_are_added_up() -> None:
    here, twice = np.zeros(2, dtype=np.int64), np.array([2.0, 3.0])
    # 5 x <= 20 and x >= 1.
    programme = Programme.of(np.array([-1.0]), [(here, here, twice)], -np.inf, np.array([20.0]), lower=1.0)
    found = programme.solved()
    assert found is not None
    assert found.x == pytest.approx([4.0])
    assert found.prices == pytest.approx([-0.2])


def test_only_some_columns_have_to_be_whole() -> None:
    # x + y >= 2.5 at costs of 1 and 3: x is whole and at most 2.
    whole, both = np.array([1, 0]), np.zeros(2, dtype=np.int64)
    entries = [(both, np.arange(2), 1.0)]
    programme = Programme.of(
        np.array([1.0, 3.0]), entries, 2.5, np.array([np.inf]), upper=np.array([2.6, np.inf])
    )
    assert programme.solved_whole(whole) == pytest.approx([2.0, 0.5])


@pytest.mark.parametrize("interior", [False, True])
def test_it_prints_nothing(interior: bool, capfd: pytest.CaptureFixture[str]) -> None:
    programme = Programme.within(-np.ones(2), np.eye(2), np.ones(2))
    assert programme.solved(interior=interior) is not None
    assert programme.solved_whole() is not None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("threads", [0, 2])
def test_a_process_that_uses_highs_itself_is_no_hindrance(threads: int) -> None:
    code = textwrap.dedent("""
        import sys
        import highspy, numpy as np
        from batchbound.models.programme import Programme
        theirs = highspy.Highs()
        theirs.setOptionValue("threads", int(sys.argv[1]))
        theirs.maximize(theirs.addVariable(0, 3))
        ours = Programme.within(-np.ones(1), np.ones((1, 1)), np.array([2.5]))
        assert ours.solved().x == [2.5] and ours.solved_whole() == [2.0]
    """)
    subprocess.run([sys.executable, "-c", code, str(threads)], check=True, capture_output=True)


def test_a_programme_without_time_has_no_optimum() -> None:
    programme = Programme.within(-np.ones(2), np.ones((3, 2)), np.ones(3))
    assert programme.solved(1.0) is not None
    assert programme.solved(-1.0) is None


def test_a_number_beyond_what_highs_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="HiGHS refuses the programme"):
        Programme.within(-np.ones(1), np.array([[1e20]]), np.ones(1)).solved()
