"""Every backend on every formulation and status, and workers whose solver crashes, hangs or lies."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
from builders import mostly_slow

from batchbound.data.arrays import FloatArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.models.formulations.full_model import (
    literal_model,
    read_schedule,
    repaired_model,
    write_schedule,
)
from batchbound.models.formulations.linear_model import LinearModel, ModelBuilder
from batchbound.models.formulations.partition_model import (
    partition_model,
    write_partition,
)
from batchbound.models.formulations.slot_free import read_slot_free, slot_free_model
from batchbound.solvers.backends import worker
from batchbound.solvers.backends.backend import BACKENDS, Answer, Backend
from batchbound.solvers.backends.linear import BackendError, LinearResult, solve_linear
from batchbound.solvers.result import Limits, Status, StoppedBy

ENOUGH = Limits(seconds=60.0, threads=2)
"""So much that it is not what stops a tiny model; and no backend may mind two threads."""


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend of the table. All their libraries are dependencies of ours."""
    name = str(request.param)
    assert BACKENDS[name].installed
    return name


HERE = pytest.mark.usefixtures("solve_here")
LINEAR_AND_WHOLE = pytest.mark.parametrize(
    "backend", mostly_slow(sorted(BACKENDS), fast=("highs", "ortools-cp-sat"))
)
SEVERAL = pytest.mark.parametrize("backend", mostly_slow(sorted(BACKENDS), fast=("highs",)))
"""Of tests that solve for longer, or more than once."""


def whole_numbers() -> LinearModel:
    """Columns with negative bounds, a row with two sides, one with none, and an offset."""
    builder = ModelBuilder()
    x = builder.columns("x", (3,), lower=[-2, 0, -3], upper=[5, 2, 3], integer=True, cost=[2, -3, 1])
    builder.rows("range", [([[1, 1, 0]], x[None, :])], lower=1, upper=4)
    builder.rows("equal", [([[1, 0, -1]], x[None, :])], lower=1, upper=1)
    builder.rows("any", [(1, x[None, :])])
    return builder.build(offset=10.0)


def optimum(model: LinearModel) -> float:
    """Return the least objective by trying every point."""
    ranges = [range(int(low), int(high) + 1) for low, high in zip(model.lower, model.upper, strict=True)]
    points = (np.array(point, dtype=np.float64) for point in itertools.product(*ranges))
    return min(model.objective_value(point) for point in points if model.violation(point) is None)


def unbounded(*, integer: bool) -> LinearModel:
    builder = ModelBuilder()
    x = builder.columns("x", (2,), integer=integer, cost=-1)
    builder.rows("apart", [([[1, -1]], x[None, :])], upper=3)
    return builder.build()


def odd_sum() -> LinearModel:
    """Two even numbers never make three, though two reals do."""
    builder = ModelBuilder()
    x = builder.columns("x", (2,), upper=5, integer=True, cost=1)
    builder.rows("odd", [(2, x[None, :])], lower=3, upper=3)
    return builder.build()


def market_split() -> LinearModel:
    """Five equations over 40 yes-or-no columns: too hard to solve or refute here (Cornuejols and Dawande)."""
    weights = np.random.default_rng(1).integers(0, 100, (5, 40))
    builder = ModelBuilder()
    x = builder.columns("x", (40,), upper=1, integer=True)
    half = weights.sum(axis=1) // 2
    builder.rows("split", [(weights, np.broadcast_to(x, weights.shape))], lower=half, upper=half)
    return builder.build()


def loads(count: int = 40, machines: int = 7) -> tuple[LinearModel, FloatArray]:
    """Balance weights over machines: easy to solve, hard to prove. And all of them on one machine."""
    weights = np.random.default_rng(1).integers(100, 1000, count)
    packing = partition_model(weights, machines)
    return packing.model, write_partition(packing, weights, np.zeros(count, dtype=np.int64))


def three_requests() -> Problem:
    """Lengths 3, 2 and 1 on two slots: all in three steps and two stages, 50 + 87 ms and the constant."""
    cost = CostModel(prefill_base=0.025, prefill_per_token=0.0, decode_base=0.029, decode_per_slot=0.0)
    return Problem(Workload.from_lengths([10, 20, 30], [3, 2, 1]), cost, slots=2)


@HERE
def test_an_optimum_is_found_and_proven(backend: str) -> None:
    model = whole_numbers()
    found = solve_linear(model, backend, ENOUGH)
    assert (found.status, found.stopped_by) == (Status.OPTIMAL, StoppedBy.PROOF)
    assert found.values is not None
    assert found.objective == model.objective_value(found.values) == optimum(model)
    assert found.bound == pytest.approx(optimum(model))
    assert found.backend == backend
    assert any(letter.isdigit() for letter in found.version)


