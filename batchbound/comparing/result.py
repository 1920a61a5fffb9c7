"""Results of a comparison: table, performance profile, gaps over time."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..data.bound import gap_above
from ..models.formulations.linear_model import TOLERANCE
from ..solvers.result import Status

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

NOT_APPLICABLE = "not applicable"
"""Status of a solver that does not take the instance."""

NOT_INSTALLED = "not installed"
"""Status of a solver without its library."""

NOT_STARTED = "not started"
"""Status of a solver whose limit or crash came before its model was built."""

BEST_KNOWN = "best known"
"""Solver name in the row of an instance's own plan."""


NO_EVICTIONS = "of schedules that evict no request"
"""Restriction of a bound that holds for schedules without evictions."""

_LEFT_OUT = (NOT_APPLICABLE, NOT_INSTALLED)
"""Statuses of solvers that an instance does not count against."""

OPTIMAL_UNEVICTED = "least without evictions"
"""Status of an optimal schedule that an evicting policy beats."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Outcome of one solver on one instance.

    value: Makespan in seconds, or objective of a linear model; None without a solution.
    bound: Best lower bound proven in the run, by the solver or by us; None without one.
    gap: Gap to the best valid bound, as a fraction; None without one.
    seconds: Wall-clock seconds of the solver, or None if unknown.
    status, stopped_by: Outcome, and reason for the end.
    message: Remark for the user; may be empty.
    bound_source: Argument that proves the bound, or backend that claims it.
    improvements: Seconds since the start and value of each improvement.
    evictions: Number of requests that a policy evicted.
    """

    instance: str
    solver: str
    value: float | None
    bound: float | None
    gap: float | None
    seconds: float | None
    status: str
    stopped_by: str
    version: str
    message: str = ""
    bound_source: str = ""
    improvements: tuple[tuple[float, float], ...] = ()
    evictions: int = 0


_COLUMNS = tuple(field.name for field in fields(Measurement) if field.name != "improvements")


