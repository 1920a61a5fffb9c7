"""
Draw the pictures of the documentation as SVG files in docs/pictures.

    python docs/draw_pictures.py            # all of them
    python docs/draw_pictures.py slot bound # some

Schedules are real: the library makes them, within seconds. Each picture has a ground of its own, which is
light or dark as the reader's system is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

from batchbound import CostModel, Limits, Problem, Trace, Workload, plan, simulate, solve
from batchbound.executor.reports.report import simulated

FOLDER = Path(__file__).parent / "pictures"
BLUES = ("#a8cbe8", "#79afd9", "#4a90c4", "#2f6fa5", "#1f5583")
ORANGE, PALE, RED, GREEN, INK, GREY, LINE = (
    "#c2410c", "#fdba74", "#be123c", "#15803d", "#1f2937", "#6b7280", "#cbd5e1",
)  # fmt: skip


GROUND, EMPTY = "#fbfcfe", "#eef2f7"

DARK = {
    GROUND: "#111827", EMPTY: "#1f2937", INK: "#e5e7eb", GREY: "#a3adbb", LINE: "#374151",
    "#ffffff": "#111827", "#a8cbe8": "#1f4e79", "#79afd9": "#2a6aa3", "#4a90c4": "#4a90c4",
    "#2f6fa5": "#79b4e3", "#1f5583": "#a9d0f0", ORANGE: "#fb923c", PALE: "#9a5a2a", RED: "#fb7185",
    GREEN: "#4ade80", "#e5eaf1": "#1f2937", "#fda4af": "#7f3845",
}  # fmt: skip
"""Colours on a dark ground: the longest completion stands out there by being light."""

STYLE = "".join(
    f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}' for light, dark in DARK.items()
)


class Canvas:
    """Shapes on a card, in pixels from its upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            f' height="{height}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f"<style>@media (prefers-color-scheme: dark) {{{STYLE}}}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}" stroke="{LINE}"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, word: str = "") -> None:
        """Draw a bar, with a word inside where it fits."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" rx="2"'
            f' fill="{fill}" stroke="#ffffff" stroke-width="0.8"/>'
        )
        if word and 7 * len(word) < width:
            dark = fill in (*BLUES[2:], ORANGE, RED, GREEN, GREY)
            self.text(x + width / 2, y + height / 2 + 4.5, word, "#ffffff" if dark else INK, "middle")

    def line(
        self, *points: tuple[float, float], colour: str = GREY, width: float = 1.5, dash: str = ""
    ) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = ORANGE) -> None:
        """Draw an arrow."""
        self.line((x, y), (to_x, to_y), colour=colour, width=1.8)
        angle = np.arctan2(to_y - y, to_x - x)
        ends = [(to_x - 8 * np.cos(angle + turn), to_y - 8 * np.sin(angle + turn)) for turn in (0.45, -0.45)]
        self.line(ends[0], (to_x, to_y), ends[1], colour=colour, width=1.8)

    def dot(self, x: float, y: float, colour: str = BLUES[3]) -> None:
        """Draw a node."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')

    def text(
        self, x: float, y: float, word: str, colour: str = INK, anchor: str = "start", size: int = 13
    ) -> None:
        """Write a line of text."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">'
            f"{escape(word)}</text>"
        )

    def save(self, name: str) -> None:
        """Write the picture."""
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.svg").write_text("\n".join([*self.parts, "</svg>\n"]), encoding="utf-8")


SMALL = (18, 4, 9, 14, 5, 12, 3, 8, 16)
"""Decode steps of the small job that most pictures show."""


def small_job(slots: int = 3, lengths: Sequence[int] = SMALL) -> Problem:
    """Return a job small enough to be read from a picture."""
    cost = CostModel(prefill_base=1.0, prefill_per_token=0.004, decode_base=1.0, decode_per_slot=0.0)
    return Problem(Workload.from_lengths([100] * len(lengths), list(lengths)), cost, slots)


def shade(length: int, longest: int) -> str:
    """Return a blue, darker the longer the completion."""
    return BLUES[min(4, int(5 * (length - 1) / max(longest, 1)))]


def draw_trace(
    canvas: Canvas, trace: Trace, top: float, scale: float, left: float = 70, row: float = 22
) -> None:
    """Draw a run: a row for each slot, orange where a prompt is prefilled, pale where others pause."""
    bottom = top + row * trace.slots
    for slot in range(trace.slots):
        if row >= 15:
            canvas.text(left - 8, top + row * slot + row / 2 + 4, f"slot {slot}", GREY, "end", 12)
        canvas.box(left, top + row * slot + 1, scale * trace.makespan, row - 2, EMPTY)
    longest = int(trace.tokens.max())
    for each in range(len(trace.ids)):
        y = top + row * trace.slot_of[each] + 1
        start, end = trace.prefilled[each], trace.finished[each]
        fill = shade(int(trace.tokens[each]), longest)
        word = f"{trace.tokens[each]}" if row >= 15 else ""
        canvas.box(left + scale * start, y, scale * (end - start), row - 2, fill, word)
    for index, stage in enumerate(trace.stages):
        if stage.kind == "prefill":
            x, width = left + scale * stage.start, scale * stage.seconds
            canvas.box(x, top, width, bottom - top, PALE)
            for each in np.flatnonzero(trace.stage_of == index).tolist():
                canvas.box(x, top + row * trace.slot_of[each] + 1, width, row - 2, ORANGE)


def axis(canvas: Canvas, y: float, end: float, scale: float, left: float = 70, unit: str = "s") -> None:
    """Draw a time axis."""
    canvas.line((left, y), (left + scale * end, y), colour=LINE)
    step = next(each for each in (1, 2, 5, 10, 20, 50, 100, 200, 500) if end / each <= 8)
    for tick in np.arange(0, end + 1e-9, step):
        canvas.line((left + scale * tick, y), (left + scale * tick, y + 4), colour=LINE)
        canvas.text(left + scale * tick, y + 17, f"{tick:g}", GREY, "middle", 11)
    canvas.text(left + scale * end + 14, y + 5, unit, GREY, size=11)


def slot() -> None:
    """Draw one slot: one request after another, and idle time at the end."""
    canvas = Canvas(720, 120, "A slot serves one request after another")
    canvas.text(70, 28, "one slot: a row of the running batch, one request at a time", INK)
    x = 70.0
    for length, name in ((7, "request 3"), (4, "request 5"), (9, "request 8")):
        canvas.box(x, 42, 14, 34, ORANGE)
        canvas.box(x + 14, 42, 21 * length, 34, shade(length, 10), name)
        x += 14 + 21 * length
    canvas.box(x, 42, 640 - x, 34, "#eef2f7", "idle")
    canvas.line((70, 88), (640, 88), colour=LINE)
    canvas.text(70, 106, "orange: the prompt's prefill; blue: a token at each decode step", GREY, size=12)
    canvas.save("slot")


def stage() -> None:
    """Draw a prefill stage pauses the running requests."""
    canvas = Canvas(720, 165, "A prefill stage pauses every running request")
    scale = 600 / 24
    part = small_job(3, (9, 14, 4, 8))
    trace = simulate(part, "fcfs")
    canvas.text(70, 26, "a prefill stage (orange) computes prompts; running requests pause (pale)")
    draw_trace(canvas, trace, 40, min(scale, 600 / trace.makespan), row=24)
    axis(canvas, 122, trace.makespan, min(scale, 600 / trace.makespan))
    canvas.save("stage")


def schedule() -> None:
    """Draw the same job in two orders, with the lower bound."""
    made = plan(small_job(), limits=Limits(seconds=1))
    first, ours = simulate(small_job(), "fcfs"), simulated(made)[0]
    scale = 590 / first.makespan
    canvas = Canvas(720, 280, "A job in file order and as planned")
    for top, title, trace in ((38, "first come, first served", first), (152, "planned", ours)):
        canvas.text(70, top - 8, f"{title}: {trace.makespan:.0f} s")
        draw_trace(canvas, trace, top, scale)
    assert made.bound is not None
    x = 70 + scale * made.bound.seconds
    canvas.line((x, 26), (x, 232), colour=RED, dash="5 4")
    canvas.text(x - 6, 142, f"no order takes less than {made.bound.seconds:.1f} s", RED, "end", 12)
    axis(canvas, 234, first.makespan, scale)
    canvas.save("schedule")


def bound() -> None:
    """Draw three times of one job on a line: the bound, the plan, first come, first served."""
    made = plan(small_job(), limits=Limits(seconds=1))
    assert made.bound is not None
    first = simulate(small_job(), "fcfs").makespan
    rows = (
        ("first come, first served", first, BLUES[0]),
        ("this plan", made.makespan, BLUES[2]),
        ("least possible (proven)", made.bound.seconds, RED),
    )
    canvas = Canvas(720, 150, "Bound, plan and first come, first served")
    scale = 330 / first
    for k, (name, seconds, colour) in enumerate(rows):
        canvas.text(190, 42 + 34 * k, name, INK, "end")
        canvas.box(200, 27 + 34 * k, scale * seconds, 22, colour)
        gap = "" if k == 2 else f"   {seconds / made.bound.seconds - 1:.0%} above the bound"
        canvas.text(208 + scale * seconds, 43 + 34 * k, f"{seconds:.0f} s{gap}", GREY, size=12)
    canvas.text(200, 138, "gap = makespan / lower bound - 1", GREY, size=12)
    canvas.save("bound")


def paths(
    canvas: Canvas, left: float, top: float, rows: Sequence[Sequence[int]], names: Sequence[str]
) -> None:
    """Draw slots as paths: nodes at stages, a hop for each request."""
    for k, (row, name) in enumerate(zip(rows, names, strict=True)):
        y = top + 44 * k
        canvas.text(left - 12, y + 5, name, GREY, "end", 12)
        canvas.line(*[(left + x, y) for x in row], colour=BLUES[2], width=3)
        for x in row:
            canvas.dot(left + x, y)


def move(name: str, title: str, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> None:
    """Draw one move of the spans phase: two slots before and after it."""
    canvas = Canvas(720, 128, title)
    slots = [f"slot {k}" for k in range(len(before))]
    paths(canvas, 66, 48, before, slots)
    canvas.arrow(338, 68, 376, 68)
    paths(canvas, 446, 48, after, slots)
    canvas.text(20, 24, title)
    canvas.save(name)


def move_swap_tails() -> None:
    """Draw two paths exchange what follows one node."""
    canvas = Canvas(720, 128, "swap tails: two slots exchange everything after one node")
    canvas.text(20, 24, "swap tails: two slots exchange everything after one node")
    for left, crossed in ((66, False), (446, True)):
        ends = ((90, 170, 250), (60, 140, 250))
        for k in (0, 1):
            y, other = 48 + 44 * k, 48 + 44 * (1 - k)
            canvas.text(left - 12, y + 5, f"slot {k}", GREY, "end", 12)
            canvas.line((left, y), (left + ends[k][0], y), colour=BLUES[2], width=3)
            to = ends[1 - k] if crossed else ends[k]
            row = other if crossed else y
            colour = ORANGE if crossed else BLUES[2]
            canvas.line((left + ends[k][0], y), (left + to[1], row), colour=colour, width=3)
            canvas.line((left + ends[k][1], y), (left + 250, y), colour=BLUES[2], width=3)
        for k in (0, 1):
            for x in (0, *ends[k]):
                canvas.dot(left + x, 48 + 44 * k)
    canvas.arrow(338, 68, 376, 68)
    canvas.save("move_swap_tails")


def move_relocate() -> None:
    """Draw a node moves to another stage."""
    before, after = ([0, 90, 250], [0, 140, 250]), ([0, 170, 250], [0, 140, 250])
    move("move_relocate", "relocate: a node moves to a stage near it", before, after)


def move_add_delete() -> None:
    """Draw a span becomes two, or two become one."""
    before, after = ([0, 250], [0, 140, 250]), ([0, 110, 250], [0, 140, 250])
    move("move_add_delete", "add, delete: one span becomes two, or two become one", before, after)


def move_shift() -> None:
    """Draw a stage moves in time, with every node on it."""
    before, after = ([0, 100, 250], [0, 100, 180, 250]), ([0, 130, 250], [0, 130, 180, 250])
    move("move_shift", "shift: a stage, with all of its nodes, happens earlier or later", before, after)


def move_close_open() -> None:
    """Draw a stage is closed; its nodes go to another."""
    before, after = ([0, 90, 170, 250], [0, 90, 250]), ([0, 170, 250], [0, 170, 250])
    move("move_close_open", "close, open: a stage is given up (or made), its nodes move", before, after)


def search_backward() -> None:
    """Draw orders placed backward from the end of the job under a KV capacity."""
    lengths = (4, 7, 10, 13)
    canvas = Canvas(720, 230, "Requests placed backward from the end of the job")
    canvas.text(20, 24, "orders: from the end of the job, each request as late as 2 slots and memory allow")
    ends, left, unit = (26, 26, 22, 15), 60, 22
    for k, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        y = 44 + 26 * k
        canvas.box(left + unit * (end - length), y, unit * length, 20, BLUES[min(4, k + 1)], f"no. {k + 1}")
    held = np.zeros(27)
    for length, end in zip(lengths, ends, strict=True):
        held[end - length : end] += np.arange(1, length + 1)
    points = [(left + unit * k, 206 - 2.6 * held[k]) for k in range(27)]
    canvas.line(*points, colour=ORANGE, width=2)
    full = 206 - 2.6 * 16
    canvas.line((left, full), (left + unit * 26, full), colour=RED, dash="5 4")
    canvas.text(left + unit * 26 + 6, full + 4, "capacity", RED, size=12)
    canvas.text(left, 222, "tokens of KV cache held (orange), by decode step", GREY, size=12)
    canvas.arrow(left + unit * 26, 36, left + unit * 22, 36)
    canvas.save("search_backward")


def search_ruin() -> None:
    """Draw ruin and recreate: requests near one step leave and are inserted again."""
    canvas = Canvas(720, 180, "Ruin and recreate")
    canvas.text(20, 24, "ruin and recreate: requests near one step leave; each returns where it fits best")
    before = ((0, 0, 8), (0, 9, 5), (1, 0, 5), (1, 6, 9), (2, 0, 9), (2, 11, 4))
    after = ((0, 0, 8), (0, 8, 4), (1, 0, 5), (1, 5, 9), (2, 0, 9), (0, 0, 0))
    for left, rows, gone in ((60, before, {1, 3, 5}), (440, after, {1, 3})):
        for k, (row, start, length) in enumerate(rows):
            if length:
                fill = PALE if k in gone else BLUES[2]
                canvas.box(left + 16 * start, 52 + 30 * row, 16 * length, 24, fill)
        canvas.line((left, 148), (left + 16 * 15, 148), colour=LINE)
        for row in range(3):
            canvas.text(left - 8, 68 + 30 * row, f"slot {row}", GREY, "end", 12)
    canvas.box(440 + 16 * 9, 112, 16 * 5, 24, PALE)
    canvas.arrow(338, 94, 376, 94)
    canvas.text(60, 168, "pale: removed", GREY, size=12)
    canvas.text(700, 168, "pale: inserted where slots, memory and cap allow it", GREY, "end", 12)
    canvas.save("search_ruin")


def search_progress() -> None:
    """Draw the best schedule of a real search over its time."""
    rng = np.random.default_rng(5)
    job = Problem(
        Workload.from_lengths(rng.integers(20, 300, 200), 1 + rng.lognormal(4.6, 0.8, 200).astype(int)),
        CostModel.paper(),
        16,
    )
    found = solve(job, limits=Limits(seconds=3))
    assert found.bound is not None
    seconds = np.array([point[0] for point in found.trace])
    best = np.array([point[1] for point in found.trace])
    first = simulate(job, "fcfs").makespan
    canvas = Canvas(720, 240, "Gap of the best schedule as the search goes")
    top, bottom, left, right = 46.0, 196.0, 70.0, 690.0
    gaps = 100 * (best / found.bound.seconds - 1)
    least, most = 0.0, 1.15 * gaps[0]

    def across(k: int) -> float:
        return left + (right - left) * k / max(1, len(gaps) - 1)

    def down(gap: float) -> float:
        return float(bottom - (bottom - top) * (gap - least) / (most - least))

    points = []
    for k, gap in enumerate(gaps):
        points += [(across(k), down(gaps[max(0, k - 1)])), (across(k), down(gap))]
    canvas.line(*points, colour=BLUES[3], width=2.2)
    for gap in np.linspace(0, gaps[0], 4):
        canvas.text(left - 8, down(gap) + 4, f"{gap:.1f} %", GREY, "end", 11)
        canvas.line((left, down(gap)), (right, down(gap)), colour="#e5eaf1")
    canvas.line((left, bottom), (right, bottom), colour=RED, dash="5 4")
    canvas.text(right, bottom - 6, "proven lower bound", RED, "end", 12)
    above = 100 * (first / found.bound.seconds - 1)
    canvas.text(20, 26, f"200 requests, 16 slots: gap of the best schedule (file order: {above:.0f} %)")
    canvas.text(left, 222, f"from the best simple rule to improvement {len(gaps)}, the last", GREY, size=12)
    assert len(seconds) == len(best)
    canvas.save("search_progress")


def bound_counts() -> None:
    """Draw the simplest argument: all decode steps over the slots, and the longest request."""
    canvas = Canvas(720, 150, "Slots must hold every decode step")
    total, slots = sum(SMALL), 3
    canvas.text(
        20, 24, f"counts: {total} steps of requests on {slots} slots take at least {-(-total // slots)}"
    )
    x = [70.0, 70.0, 70.0]
    for length in sorted(SMALL, reverse=True):
        row = int(np.argmin(x))
        canvas.box(x[row], 40 + 26 * row, 18 * length, 22, shade(length, 18), str(length))
        x[row] += 18 * length
    end = 70 + 18 * -(-total // slots)
    canvas.line((end, 34), (end, 124), colour=RED, dash="5 4")
    canvas.text(70, 138, "and never fewer than the longest request has", GREY, size=12)
    canvas.save("bound_counts")


def bound_differences() -> None:
    """Draw with S stages a request can last only one of a few spans; lengths are rounded up to them."""
    canvas = Canvas(720, 190, "Lengths rounded up to the spans that few stages allow")
    canvas.text(20, 24, "differences: two stages leave three spans; each length is rounded up to one")
    times, left, unit = (0, 8, 20), 70, 26
    for time, name in zip(times, ("stage 1", "stage 2", "end"), strict=True):
        canvas.line((left + unit * time, 40), (left + unit * time, 166), colour=ORANGE, dash="4 3")
        canvas.text(left + unit * time, 182, name, ORANGE, "middle", 12)
    spans = ((0, 8, 5), (8, 20, 9), (0, 20, 15))
    for k, (start, end, length) in enumerate(spans):
        y = 50 + 38 * k
        canvas.box(left + unit * start, y, unit * length, 26, BLUES[2], f"{length} steps")
        canvas.box(
            left + unit * (start + length), y, unit * (end - start - length), 26, "#fda4af", "rounded up"
        )
    canvas.save("bound_differences")


def bound_intervals() -> None:
    """Draw the charges of requests that hold slots for whole intervals."""
    canvas = Canvas(720, 170, "Charges for intervals between stages")
    canvas.text(20, 24, "intervals: a request pays 1 a step and g an interval; a span of k pays u_k once")
    times, left, unit = (0, 6, 13, 21), 70, 28
    for start, end in pairwise(times):
        steps = f"{end - start} steps: {end - start} + g"
        canvas.box(left + unit * start, 40, unit * (end - start), 28, PALE, steps)
    spans = ((0, 2, "13 + 2 g + u_2"), (1, 2, "7 + g + u_1"), (1, 3, "15 + 2 g + u_2"))
    for k, (start, end, paid) in enumerate(spans):
        y = 78 + 26 * k
        canvas.box(left + unit * times[start], y, unit * (times[end] - times[start]), 20, BLUES[k + 1])
        colour = INK if k < 1 else "#ffffff"
        canvas.text(left + unit * times[start] + 8, y + 15, f"pays {paid}", colour, size=12)
    for time in times:
        canvas.line((left + unit * time, 36), (left + unit * time, 156), colour=ORANGE, dash="4 3")
    canvas.save("bound_intervals")


def bound_growth() -> None:
    """Draw KV cache grows while requests run and falls as they end, so memory is not always full."""
    canvas = Canvas(720, 200, "KV cache held by a real run under a capacity")
    cost = CostModel(prefill_base=1.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)
    job = Problem(Workload.from_lengths([4] * 12, [14] * 12), cost, 8, kv_capacity=72)
    trace = simulated(plan(job, limits=Limits(seconds=1)))[0]
    canvas.text(20, 24, "growth of memory: what requests hold grows token by token and falls as they end")
    left, bottom, scale = 70, 160, 600 / trace.makespan
    moments, held = [0.0], [0.0]
    for stage in trace.stages:
        steps = stage.decode_steps
        if steps:
            count = np.arange(1, steps + 1)
            moments += [stage.start + stage.seconds * k / steps for k in count]
            held += [float(stage.kv_tokens / steps + stage.active * (k - (steps + 1) / 2)) for k in count]
    top = 1.5
    canvas.line(
        *[(left + scale * t, bottom - top * h) for t, h in zip(moments, held, strict=True)],
        colour=BLUES[3],
        width=2.2,
    )
    canvas.line((left, bottom - top * 72), (left + 600, bottom - top * 72), colour=RED, dash="5 4")
    canvas.text(left + 600, bottom - top * 72 - 6, "KV capacity", RED, "end", 12)
    axis(canvas, bottom, trace.makespan, scale)
    canvas.save("bound_growth")


def bars(
    name: str, title: str, rows: Sequence[tuple[str, float, str, str]], note: str, wide: float = 0.0
) -> None:
    """Draw a bar for each row: name, value, its label, colour."""
    canvas = Canvas(720, 62 + 32 * len(rows) + 22, title)
    canvas.text(20, 26, title)
    scale = 300 / (wide or max(value for _, value, _, _ in rows))
    for k, (label, value, word, colour) in enumerate(rows):
        y = 44 + 32 * k
        canvas.text(230, y + 16, label, INK, "end")
        canvas.box(240, y, scale * value, 22, colour)
        canvas.text(248 + scale * value, y + 16, word, GREY, size=12)
    canvas.text(20, 62 + 32 * len(rows) + 6, note, GREY, size=12)
    canvas.save(name)


def guide_evaluation() -> None:
    """Draw the first and the second epoch of the guide, in decode steps of the same prompts."""
    rng = np.random.default_rng(11)
    kinds = rng.integers(0, 4, 96)
    caps = np.array([60, 10, 90, 4])[kinds]
    lengths = np.minimum(caps, 1 + (caps * rng.uniform(0.3, 0.9, 96)).astype(int))
    cost = CostModel(prefill_base=0.04, prefill_per_token=1e-4, decode_base=0.012, decode_per_slot=2e-4)
    job = Problem(Workload.from_lengths(rng.integers(15, 40, 96), lengths), cost, 16)
    made = plan(job, limits=Limits(seconds=1))
    first, ours = simulate(job, "fcfs"), simulated(made)[0]
    canvas = Canvas(720, 470, "96 prompts on 16 slots, file order and second run")
    scale = 590 / first.makespan
    for top, title, trace in (
        (40, "first come, first served", first),
        (256, "second run, lengths known", ours),
    ):
        canvas.text(70, top - 10, f"{title}: {trace.makespan:.2f} s")
        draw_trace(canvas, trace, top, scale, row=11.5)
    axis(canvas, 444, first.makespan, scale)
    canvas.save("guide_evaluation")


def guide_grpo() -> None:
    """Draw a group shares the KV cache of its prompt."""
    canvas = Canvas(720, 170, "A group shares the KV cache of its prompt")
    canvas.text(20, 26, "four samples of one prompt: its KV cache is computed once and shared")
    canvas.box(40, 70, 170, 54, ORANGE, "prompt, prefilled once")
    for k, length in enumerate((16, 9, 22, 12)):
        y = 42 + 30 * k
        canvas.line((210, 97), (250, y + 11), colour=GREY)
        canvas.box(250, y, 18 * length, 22, BLUES[min(4, length // 5)], f"sample {k}")
    canvas.save("guide_grpo")


def guide_server() -> None:
    """Draw a client that keeps a few requests in the server's queue decides the order."""
    canvas = Canvas(720, 190, "The client holds the queue, the server its slots")
    canvas.text(20, 26, "the client keeps slots + a few requests in flight, so the order is the client's")
    canvas.text(120, 56, "batchbound: in planned order", GREY, "middle", 12)
    for k, length in enumerate((110, 96, 82, 70, 60)):
        canvas.box(40, 66 + 21 * k, length, 17, BLUES[4 - min(4, k)])
    canvas.arrow(222, 115, 270, 115)
    canvas.text(340, 56, "server's own queue", GREY, "middle", 12)
    for k in range(2):
        canvas.box(300, 96 + 21 * k, 80, 17, PALE)
    canvas.arrow(402, 115, 450, 115)
    canvas.text(570, 56, "slots (max_num_seqs)", GREY, "middle", 12)
    for k, length in enumerate((170, 140, 150, 120, 160)):
        canvas.box(470, 66 + 21 * k, length, 17, BLUES[2])
    canvas.save("guide_server")