@HERE
@LINEAR_AND_WHOLE
def test_an_integer_model_without_solution_is_infeasible(backend: str) -> None:
    found = solve_linear(odd_sum(), backend, ENOUGH)
    assert (found.status, found.values, found.objective, found.bound) == (Status.INFEASIBLE, None, None, None)


@HERE
@LINEAR_AND_WHOLE
@pytest.mark.parametrize("integer", [False, True])
def test_an_unbounded_model_has_neither_value_nor_bound(backend: str, integer: bool) -> None:
    model = unbounded(integer=integer)
    if BACKENDS[backend].whole_numbers_only:
        with pytest.raises(BackendError, match="continuous" if not integer else "bounded"):
            solve_linear(model, backend, ENOUGH)
        return
    found = solve_linear(model, backend, ENOUGH)
    assert (found.status, found.values, found.objective, found.bound) == (Status.UNBOUNDED, None, None, None)


@HERE
@LINEAR_AND_WHOLE
@pytest.mark.parametrize("integer", [False, True])
def test_a_model_without_bounds_below_is_unbounded(backend: str, integer: bool) -> None:
    builder = ModelBuilder()
    x = builder.columns("x", (2,), lower=-np.inf, integer=integer, cost=[-1, -2])
    builder.rows("together", [(1, x[None, :])], upper=3)
    model = builder.build()
    if BACKENDS[backend].whole_numbers_only:
        with pytest.raises(BackendError, match="can't be asked"):
            solve_linear(model, backend, ENOUGH)
        return
    found = solve_linear(model, backend, ENOUGH)
    assert (found.status, found.stopped_by, found.message) == (Status.UNBOUNDED, StoppedBy.PROOF, "")


@HERE
@pytest.mark.slow
def test_a_bound_that_cbc_prints_rounded_up_is_below_the_optimum() -> None:
    rng, add = np.random.default_rng(8), ModelBuilder()
    x = add.columns("x", (30,), upper=1, integer=True, cost=1e-4 * rng.uniform(0.5, 1.5, 30).round(4))
    sizes = rng.integers(0, 60, (3, 30))
    half = sizes.sum(axis=1) // 2
    add.rows("half", [(sizes, np.broadcast_to(x, (3, 30)))], lower=half - 1, upper=half + 1)
    model = add.build()
    found = solve_linear(model, "cbc", Limits(work=1))
    assert found.bound is not None
    proven = solve_linear(model, "scip", ENOUGH).objective
    assert proven is not None
    assert proven == pytest.approx(0.00099567)
    assert 0.0009 < found.bound < proven


@SEVERAL
def test_a_time_limit_without_incumbent_leaves_nothing(backend: str) -> None:
    found = solve_linear(market_split(), backend, Limits(seconds=0.4))
    assert (found.status, found.stopped_by) == (Status.NO_SOLUTION, StoppedBy.TIME)
    assert (found.values, found.objective) == (None, None)
    assert found.bound is None or found.bound <= 0


@HERE
@pytest.mark.slow
def test_a_time_limit_with_incumbent_is_not_an_optimum(backend: str) -> None:
    model, _ = loads()
    found = solve_linear(model, backend, Limits(seconds=1.5))
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.TIME)
    assert found.values is not None
    assert model.violation(found.values) is None
    assert found.bound is not None
    assert found.objective is not None
    assert found.bound < found.objective


def test_a_solver_that_stops_somewhat_early_was_stopped_by_its_seconds_if_they_are_its_only_limit() -> None:
    desk = worker.Desk(lambda message: None, 60.0)
    assert desk.what_stopped(None) is StoppedBy.TIME
    assert desk.what_stopped(5) is StoppedBy.WORK
    assert worker.Desk(lambda message: None, None).what_stopped(None) is None


@HERE
@pytest.mark.slow
@SEVERAL
def test_one_thread_and_a_work_limit_repeat_exactly(backend: str) -> None:
    model, start = loads(20, 4)
    limits = Limits(work=5, seed=3)
    one, other = (solve_linear(model, backend, limits, start) for _ in range(2))
    assert one.status is Status.FEASIBLE
    assert one.stopped_by is StoppedBy.WORK
    assert one.values is not None
    np.testing.assert_array_equal(one.values, other.values)
    assert (one.objective, one.bound) == (other.objective, other.bound)