@dataclass(frozen=True, slots=True)
class Comparison:
    """All measurements, instance by instance."""

    rows: tuple[Measurement, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield a line for each instance with its best bound, and one below it for each solver."""
        for instance in dict.fromkeys(row.instance for row in self.rows):
            rows = [row for row in self.rows if row.instance == instance]
            bounds = [(row.bound, row.bound_source) for row in rows if row.bound is not None]
            yield f"{instance}: " + ("no bound" if not bounds else "bound {:,.3f} ({})".format(*max(bounds)))
            yield f"  {'solver':<28}{'value':>13}{'gap':>9}{'seconds':>10}  status"
            for row in rows:
                value = "" if row.value is None else f"{row.value:,.3f}"
                gap = "" if row.gap is None else f"{row.gap:.2%}"
                seconds = "" if row.seconds is None else f"{row.seconds:,.2f}"
                yield f"  {row.solver:<28}{value:>13}{gap:>9}{seconds:>10}  {row.status}"
            yield from _remarks(rows)

    def to_csv(self) -> str:
        """Return the table as CSV."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for row in self.rows:
            cells = [getattr(row, name) for name in _COLUMNS]
            writer.writerow(["" if cell is None else cell for cell in cells])
        return text.getvalue()

    def to_markdown(self) -> str:
        """Return the table in Markdown, with rounded numbers."""
        lines = [
            "| instance | solver | value | bound | gap | seconds | status | version |",
            "|---|---|---:|---:|---:|---:|---|---|",
        ]
        for row in self.rows:
            value, bound = ("" if number is None else f"{number:.3f}" for number in (row.value, row.bound))
            seconds = "" if row.seconds is None else f"{row.seconds:.2f}"
            bound += f" ({row.bound_source})" if row.bound_source else ""
            gap = "" if row.gap is None else f"{row.gap:.2%}"
            cells = (
                row.instance,
                row.solver,
                value,
                bound,
                gap,
                seconds,
                row.status,
                row.version,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines) + "\n"

    def to_json(self) -> list[dict[str, object]]:
        """Return the measurements as plain JSON values."""
        return [
            {name: getattr(row, name) for name in _COLUMNS}
            | {"improvements": [list(step) for step in row.improvements]}
            for row in self.rows
        ]

    def ratios(self, by: Literal["value", "seconds"] = "value") -> dict[str, list[float]]:
        """Return each solver's performance ratios (Dolan and More 2002, section 2).

        The ratio on an instance is the solver's measure over the least of all solvers. It is infinite without
        a solution, or, by seconds, without a proof of optimality. Instances that a solver does not take are
        left out. Linear models with values of zero or less can only be compared by seconds.
        """
        found: dict[str, list[float]] = {row.solver: [] for row in self.rows}
        for instance in dict.fromkeys(row.instance for row in self.rows):
            asked = [row for row in self.rows if row.instance == instance and row.status not in _LEFT_OUT]
            measures = {row.solver: _measure(row, by) for row in asked}
            least = min(measures.values(), default=math.inf)
            for solver, measure in measures.items():
                found[solver].append(measure / least if 0 < least < math.inf else math.inf)
        return found

    def plot_profile(self, path: str | os.PathLike[str]) -> None:
        """Draw the performance profile as an image.

        It shows the share of instances within a percentage of the least makespan, on a log axis from 0.1 %.
        """
        ratios = self.ratios()
        finite = [ratio for of_solver in ratios.values() for ratio in of_solver if ratio < math.inf]
        end = max(1.0, 1.3 * 100 * (max([*finite, 1.0]) - 1))
        figure = _figure()
        axes = figure.subplots()
        for solver, of_solver in ratios.items():
            if not of_solver:
                continue
            steps = np.sort([ratio for ratio in of_solver if ratio < math.inf])
            share = np.arange(len(steps) + 1) / len(of_solver)
            places = 100 * (steps - 1)
            axes.step([0.0, *places, end], [0.0, *share[1:], share[-1]], where="post", label=solver)
        axes.set_xscale("symlog", linthresh=0.1, linscale=0.4)
        axes.set(xlabel="% above the least makespan")
        axes.set(xlim=(0.0, end), ylim=(0, 1.02), ylabel="share of instances")
        _plain_ticks(axes.xaxis)
        figure.legend(loc="outside upper center", ncols=3, fontsize="small")
        figure.savefig(path)

    def plot_over_time(self, path: str | os.PathLike[str]) -> None:
        """Draw the gaps over time as an image with log axes."""
        figure = _figure()
        axes = figure.subplots()
        solvers = list(dict.fromkeys(row.solver for row in self.rows))
        labelled: set[str] = set()
        best: dict[str, float] = {}
        for row in self.rows:
            if row.bound is not None:
                best[row.instance] = max(row.bound, best.get(row.instance, -math.inf))
        for row in self.rows:
            if row.gap is None or row.value is None or not row.improvements:
                continue
            bound = row.bound if row.evictions and row.bound is not None else best[row.instance]
            times, values = zip(*row.improvements, strict=True)
            times = tuple(max(each, _LEAST_SECONDS) for each in times)
            gaps = [100 * (gap_above(value, bound) or 0.0) for value in (*values, values[-1])]
            label = "_" + row.solver if row.solver in labelled else row.solver
            labelled.add(row.solver)
            colour = f"C{solvers.index(row.solver) % 10}"
            axes.step(
                [*times, max(row.seconds or 0.0, times[-1])], gaps, where="post", color=colour, label=label
            )
            axes.plot([times[-1]], [gaps[-1]], "o", color=colour, markersize=3)
        axes.set(xlabel="seconds", ylabel="gap to the best bound (%)", xscale="log")
        axes.set_yscale("symlog", linthresh=0.1, linscale=0.4)
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        _plain_ticks(axes.xaxis)
        _plain_ticks(axes.yaxis)
        if labelled:
            figure.legend(loc="outside upper center", ncols=3, fontsize="small")
        figure.savefig(path)


def _remarks(rows: Sequence[Measurement]) -> Iterator[str]:
    """Yield which bound holds for runs that evict, and which rows beat the best known."""
    for row in rows:
        if row.evictions:
            against = "no bound" if row.bound is None else f"{row.bound:,.3f}, a bound that allows them"
            yield f"  {row.solver}, evictions: {row.evictions:,}; its gap is to {against}"
    known = next((row.value for row in rows if row.solver == BEST_KNOWN), None)
    shorter = [(row.value, row.solver) for row in rows if row.value is not None and not row.evictions]
    if known is not None and shorter and min(shorter)[0] < known - TOLERANCE * known:
        value, solver = min(shorter)
        yield f"  {solver} beats the library's best known by {known - value:,.3f} ({1 - value / known:.2%})"


def with_gaps(rows: Sequence[Measurement]) -> list[Measurement]:
    """Return an instance's measurements with gaps to their best bound."""
    best = max((row.bound for row in rows if row.bound is not None), default=None)
    evicting = min((row.value for row in rows if row.evictions and row.value is not None), default=math.inf)
    return [_with_gap(row, best, evicting) for row in rows]


def _with_gap(row: Measurement, best: float | None, evicting: float) -> Measurement:
    """Return a measurement with its gap.

    ``evicting`` is the least makespan with evictions.
    """
    if row.evictions:
        return replace(row, gap=None if row.value is None else gap_above(row.value, row.bound))
    source = row.bound_source
    if row.bound is not None and evicting < math.inf and not source.endswith(NO_EVICTIONS):
        source = f"{source}, {NO_EVICTIONS}"
    beaten = row.status == Status.OPTIMAL and row.value is not None and evicting < row.value
    return replace(
        row,
        gap=None if row.value is None or best is None else gap_above(row.value, best),
        bound_source=source,
        status=OPTIMAL_UNEVICTED if beaten else row.status,
    )


def _measure(row: Measurement, by: Literal["value", "seconds"]) -> float:
    if row.value is None or (by == "seconds" and row.status != Status.OPTIMAL):
        return math.inf
    measure = row.value if by == "value" else row.seconds
    return math.inf if measure is None else measure


_LEAST_SECONDS = 1e-3
"""Start of the log axis, in seconds."""


def _plain_ticks(axis: Axis) -> None:
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def _figure() -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