def guide_table() -> None:
    """Draw a real plan on two replicas."""
    from batchbound.data.fleet import Fleet
    from batchbound.planning.fleet import make_fleet_plan

    rng = np.random.default_rng(2)
    job = small_job(3, [int(each) for each in rng.integers(3, 20, 16)])
    made = make_fleet_plan(Fleet.of(job, 2), limits=Limits(seconds=1))
    canvas = Canvas(720, 250, "A job on two replicas")
    traces = simulated(made)
    end = max(trace.makespan for trace in traces)
    for k, trace in enumerate(traces):
        top = 40 + 100 * k
        canvas.text(70, top - 8, f"replica {k}: done after {trace.makespan:.0f} s")
        draw_trace(canvas, trace, top, 590 / end)
    axis(canvas, 218, end, 590 / end)
    canvas.save("guide_table")


def guide_sizing() -> None:
    """Draw the makespan of one job on more and more slots."""
    rng = np.random.default_rng(3)
    lengths = np.minimum(2000, rng.lognormal(5.0, 0.8, 600)).astype(int) + 1
    work = Workload.from_lengths(rng.integers(30, 900, 600), lengths)
    rows = []
    for slots in (8, 16, 32, 64, 128):
        made = plan(Problem(work, CostModel.paper(), slots), limits=Limits(seconds=1))
        assert made.bound is not None
        word = f"{made.makespan:.0f} s, gap {made.gap:.1%}"
        rows.append((f"{slots} slots", made.makespan, word, BLUES[2]))
    bars("guide_sizing", "600 requests: planned makespan by slots", rows, "the hybrid paper's costs")