@SEVERAL
def test_ctrl_c_returns_the_incumbent(backend: str, press_ctrl_c: Callable[[str, float], None]) -> None:
    model, start = loads()
    press_ctrl_c("listen", 1.0)
    begun = time.monotonic()
    found = solve_linear(model, backend, Limits(seconds=60.0), start)
    assert time.monotonic() - begun < 10
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.INTERRUPT)
    assert found.values is not None
    assert model.violation(found.values) is None


@pytest.mark.parametrize("name", mostly_slow(sorted(set(BACKENDS) - {"cbc"}), fast=("ortools-scip",)))
def test_a_backend_that_runs_here_hands_its_best_solution_over_on_the_way(name: str) -> None:
    model, _ = loads(20, 4)
    outcome = worker.run_in_worker(
        "batchbound.solvers.backends.backend",
        "solve_here",
        (BACKENDS[name], model, Limits(work=5), None),
        60.0,
    )
    assert isinstance(outcome.answer, Answer)
    handed, last = outcome.reports["incumbent"], outcome.answer.values
    assert isinstance(handed, np.ndarray)
    assert last is not None
    assert model.violation(model.rounded(handed)) is None
    assert model.objective_value(handed) == pytest.approx(model.objective_value(last))


def test_ctrl_c_before_a_backend_has_begun_returns_the_start(
    monkeypatch: pytest.MonkeyPatch, press_ctrl_c: Callable[[str, float], None]
) -> None:
    model, start = loads()
    # A worker that is slow to begin reads nothing, so that a large model fills the pipe to it.
    monkeypatch.setattr(worker, "_BOOT", "import time; time.sleep(60)")
    bulk = replace(model, column_names=tuple(f"{name}{'x' * 9999}" for name in model.column_names))
    press_ctrl_c("hold", 0.5)
    found = solve_linear(bulk, "highs", Limits(seconds=60.0), start)
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.INTERRUPT)
    assert found.objective == model.objective_value(start)


@HERE
@SEVERAL
def test_every_formulation_agrees_on_three_requests(backend: str) -> None:
    problem = three_requests()
    least = 2 * 0.025 + 3 * 0.029
    free = slot_free_model(problem)
    found = solve_linear(free.model, backend, ENOUGH)
    assert found.status is Status.OPTIMAL
    assert found.values is not None
    schedule = read_slot_free(free, found.values)
    assert schedule.check(problem) is None
    assert found.objective == pytest.approx(least)
    assert schedule.makespan(problem) == pytest.approx(least)
    full = repaired_model(problem)
    if BACKENDS[backend].whole_numbers_only:
        with pytest.raises(BackendError, match="is continuous"):
            solve_linear(full.model, backend, ENOUGH)
        return
    start = write_schedule(full, schedule)
    found = solve_linear(full.model, backend, ENOUGH, start)
    assert found.status is Status.OPTIMAL
    assert found.values is not None
    assert found.objective == pytest.approx(least)
    assert read_schedule(full, found.values).check(problem) is None


@HERE
@SEVERAL
def test_the_literal_model_is_solved_by_all_though_not_meant(backend: str) -> None:
    full = literal_model(three_requests(), bins=2)
    if not BACKENDS[backend].whole_numbers_only:
        assert solve_linear(full.model, backend, ENOUGH).status is Status.OPTIMAL


@HERE
@SEVERAL
def test_both_bin_packings_agree(backend: str) -> None:
    weights = np.array([7, 5, 4, 4, 3, 1])
    packing = partition_model(weights, 2)
    found = solve_linear(packing.model, backend, ENOUGH)
    assert (found.status, found.objective) == (Status.OPTIMAL, 12)
    assert found.values is not None
    assert np.bincount(found.values[packing.x].argmax(axis=1), weights=weights).tolist() == [12, 12]


def test_a_backend_is_not_asked_what_it_cannot_be_trusted_with() -> None:
    builder = ModelBuilder()
    x = builder.columns("x", (2,), upper=3, integer=True, cost=[1.0, 1 / 3])
    builder.rows("r", [(1, x[None, :])], lower=1)
    with pytest.raises(BackendError, match="multiples of 1e-9"):
        solve_linear(builder.build(), "ortools-cp-sat")
    with pytest.raises(BackendError, match="there is no backend 'gurobi'"):
        solve_linear(builder.build(), "gurobi")


def test_a_start_that_is_no_solution_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the start is not a solution: row odd\[0\]"):
        solve_linear(odd_sum(), "highs", start=[1, 1])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "absent", fake("absent", imports="no_such_library"))
    with pytest.raises(ImportError, match="the backend 'absent' needs the package 'numpy'"):
        solve_linear(whole_numbers(), "absent")


