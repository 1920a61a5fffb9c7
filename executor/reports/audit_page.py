"""Audit as one page for a browser."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ...data.arrays import FloatArray
from ...data.files.disk import atomic_write
from .cache_picture import CachePicture

_WIDTH, _HEIGHT, _LEFT, _BAR = 900.0, 220.0, 250.0, 26.0

_MOST_POINTS = 600

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #0f172a; --soft: #475569; --line: #cbd5e1;
  --c0: #1d4ed8; --c1: #c2410c; --c2: #15803d; --c3: #a21caf; }
@media (prefers-color-scheme: dark) { :root { --ground: #0b1220; --ink: #e2e8f0; --soft: #94a3b8;
  --line: #334155; --c0: #7db1ff; --c1: #fb923c; --c2: #4ade80; --c3: #e879f9; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 1000px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
p, caption { color: var(--soft); } svg { width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 13px; }
table { border-collapse: collapse; width: 100%; }
td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); }
td + td { text-align: right; font-variant-numeric: tabular-nums; }
"""


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """Running requests of a run over time.

    name: Name of the run.
    at: End of each stretch, in iterations or seconds, ascending, shape (stretches,).
    requests: Running requests in each stretch, shape (stretches,).
    """

    name: str
    at: FloatArray
    requests: FloatArray


@dataclass(frozen=True, slots=True)
class Losses:
    """Measured quantity, its lower bound, and the difference by cause.

    unit: ``iterations`` or ``seconds``.
    measured, bound: Measured quantity and its lower bound.
    parts: Losses by cause, which add up to ``measured - bound``.
    """

    unit: str
    measured: float
    bound: float
    parts: Mapping[str, float]
    label: str


def save_audit_page(
    path: str | os.PathLike[str],
    title: str,
    losses: Sequence[Losses],
    runs: Sequence[Occupancy],
    tables: Mapping[str, Mapping[str, object]],
    *,
    clock: str,
    cache: CachePicture | None = None,
) -> None:
    """Write an audit as one HTML file.

    ``clock``: unit of the runs' clock, ``iterations`` or ``seconds``.
    """
    parts = [f"<h1>{escape(title)}</h1>"]
    for loss in losses:
        heading = (
            f"{_number(loss.measured)} {loss.unit}, {_number(loss.bound)} of them needed whatever the order"
        )
        parts += [f"<h2>{escape(heading)}</h2>", _waterfall(loss)]
    if runs:
        note = "The gap between a line and the top is unused slots."
        parts += [f"<h2>Running requests, by {escape(clock)}</h2>", _lines(runs), f"<p>{note}</p>"]
    if cache is not None:
        note = "A beginning is dark while a running request uses it, pale while the KV cache keeps it."
        parts += ["<h2>Shared beginnings in the KV cache, simulated</h2>", f"<p>{note}</p>"]
        parts += [
            f"<p>{escape(title)}</p>{_svg(height, title, bars)}" for title, height, bars in cache.drawn()
        ]
    for name, rows in tables.items():
        shown = "".join(
            f"<tr><td>{escape(key)}</td><td>{escape(_value(value))}</td></tr>" for key, value in rows.items()
        )
        parts.append(f"<h2>{escape(name)}</h2><table>{shown}</table>")
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    head += f"<title>batchbound audit: {escape(title)}</title><style>{_STYLE}</style></head><body>"
    with atomic_write(path) as stream:
        stream.write(head + "\n".join(parts) + "</body></html>\n")


def _waterfall(losses: Losses) -> str:
    steps, at = [(losses.label, 0.0, losses.bound)], losses.bound
    for name, value in losses.parts.items():
        steps.append((name, at, at + value))
        at += value
    steps.append(("measured", 0.0, losses.measured))
    largest = max(max(low, high) for _, low, high in steps) or 1.0
    scale, drawn = (_WIDTH - _LEFT - 90) / largest, []
    for row, (name, low, high) in enumerate(steps):
        y, whole = row * _BAR, row in (0, len(steps) - 1)
        x, width = _LEFT + scale * min(low, high), max(1.0, scale * abs(high - low))
        colour = "c0" if whole else "c1" if high >= low else "c2"
        shown = _number(high) if whole else f"{'+' if high >= low else '-'}{_number(abs(high - low))}"
        drawn.append(
            f'<text x="{_LEFT - 8}" y="{y + 17:.0f}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{x:.1f}" y="{y + 4:.0f}" width="{width:.1f}" height="{_BAR - 8:.0f}"'
            f' fill="var(--{colour})"/><text x="{x + width + 6:.1f}" y="{y + 17:.0f}">{shown}</text>'
        )
    return _svg(len(steps) * _BAR, f"losses in {losses.unit}", drawn)


def _lines(runs: Sequence[Occupancy]) -> str:
    end = max(float(run.at[-1]) for run in runs)
    largest = max(float(run.requests.max()) for run in runs) or 1.0
    x, y = (_WIDTH - 60) / end, (_HEIGHT - 50) / largest
    base, drawn = _HEIGHT - 30, []
    for number, run in enumerate(runs):
        colour = f"var(--c{number % 4})"
        at, requests = _thinned(run)
        points = [(40.0, base), *((40 + x * t, base - y * n) for t, n in zip(at, requests, strict=True))]
        points.append((40 + x * float(run.at[-1]), base))
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        drawn.append(
            f'<text x="{60 + 280 * number}" y="14" style="fill:{colour}">{escape(run.name)}:'
            f" {_number(float(run.at[-1]))}</text>"
        )
    drawn.append(f'<line x1="40" y1="{base}" x2="{_WIDTH - 20}" y2="{base}" stroke="var(--line)"/>')
    for share in (0.0, 0.5, 1.0):
        drawn.append(
            f'<text x="{40 + x * end * share:.0f}" y="{_HEIGHT - 10}" text-anchor="middle">'
            f"{_number(end * share)}</text>"
        )
    drawn.append(f'<text x="4" y="{base - y * largest + 5:.0f}">{_number(largest)}</text>')
    return _svg(_HEIGHT, "running requests", drawn)


def _thinned(run: Occupancy) -> tuple[FloatArray, FloatArray]:
    """Return stretches' ends and requests, averaged if there are many."""
    if len(run.at) <= _MOST_POINTS:
        return run.at, run.requests
    parts = np.array_split(np.arange(len(run.at)), _MOST_POINTS)
    return np.array([run.at[part[-1]] for part in parts]), np.array(
        [run.requests[part].mean() for part in parts]
    )


def _svg(height: float, label: str, drawn: Sequence[str]) -> str:
    box = f"0 0 {_WIDTH:.0f} {height:.0f}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:,.3g}"


def _value(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "unknown" if value is None else str(value)
    return _number(float(value))
