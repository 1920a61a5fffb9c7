"""Picture of a run: slots downwards, seconds to the right."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.costs.cost import CostModel
from ...data.files.disk import InputError, atomic_write
from ...data.report import BETWEEN, BUBBLES, BUSY, DECODE, NO_ARRIVAL, PREFILL, STALL, TAIL, WAITING, Report
from ...data.trace import Trace
from .bubbles import IdleCauses, idle_causes, slot_seconds, stage_edges
from .report import in_model_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

_COLOURS: Final = {
    DECODE: "#4a90c4",
    PREFILL: "#c2410c",
    STALL: "#fdba74",
    WAITING: "#fda4af",
    TAIL: "#f1f5f9",
    NO_ARRIVAL: "#ffffff",
    BETWEEN: "#334155",
}
_HATCHES: Final = {
    WAITING: ("////", "#be123c"),
    TAIL: ("\\\\\\\\", "#cbd5e1"),
    NO_ARRIVAL: ("...", "#cbd5e1"),
}
WORDS: Final = {
    DECODE: "decoding",
    PREFILL: "being prefilled",
    STALL: "paused by a prefill",
    WAITING: "idle, requests wait",
    TAIL: "idle, none left to start",
    NO_ARRIVAL: "idle, none has arrived",
    BETWEEN: "between stages",
}
"""Legend texts for the uses of slots."""
_LABELLED: Final = 80
"""Most requests with names in their bars."""
_OUTLINED: Final = 200
"""Most requests with every prefill at least a line wide."""
_HATCHED: Final = 500
"""Idle times of a cause above which hatches are left out."""
_VECTOR: Final = 1500
"""Most requests with separate bars in an SVG."""


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """Run in the picture.

    title: Title of the panel, "Plan" or "Run".
    trace: Trace of the run in model seconds, or of the simulation of a schedule.
    measured: Seconds of the run on its machine's clock; None if simulated.
    """

    title: str
    trace: Trace
    report: Report
    measured: float | None = None

    @classmethod
    def of(cls, title: str, cost: CostModel, trace: Trace, report: Report) -> Panel:
        """Return a run's panel on the cost model's clock."""
        if report.clock == "model":
            return cls(title, trace, report)
        drawn = in_model_seconds(cost, trace)
        on_clock = replace(report, makespan=drawn.makespan, slot_seconds=slot_seconds(drawn), clock="model")
        return cls(title, drawn, on_clock, report.makespan)


def save_gantt(path: str | os.PathLike[str], *panels: Panel) -> None:
    """Draw runs below each other; write the picture."""
    import matplotlib

    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise InputError("a picture is a .png or a .svg file", file=path, hint="Choose one of them.")
    # Without date and random names, the same run gives the same file.
    with (
        matplotlib.rc_context({"svg.hashsalt": "batchbound"}),
        warnings.catch_warnings(),
        atomic_write(path, binary=True) as stream,
    ):
        # Names with characters outside the font are drawn as boxes, without a warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        gantt(*panels).savefig(
            stream, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None
        )


def gantt(*panels: Panel) -> Figure:
    """Draw runs below each other, over the same seconds."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

    highest = 5.5 if len(panels) == 1 else 4.0
    heights = [min(highest, max(1.5, 0.3 * panel.trace.slots)) for panel in panels]
    height = sum(heights) + 0.8 * len(panels) + 0.9
    figure = Figure(figsize=(12, height), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    lengths = Normalize(0, max(int(panel.trace.tokens.max(initial=1)) for panel in panels))
    # Without the ends of the map, as white looks idle and black looks like a line.
    shades = LinearSegmentedColormap.from_list("answers", colormaps["Blues"](np.linspace(0.2, 0.85, 64)))
    for panel, axis in zip(panels, axes, strict=True):
        _draw(axis, panel, shades, lengths)
    end = max(max(panel.trace.makespan, panel.report.run_bound or 0.0) for panel in panels)
    axes[0].set_xlim(0, 1.003 * end or 1.0)
    measured = any(panel.measured is not None for panel in panels)
    axes[-1].set_xlabel("model seconds" if measured else "seconds")
    bar = figure.colorbar(
        ScalarMappable(lengths, shades),
        ax=axes.tolist(),
        pad=0.01,
        fraction=0.02,
        aspect=(height - 1.5) / 0.2,
    )
    bar.set_label("completion tokens")
    bar.outline.set_linewidth(0)
    _add_legend(figure, panels)
    return figure


def _draw(axis: Axes, panel: Panel, shades: Colormap, lengths: Normalize) -> None:
    trace = panel.trace
    _frame(axis, panel)
    if not trace.stages:
        return
    row = 0.86 if trace.slots <= 40 else 1.0
    served = np.flatnonzero(trace.stage_of >= 0)
    start, end = stage_edges(trace)
    slot, stage = trace.slot_of[served], trace.stage_of[served]
    finished = np.where(np.isfinite(trace.finished[served]), trace.finished[served], trace.makespan)
    tokens = trace.tokens[served]

    bars = _bars(axis, start[stage], finished, slot, row, zorder=1)
    bars.set(cmap=shades, norm=lengths, array=tokens)
    if len(served) <= _LABELLED:
        bars.set(edgecolor="white", linewidth=0.8)
    prefill = np.array([trace_stage.kind == "prefill" for trace_stage in trace.stages], dtype=np.bool_)
    stalls = _bands(axis, start[prefill], end[prefill], trace.slots)
    stalls.set(facecolor=_COLOURS[STALL])
    _bands(axis, np.append(0.0, end[:-1]), start, trace.slots).set(facecolor=_COLOURS[BETWEEN])
    prefills = _bars(axis, start[stage], end[stage], slot, row, zorder=3)
    prefills.set(facecolor=_COLOURS[PREFILL])
    if len(served) <= _OUTLINED:
        stalls.set(edgecolor=_COLOURS[STALL], linewidth=0.7)
        prefills.set(edgecolor=_COLOURS[PREFILL], linewidth=1.0)
    gaps = _gaps(start[stage], finished, slot, trace.slots, trace.makespan)
    for cause, (begins, right, where) in _by_cause(idle_causes(trace), *gaps).items():
        hatch, ink = _HATCHES[cause]
        idle = _bars(axis, begins, right, where, 1.0, zorder=4)
        idle.set(facecolor=_COLOURS[cause])
        if len(begins) <= _HATCHED:
            idle.set(hatch=hatch, edgecolor=ink)
    if len(served) > _VECTOR:
        for collection in axis.collections:
            collection.set_rasterized(True)
    if len(served) <= _LABELLED:
        _label(axis, trace, served, end[stage], finished)


def _bars(
    axis: Axes, left: FloatArray, right: FloatArray, slot: IntArray, height: float, *, zorder: int
) -> PolyCollection:
    from matplotlib.collections import PolyCollection

    low, high = slot - height / 2, slot + height / 2
    corners = np.stack((left, low, left, high, right, high, right, low), axis=1).reshape(-1, 4, 2)
    # Snapped to whole pixels, one of two equal stages could vanish.
    drawn = PolyCollection(list(corners), linewidths=0, zorder=zorder, snap=False)
    axis.add_collection(drawn, autolim=False)
    return drawn


def _bands(axis: Axes, left: FloatArray, right: FloatArray, slots: int) -> PolyCollection:
    middle = np.full(len(left), (slots - 1) // 2)
    return _bars(axis, left, right, middle, 2.0 * slots, zorder=2)


def _gaps(
    start: FloatArray, finished: FloatArray, slot: IntArray, slots: int, makespan: float
) -> tuple[FloatArray, FloatArray, IntArray]:
    everything = np.arange(slots)
    begins = np.concatenate((np.zeros(slots), finished))
    right = np.concatenate((start, np.full(slots, makespan)))
    begins = begins[np.lexsort((begins, np.concatenate((everything, slot))))]
    owner = np.concatenate((slot, everything))
    order = np.lexsort((right, owner))
    right, owner = right[order], owner[order]
    wide = right > begins
    return begins[wide], right[wide], owner[wide]


def _by_cause(
    causes: IdleCauses, left: FloatArray, right: FloatArray, slot: IntArray
) -> dict[str, tuple[FloatArray, FloatArray, IntArray]]:
    first = np.searchsorted(causes.times, left, side="right") - 1
    last = np.searchsorted(causes.times, right, side="left")
    pieces = last - first
    gap = np.repeat(np.arange(len(left)), pieces)
    span = np.arange(len(gap)) - np.repeat(np.cumsum(pieces) - pieces, pieces) + first[gap]
    begin = np.maximum(left[gap], causes.times[span])
    end = np.minimum(right[gap], causes.times[span + 1])
    cause = np.array(causes.causes)[span]
    return {
        str(name): (begin[cause == name], end[cause == name], slot[gap][cause == name])
        for name in np.unique(cause)
    }


def _label(axis: Axes, trace: Trace, served: IntArray, left: FloatArray, finished: FloatArray) -> None:
    """Write the requests' names into their bars.

    Their common beginning is left out.
    """
    from matplotlib.patheffects import withStroke

    shared = 0
    while len({name[: shared + 1] for name in trace.ids}) == 1 < len(trace):
        shared += 1
    halo = [withStroke(linewidth=2, foreground="white")]
    for index, begin, end in zip(served.tolist(), left.tolist(), finished.tolist(), strict=True):
        name = trace.ids[index][shared:]
        # A character takes about 7 of the 1000 points that the axis is wide.
        if (end - begin) / trace.makespan < 0.009 * len(name) + 0.004:
            continue
        axis.text(
            (begin + end) / 2,
            float(trace.slot_of[index]),
            name,
            ha="center",
            va="center",
            fontsize=7,
            color="#0f172a",
            path_effects=halo,
            zorder=6,
            clip_on=True,
        )


def _frame(axis: Axes, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    report, slots = panel.report, panel.trace.slots
    axis.set_ylim(slots - 0.5, -0.5)
    axis.set_ylabel("slot")
    axis.yaxis.set_major_locator(MaxNLocator(nbins=min(10, slots), integer=True, min_n_ticks=1))
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.set_title(_headline(panel), loc="left", fontsize=12, fontweight="bold", pad=22)
    shares = [f"{cause} {100 * report.share(cause):.1f} %" for cause in _shown([report])]
    axis.annotate(
        f"of {report.slots:,} slots' time: " + " \N{MIDDLE DOT} ".join(shares),
        (0, 1),
        (0, 5),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        color="#475569",
    )
    if report.run_bound is not None:
        axis.axvline(report.run_bound, color="black", linestyle=(0, (4, 3)), linewidth=1.6, zorder=7)


def _headline(panel: Panel) -> str:
    report = panel.report
    text = f"{panel.title}: {_seconds(report.makespan)}"
    if panel.measured is not None:
        text = f"{panel.title}, measured {_seconds(panel.measured)}: {_seconds(report.makespan)} by the model"
    if report.run_bound is None or report.run_gap is None:
        return f"{text}, no proven bound"
    return f"{text}, {100 * report.run_gap:z.2f} % above the proven bound of {_seconds(report.run_bound)}"


def _shown(reports: Sequence[Report]) -> list[str]:
    """Return work, and causes with at least 0.05 % of the time."""
    return [
        cause
        for cause in (*BUSY, *BUBBLES)
        if cause in BUSY or any(report.share(cause) >= 0.0005 for report in reports)
    ]


def _add_legend(figure: Figure, panels: Sequence[Panel]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = []
    for cause in _shown([panel.report for panel in panels]):
        hatch, ink = _HATCHES.get(cause, (None, _COLOURS[cause]))
        handles.append(Patch(facecolor=_COLOURS[cause], edgecolor=ink, hatch=hatch, label=WORDS[cause]))
    if any(panel.report.run_bound is not None for panel in panels):
        label = "proven bound"
        handles.append(Line2D([], [], color="black", linestyle=(0, (4, 3)), linewidth=1.6, label=label))
    columns = len(handles) if len(handles) <= 6 else (len(handles) + 1) // 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 100 else f"{value:.3g} s"