def fake(module: str, imports: str = "json") -> Backend:
    return Backend(name=module, module=module, imports=imports, distribution="numpy")


Faker = Callable[[str], Callable[..., LinearResult]]


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faker:
    """Make a backend of the body of its ``solve`` and return a call to it."""

    def make(body: str) -> Callable[..., LinearResult]:
        head = """
            import os, signal, sys, time
            import numpy as np
            from batchbound.solvers.backends.backend import Answer
            from batchbound.solvers.result import Status, StoppedBy

            def solve(backend, model, limits, start, desk):
        """
        text = textwrap.dedent(head) + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"
        (tmp_path / "faked_backend.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "faked_backend", raising=False)
        monkeypatch.setitem(BACKENDS, "faked", fake("faked_backend"))
        model = loads()[0]
        return lambda **limits: solve_linear(model, "faked", Limits(**limits))

    return make


ALL_ON_ONE = "point = np.zeros(model.columns); point[:280:7] = 1; point[[280, 287]] = 21733"


def test_a_solver_that_dies_is_a_crash_not_an_exception(faked: Faker) -> None:
    found = faked("os.kill(os.getpid(), signal.SIGSEGV)")()
    assert (found.status, found.stopped_by) == (Status.NO_SOLUTION, StoppedBy.CRASH)
    assert "SIGSEGV" in found.message


def test_a_solver_that_raises_is_a_crash_with_its_message(faked: Faker) -> None:
    found = faked("raise AttributeError('canonical_code')")()
    assert (found.status, found.stopped_by) == (Status.NO_SOLUTION, StoppedBy.CRASH)
    assert found.message == "AttributeError: canonical_code"


def test_a_crash_keeps_what_was_handed_over(faked: Faker) -> None:
    found = faked(f"{ALL_ON_ONE}\ndesk.report('incumbent', point)\nos._exit(3)")()
    assert (found.status, found.stopped_by, found.objective) == (Status.FEASIBLE, StoppedBy.CRASH, 21733)
    assert "exit status 3" in found.message


@pytest.mark.slow
def test_a_solver_that_hangs_is_killed_with_its_children(faked: Faker, tmp_path: Path) -> None:
    child = tmp_path / "child"
    body = f"""
        import subprocess
        {ALL_ON_ONE}
        desk.report('incumbent', point)
        desk.report('bound', 5.0)
        sleeper = subprocess.Popen(['sleep', '600'])
        open({str(child)!r}, 'w').write(str(sleeper.pid))
        while True:
            time.sleep(600)
    """
    begun = time.monotonic()
    found = faked(body)(seconds=10.0)
    assert time.monotonic() - begun < 20
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.TIME)
    assert found.message == "it did not stop at its limit, and was ended"
    assert (found.objective, found.bound) == (21733, 5.0)
    assert_ends(int(child.read_text()))


def test_a_solver_that_is_asked_to_stop_may_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GRACE_AT_LIMIT", (60.0, 0.0))
    here, there = Pipe()

    def solver() -> None:
        assert pickle.loads(there.recv_bytes()) == "stop"
        there.send_bytes(pickle.dumps(("answer", 7)))

    call, thread = worker._Call(here, 0.01), threading.Thread(target=solver)
    there.send_bytes(pickle.dumps(("ready", time.monotonic())))
    thread.start()
    call.listen()
    thread.join()
    assert (call.answer, call.stopped_by, call.message) == (7, StoppedBy.TIME, "")


def test_ctrl_c_beside_a_worker_asks_it_to_hand_over() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    here, there = Pipe()
    there.send_bytes(pickle.dumps(("answer", 7)))
    call = worker._Call(here, 60.0)
    call.hold(["the task"], interrupted)
    assert [pickle.loads(there.recv_bytes()) for _ in range(2)] == ["the task", "stop"]
    assert (call.answer, call.stopped_by) == (7, StoppedBy.INTERRUPT)


def test_a_limit_counts_from_the_import_of_a_library_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "START_UP_SECONDS", 0.01)
    here, there = Pipe()
    call = worker._Call(here, 60.0)
    call.listen()
    assert pickle.loads(there.recv_bytes()) == "stop"
    assert (call.answer, call.stopped_by) == (None, StoppedBy.HANG)
    assert call.message == "its library did not load within 0.01 s"
    # Its import took 100 s of the monotonic clock; 60 more are left.
    desk, call = worker.Desk(there.send, 60.0), worker._Call(here, 60.0)
    desk.deadline = 0.0
    desk.ready()
    call._take(here.recv())
    assert call.deadline == desk.deadline
    assert desk.remaining() == pytest.approx(60.0, abs=50.0)