def guide_solvers() -> None:
    """Draw solvers on one job, as gaps above the bound."""
    rng = np.random.default_rng(7)
    job = Problem(
        Workload.from_lengths(rng.integers(20, 200, 30), rng.integers(2, 300, 30)), CostModel.paper(), 4
    )
    found = solve(job, limits=Limits(seconds=1))
    assert found.bound is not None
    assert found.makespan is not None
    least = found.bound.seconds
    values = [("search", found.makespan)]
    values += [(f"policy:{name}", simulate(job, name).makespan) for name in ("lpt-ski", "lpt", "fcfs")]
    rows = [
        (name, 100 * (seconds / least - 1), f"{seconds / least - 1:.1%} above the bound", BLUES[2])
        for name, seconds in values
    ]
    bars("guide_solvers", "30 requests on 4 slots: gap to one proven bound", rows, "this guide's problem")


def house() -> None:
    """Draw the folders and their allowed imports."""
    canvas = Canvas(720, 300, "Five folders and a roof")
    boxes = {
        "batchbound": (220, 20, 280, "public names, planning, command line"),
        "solvers": (60, 104, 250, "schedules"),
        "executor": (410, 104, 250, "engines, servers, jobs, reports"),
        "models": (60, 176, 250, "bounds, certificates, formulations"),
        "heuristics": (410, 176, 250, "policies, the loop, the simulator"),
        "data": (220, 248, 280, "what is read and written"),
    }
    arrows = (
        ("batchbound", "solvers"),
        ("batchbound", "executor"),
        ("solvers", "models"),
        ("solvers", "heuristics"),
        ("executor", "models"),
        ("executor", "heuristics"),
        ("models", "data"),
        ("heuristics", "data"),
    )
    for start, end in arrows:
        x, y, width, _ = boxes[start]
        to_x, to_y, to_width, _ = boxes[end]
        shift = 0.3 * (to_x + to_width / 2 - x - width / 2)
        canvas.arrow(x + width / 2 + shift, y + 40, to_x + to_width / 2 - shift, to_y - 3, GREY)
    for name, (x, y, width, what) in boxes.items():
        canvas.box(x, y, width, 40, BLUES[0])
        canvas.text(x + width / 2, y + 17, f"{name}/", INK, "middle")
        canvas.text(x + width / 2, y + 33, what, INK, "middle", 11)
    canvas.save("house")


