"""The picture of a run: what is drawn where, at every size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import mostly_slow
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.files.disk import InputError
from batchbound.data.problem import Problem
from batchbound.data.report import BUBBLES, DECODE, NO_ARRIVAL, PREFILL, STALL, TAIL, WAITING
from batchbound.data.trace import Trace
from batchbound.data.workload import Workload, numbered_ids
from batchbound.executor.reports.gantt import Panel, gantt, save_gantt
from batchbound.executor.reports.report import report
from batchbound.heuristics.loop import execute
from batchbound.heuristics.policy import UNTIL_CHANGE, Policy, State, Step
from batchbound.heuristics.simulator import Simulator

COST = CostModel(prefill_base=1.0, prefill_per_token=0.5, decode_base=1.0, decode_per_slot=0.5)
COLOURS = {PREFILL: "#c2410c", STALL: "#fdba74", WAITING: "#fda4af", TAIL: "#f1f5f9", NO_ARRIVAL: "#ffffff"}


def first_come(state: State) -> Step:
    chosen = np.flatnonzero(state.waiting)[: len(state.free_slots)]
    return Step(chosen.tolist(), state.free_slots[: len(chosen)].tolist(), UNTIL_CHANGE)


def once_half_empty(state: State) -> Step:
    enough = 2 * len(state.free_slots) >= state.problem.slots
    return first_come(state) if enough else Step(decode_steps=UNTIL_CHANGE)


def panel(problem: Problem, policy: Policy = first_come, bound: Bound | None = None) -> Panel:
    trace = execute(problem, policy, Simulator(problem))
    return Panel("Run", trace, report(problem, trace, bound, trace.makespan))


def random_problem(requests: int, slots: int, last_arrival: float = 0.0) -> Problem:
    rng = np.random.default_rng(requests)
    inputs, outputs = rng.integers(1, 50, requests), rng.integers(1, 60, requests)
    arrival = np.sort(rng.uniform(0, last_arrival, requests))
    return Problem(Workload(numbered_ids(requests), inputs, outputs, arrival), COST, slots=slots)


def rectangles(axis: Axes, colour: str) -> list[list[float]]:
    """Return left, right, top and bottom of everything drawn in a colour."""
    found = []
    for drawn in axis.collections:
        assert isinstance(drawn, PolyCollection)
        if drawn.get_array() is None and np.allclose(np.asarray(drawn.get_facecolor()), to_rgba(colour)):
            corners = [np.asarray(path.vertices) for path in drawn.get_paths()]
            found += [[*each[[0, 2], 0], *np.round(each[[0, 1], 1], 2)] for each in corners]
    return sorted(found)


def drawn_seconds(axis: Axes, cause: str) -> float:
    return sum(right - left for left, right, _, _ in rectangles(axis, COLOURS[cause]))


def test_three_requests_on_two_slots_are_drawn_where_they_ran() -> None:
    # Prefill 0 and 1 (3 s), 2 steps of both (4 s), prefill 2 while 1 pauses (2 s), a step of both (2 s),
    # a decode step of 1 alone (1.5 s).
    problem = Problem(Workload.from_lengths([2, 2, 2], [2, 4, 1]), COST, slots=2)
    axis = gantt(panel(problem, bound=Bound(10.0, "by hand"))).axes[0]
    requests = axis.collections[0]
    assert isinstance(requests, PolyCollection)
    spans = [np.asarray(path.vertices)[[0, 2], 0].tolist() for path in requests.get_paths()]
    assert spans == [[0.0, 7.0], [0.0, 12.5], [7.0, 11.0]]
    assert rectangles(axis, COLOURS[PREFILL]) == [
        [0, 3, -0.43, 0.43],
        [0, 3, 0.57, 1.43],
        [7, 9, -0.43, 0.43],
    ]
    assert [band[:2] for band in rectangles(axis, COLOURS[STALL])] == [[0, 3], [7, 9]]
    assert rectangles(axis, COLOURS[TAIL]) == [[11, 12.5, -0.5, 0.5]]
    assert axis.lines[0].get_xdata() == pytest.approx([10, 10])
    assert "12.5 s, 25.00 % above the proven bound of 10 s" in axis.get_title(loc="left")
    assert [text.get_text() for text in axis.texts[1:]] == ["0", "1", "2"]


@pytest.mark.parametrize("policy", [first_come, once_half_empty])
@pytest.mark.parametrize("last_arrival", [0.0, 900.0])
def test_the_idle_time_drawn_is_the_idle_time_reported(policy: Policy, last_arrival: float) -> None:
    drawn = panel(random_problem(40, 4, last_arrival), policy)
    axis = gantt(drawn).axes[0]
    for cause in (WAITING, TAIL, NO_ARRIVAL):
        assert drawn_seconds(axis, cause) == pytest.approx(drawn.report.slot_seconds[cause])


def test_plan_and_run_stand_below_each_other_over_the_same_seconds() -> None:
    problem = random_problem(20, 3)
    above, below = panel(problem), panel(problem, once_half_empty)
    figure = gantt(Panel("Plan", above.trace, above.report), below)
    assert [axis.get_title(loc="left")[:4] for axis in figure.axes[:2]] == ["Plan", "Run:"]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


@pytest.mark.parametrize(
    ("requests", "slots"), [(1, 1), (50, 4), pytest.param(2000, 200, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", mostly_slow(["png", "svg"], fast=["svg"]))
def test_a_picture_of_every_size_is_written(requests: int, slots: int, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"gantt.{kind}"
    save_gantt(path, panel(random_problem(requests, slots), bound=Bound(1.0, "by hand")))
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert path.stat().st_size < 2_000_000


def test_the_same_run_gives_the_same_file(tmp_path: Path) -> None:
    drawn = panel(random_problem(20, 3))
    for name in ("a.svg", "b.svg"):
        save_gantt(tmp_path / name, drawn)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("kind", mostly_slow(["png", "svg"], fast=["svg"]))
def test_names_in_every_script_are_drawn_in_silence(kind: str, tmp_path: Path) -> None:
    names = np.array(["é漢", "🎉"])
    drawn = panel(Problem(Workload(names, np.array([2, 2]), np.array([9, 9])), COST, slots=2))
    save_gantt(tmp_path / f"gantt.{kind}", drawn)
    assert (tmp_path / f"gantt.{kind}").stat().st_size > 1000


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a picture is a \.png or a \.svg file"):
        save_gantt(tmp_path / "gantt.bmp", panel(random_problem(2, 1)))
    assert not list(tmp_path.iterdir())


def test_a_run_that_had_nothing_left_to_do_is_an_empty_picture() -> None:
    problem = random_problem(2, 2)
    nothing = np.zeros(0)
    none = np.zeros(0, dtype=np.int64)
    trace = Trace((), 2, (), none, none, nothing, nothing, nothing, nothing, none)
    result = report(problem, trace, None, None)
    assert (result.makespan, result.requests, result.resumed) == (0.0, 0, 2)
    assert sum(result.slot_seconds[cause] for cause in (DECODE, PREFILL, *BUBBLES)) == 0
    assert not gantt(Panel("Run", trace, result)).axes[0].collections