def test_what_a_library_prints_disturbs_nobody(faked: Faker, capfd: pytest.CaptureFixture[str]) -> None:
    found = faked("print('x' * 100000); os.system('echo noise >&2'); return Answer(Status.INFEASIBLE)")()
    assert found.status is Status.INFEASIBLE
    assert capfd.readouterr() == ("", "")


@HERE
@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ("Answer(Status.OPTIMAL, None, point * 2, 3.0)", Status.NO_SOLUTION, "was refused: column"),
        ("Answer(Status.OPTIMAL, None, point, 1e4)", Status.FEASIBLE, "is not what its solution gives"),
        ("Answer(Status.OPTIMAL, None, point, 2e5)", Status.FEASIBLE, "is above a checked solution"),
        ("Answer(Status.INFEASIBLE, None, point)", Status.FEASIBLE, "calls the model infeasible"),
        ("Answer(Status.OPTIMAL)", Status.NO_SOLUTION, ""),
        ("Answer(None, StoppedBy.TIME, None, -1e20)", Status.NO_SOLUTION, ""),
        ("Answer(None, StoppedBy.TIME, None, float('nan'))", Status.NO_SOLUTION, ""),
    ],
)
def test_a_solver_that_errs_is_not_believed(faked: Faker, answer: str, status: Status, message: str) -> None:
    found = faked(f"{ALL_ON_ONE}\nreturn {answer}")()
    assert found.status is status
    assert message in found.message
    if status is Status.NO_SOLUTION:
        assert found.bound in (None, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ortools", "highspy"])
def test_highs_and_or_tools_live_in_one_process(first: str) -> None:
    """Up to 1.15 highspy had a library of the name of one of OR-Tools', and whichever came second failed."""
    code = textwrap.dedent("""
        import importlib, sys
        import numpy as np
        loads = {"ortools": "ortools.math_opt.python.mathopt", "highspy": "batchbound.models.programme"}
        importlib.import_module(loads.pop(sys.argv[1]))
        importlib.import_module(*loads.values())
        from ortools.math_opt.python import mathopt
        from ortools.sat.python import cp_model
        from batchbound.models.programme import Programme
        ours = Programme.within(-np.ones(2), np.array([[1.0, 2.0], [3.0, 1.0]]), np.array([4.0, 6.0]))
        for solver in (mathopt.SolverType.HIGHS, mathopt.SolverType.GSCIP):
            assert abs(ours.solved(interior=True).cost + 2.8) < 1e-9
            assert abs(ours.solved_whole().sum() - 2.0) < 1e-9
            model = mathopt.Model()
            x, y = (model.add_variable(lb=0) for _ in range(2))
            model.add_linear_constraint(x + 2 * y <= 4)
            model.add_linear_constraint(3 * x + y <= 6)
            model.maximize(x + y)
            assert abs(mathopt.solve(model, solver).objective_value() - 2.8) < 1e-9
        assert cp_model.CpSolver().solve(cp_model.CpModel()) == cp_model.OPTIMAL
    """)
    done = subprocess.run([sys.executable, "-c", code, first], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_worker_does_not_outlive_its_parent(tmp_path: Path) -> None:
    (tmp_path / "sleeping_backend.py").write_text(
        textwrap.dedent(f"""
            import os, time
            def solve(backend, model, limits, start, desk):
                open({str(tmp_path / "pid.new")!r}, 'w').write(str(os.getpid()))
                os.rename({str(tmp_path / "pid.new")!r}, {str(tmp_path / "pid")!r})
                time.sleep(600)
        """)
    )
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from dataclasses import replace
        from batchbound.models.formulations.partition_model import partition_model
        from batchbound.solvers.backends.backend import BACKENDS
        from batchbound.solvers.backends.linear import solve_linear
        BACKENDS["asleep"] = replace(BACKENDS["highs"], module="sleeping_backend", imports="json")
        solve_linear(partition_model([1, 2], 2).model, "asleep")
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    worker = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    assert_ends(worker)


def assert_ends(pid: int) -> None:
    # A process that was killed is gone once the system has had a moment for it.
    deadline = time.monotonic() + 20
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(pid)


def is_gone(pid: int) -> bool:
    """Return whether the process has ended (waiting to be reaped counts)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
