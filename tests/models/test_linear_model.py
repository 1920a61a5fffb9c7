"""The neutral linear model: what it refuses, how it judges a point, and its files."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pulp  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from batchbound.data.arrays import FloatArray
from batchbound.data.files.disk import InputError
from batchbound.models.formulations.linear_files import read_mps, write_mps
from batchbound.models.formulations.linear_model import LinearModel, ModelBuilder
from batchbound.models.formulations.partition_model import partition_model


def knapsack() -> LinearModel:
    """Take at most weight 4 of (2, 3, 1) worth (4, 5, 3): the last two, worth 8."""
    builder = ModelBuilder()
    take = builder.columns("take", (3,), upper=1, integer=True, cost=[-4, -5, -3])
    builder.rows("weight", [([[2, 3, 1]], take[None, :])], upper=4)
    return builder.build(offset=1.5)


def every_kind() -> LinearModel:
    """A row and a column of each kind an MPS file tells apart."""
    builder = ModelBuilder()
    shares = builder.columns("share", (4,), lower=[0, -math.inf, -2, 1], upper=[math.inf, 7, 3, 1], cost=1.0)
    whole = builder.columns(
        "whole", (3,), lower=[0, -5, -math.inf], upper=[1, math.inf, math.inf], integer=True
    )
    free = builder.columns("free", (), lower=-math.inf, cost=-0.25)
    builder.rows("range", [(1.5, shares[:2]), (-2, whole[:2])], lower=-3, upper=[4, 5])
    builder.rows("equal", [([1, 2, 1, 0.1], shares[None, :])], lower=2, upper=2)
    builder.rows("least", [(1, whole), (1, np.broadcast_to(free, (3,)))], lower=-1)
    builder.rows("most", [(3, shares[1:])], upper=[1, 2, 3])
    builder.rows("none", [(1, shares[:1])])
    return builder.build(offset=-2.5)


def assert_same(one: LinearModel, other: LinearModel) -> None:
    for name in ("objective", "row_lower", "row_upper", "lower", "upper", "integer"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    np.testing.assert_array_equal(one.matrix.toarray(), other.matrix.toarray())
    assert (one.column_names, one.row_names) == (other.column_names, other.row_names)
    assert one.offset == other.offset


def without_free_rows(model: LinearModel) -> LinearModel:
    kept = np.flatnonzero(np.isfinite(model.row_lower) | np.isfinite(model.row_upper))
    return LinearModel(
        model.objective,
        model.matrix[kept],
        model.row_lower[kept],
        model.row_upper[kept],
        model.lower,
        model.upper,
        model.integer,
        model.column_names,
        tuple(model.row_names[i] for i in kept),
        model.offset,
    )


def test_a_builder_names_columns_and_rows_by_their_place() -> None:
    model = every_kind()
    assert model.column_names[:5] == ("share[0]", "share[1]", "share[2]", "share[3]", "whole[0]")
    assert model.column_names[-1] == "free"
    assert model.row_names[:3] == ("range[0]", "range[1]", "equal[0]")


def test_entries_of_the_same_place_add_up() -> None:
    builder = ModelBuilder()
    x = builder.columns("x", (2,))
    builder.rows("twice", [(1, x), (2, x)], upper=6)
    assert builder.build().matrix.toarray().tolist() == [[3, 0], [0, 3]]


def test_the_objective_counts_the_offset() -> None:
    assert knapsack().objective_value([1, 0, 1]) == -5.5


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1, 0, 1], None),
        ([1, 1, 0], r"row weight\[0\] is 5, outside \[-inf, 4\]"),
        ([0, 0, 2], r"column take\[2\] is 2, outside"),
        ([0.5, 0, 0], r"column take\[0\] is 0.5, not a whole number"),
        ([math.nan, 0, 0], r"column take\[0\] has no finite value"),
        ([0, 0], "2 values for 3 columns"),
    ],
)
def test_a_point_is_judged_by_the_first_thing_it_breaks(values: list[float], reason: str | None) -> None:
    found = knapsack().violation(values)
    assert (found is None) if reason is None else re.search(reason, str(found))


def test_a_solver_may_be_off_by_its_tolerance_but_not_by_more() -> None:
    model = knapsack()
    assert model.rounded([1 + 1e-7, -1e-9, 0.9999999]).tolist() == [1, 0, 1]
    assert model.violation(model.rounded([1 + 1e-7, -1e-9, 0.9999999])) is None
    assert model.violation(model.rounded([1, 0.4, 1])) is None
    assert model.violation(model.rounded([1, 0.6, 1])) is not None


def test_a_model_that_contradicts_itself_is_refused() -> None:
    model = knapsack()
    with pytest.raises(ValueError, match="a name for each"):
        LinearModel(
            model.objective,
            model.matrix,
            model.row_lower,
            model.row_upper,
            model.lower,
            model.upper,
            model.integer,
            ("a", "b"),
            ("r",),
        )
    with pytest.raises(ValueError, match="same name"):
        LinearModel(
            model.objective,
            model.matrix,
            model.row_lower,
            model.row_upper,
            model.lower,
            model.upper,
            model.integer,
            ("a", "b", "a"),
            ("r",),
        )
    with pytest.raises(ValueError, match="finite"):
        LinearModel(
            np.array([math.inf]),
            csr_array((0, 1)),
            np.zeros(0),
            np.zeros(0),
            np.zeros(1),
            np.ones(1),
            np.zeros(1, dtype=np.bool_),
            ("a",),
            (),
        )


def test_an_mps_file_keeps_every_kind_of_row_and_column(tmp_path: Path) -> None:
    write_mps(every_kind(), tmp_path / "model.mps")
    assert_same(read_mps(tmp_path / "model.mps"), without_free_rows(every_kind()))


@st.composite
def models(draw: st.DrawFn) -> LinearModel:
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    number = st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda value: round(value, 6) + 0.0)

    def vector(size: int) -> FloatArray:
        return np.array(draw(st.lists(number, min_size=size, max_size=size)), dtype=np.float64)

    low, low_row = vector(columns), vector(rows)
    width, width_row = np.abs(vector(columns)), np.abs(vector(rows))
    pick = st.sampled_from([-math.inf, 0.0])
    opens = np.array(draw(st.lists(pick, min_size=columns, max_size=columns)))
    return LinearModel(
        vector(columns),
        csr_array(vector(rows * columns).reshape(rows, columns)),
        low_row,
        low_row + width_row,
        low + opens,
        low + width,
        np.array(draw(st.lists(st.booleans(), min_size=columns, max_size=columns)), dtype=np.bool_),
        tuple(f"x[{j}]" for j in range(columns)),
        tuple(f"row.{i}" for i in range(rows)),
        float(vector(1)[0]),
    )


@settings(max_examples=60, deadline=None)
@given(models())
def test_mps_is_a_round_trip(tmp_path_factory: pytest.TempPathFactory, model: LinearModel) -> None:
    path = tmp_path_factory.mktemp("mps") / "model.mps"
    write_mps(model, path)
    back = read_mps(path)
    np.testing.assert_allclose(back.row_lower, model.row_lower, rtol=1e-12, atol=1e-9)
    for name in ("objective", "row_upper", "lower", "upper", "integer", "offset"):
        np.testing.assert_array_equal(getattr(back, name), getattr(model, name), err_msg=name)
    np.testing.assert_array_equal(back.matrix.toarray(), model.matrix.toarray())


def test_a_fixed_mps_file_of_others_is_read(tmp_path: Path) -> None:
    path = tmp_path / "others.mps"
    path.write_text(
        "* a comment\nNAME          TEST\nOBJSENSE\n    MAX\n"
        "ROWS\n N  COST\n L  LIM1\n G  MYEQN\n E  EQ\n N  EXTRA\n"
        "COLUMNS\n    X         COST         1.0   LIM1         1.0\n    X         EXTRA        9.0\n"
        "    MARKER                 'MARKER'                 'INTORG'\n"
        "    Y         COST         2.0   MYEQN        1.0\n    Z         EQ           1.0\n"
        "    MARKER                 'MARKER'                 'INTEND'\n    W         EQ           1.0\n"
        "RHS\n    RHS       LIM1         4.0   MYEQN        1.0\n    RHS       COST         5.0\n"
        "RANGES\n    RNG       LIM1         2.5   MYEQN        3.0\n    RNG       EQ          -2.0\n"
        "BOUNDS\n UP BND       X            4.0\n LI BND       Y           -1\n"
        " UP BND       W           -3.0\nENDATA\n"
    )
    model = read_mps(path)
    assert model.column_names == ("X", "Y", "Z", "W")
    assert model.row_names == ("LIM1", "MYEQN", "EQ")
    assert model.objective.tolist() == [-1, -2, 0, 0]
    assert model.offset == 5.0
    assert model.row_lower.tolist() == [1.5, 1, -2]
    assert model.row_upper.tolist() == [4, 4, 0]
    assert model.lower.tolist() == [0, -1, 0, -math.inf]
    assert model.upper.tolist() == [4, math.inf, 1, -3]
    assert model.integer.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ROWS\n N OBJ\nCOLUMNS\n x OBJ\n", "line 4: a name without its value"),
        ("ROWS\n N OBJ\nCOLUMNS\n x c1 1\n", "line 4: there is no row 'c1'"),
        ("ROWS\n N OBJ\nCOLUMNS\n x OBJ one\n", "line 4: 'one' is not a number"),
        ("ROWS\n Q OBJ\n", "line 2: 'Q OBJ' is not a row"),
        ("ROWS\n N OBJ\nCOLUMNS\n x OBJ 1\nBOUNDS\n UP B y 1\n", "line 6: there is no column 'y'"),
        ("QUADOBJ\n", "line 1: 'QUADOBJ' is no section"),
        ("", "no objective row"),
    ],
)
def test_a_broken_mps_file_is_refused_by_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "broken.mps"
    path.write_text(text)
    with pytest.raises(InputError, match=reason):
        read_mps(path)


def test_a_model_read_back_has_the_same_optimum(tmp_path: Path) -> None:
    write_mps(knapsack(), tmp_path / "model.mps")
    model = read_mps(tmp_path / "model.mps")
    found = milp(
        model.objective,
        integrality=model.integer.astype(int),
        bounds=Bounds(model.lower, model.upper),
        constraints=LinearConstraint(model.matrix.tocsc(), model.row_lower, model.row_upper),
    )
    assert found.fun is not None
    assert found.fun + model.offset == pytest.approx(-6.5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pulp_reads_a_packing_that_we_wrote(tmp_path: Path) -> None:
    write_mps(partition_model([3, 2, 2], 2).model, tmp_path / "packing.mps")
    _, problem = pulp.LpProblem.fromMPS(str(tmp_path / "packing.mps"))
    problem.solve(pulp.PULP_CBC_CMD(msg=False))
    assert pulp.value(problem.objective) == pytest.approx(4)


@pytest.mark.parametrize("value", ["nan", "NaN", "-nan", "one"])
def test_what_is_no_number_in_a_file_is_named_with_its_line(value: str, tmp_path: Path) -> None:
    path = tmp_path / "model.mps"
    path.write_text(f"NAME t\nROWS\n N c\n L r\nCOLUMNS\n x c {value} r 1\nRHS\n RHS r 1\nENDATA\n")
    with pytest.raises(InputError, match=re.escape(f"line 6: {value!r} is not a number")):
        read_mps(path)