def gain() -> None:
    """Draw three bars: file order, ours, and the least possible, from the results."""
    figures = json.loads((Path(__file__).parent / "results.json").read_text(encoding="utf-8"))["mooncake"]
    seconds = {row[1]: float(row[2].replace(",", "")) for row in figures["rows"] if row[0] == "400,000"}
    first = seconds["file order"]
    rows = (
        ("file order", first, GREY, f"{first:,.0f} s"),
        ("batchbound", seconds["**sorted by text** (chosen)"], BLUES[3], ""),
        ("least possible", seconds["proven least (KV)"], GREEN, "proven"),
    )
    canvas = Canvas(
        520, 236, "A public trace as one batch: seconds in file order, in our order, and the lower bound"
    )
    canvas.text(20, 38, "12,031 requests as one batch", size=22)
    for k, (name, value, colour, word) in enumerate(rows):
        y, width = 56 + 46 * k, 290 * value / first
        canvas.text(158, y + 26, name, anchor="end", size=20)
        canvas.box(168, y, width, 38, colour)
        word = word or f"{1 - value / first:.0%} less time"
        if width > 280:
            canvas.text(160 + width, y + 26, word, "#ffffff", "end", 20)
        else:
            canvas.text(176 + width, y + 26, word, size=20)
    canvas.text(20, 220, "Mooncake's conversations, vLLM's prefix cache, simulated", GREY, size=16)
    canvas.save("gain")


PICTURES: dict[str, Callable[[], None]] = {
    drawn.__name__: drawn
    for drawn in (
        slot, stage, schedule, bound, move_swap_tails, move_relocate, move_add_delete, move_shift,
        move_close_open, search_backward, search_ruin, search_progress, bound_counts, bound_differences,
        bound_intervals, bound_growth, guide_evaluation, guide_grpo, guide_server, guide_table, guide_sizing,
        guide_solvers, house, gain,
    )
}  # fmt: skip

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
