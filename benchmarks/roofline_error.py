"""
Fit what of a device's rates engines reach, and how far estimates are off where nothing was measured.

    python benchmarks/roofline_error.py FILE [--json OUT]

FILE is a table of aiconfigurator's measured points. For each model on each device the factors are fitted to
the points of all other models on all other devices, and the estimated TPOT is compared with the measured one.
The error bar of that pair is the middle 90 % of the errors of pairs that share neither model nor device.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from measured_points import MeasuredPoint, read_aiconfigurator
from scipy.optimize import least_squares

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.models.exegpt.roofline import ERROR_BAR, ROOFLINE_DEVICES, Efficiency, Roofline

START = Efficiency(0.7, 0.6, 0.6, 0.6, 0.6, 10e-6, 2e-6, 1e-3)
_WIDTHS = np.array([0.3, 0.5, 0.5, 0.5, 0.5, 0.7, 0.5, 1.0])
"""Standard deviations of the factors' logarithms before a point was seen."""
_PULL = 0.05
_FEW = 5
COVERED = (0.05, 0.95)


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What an estimate is put together from at full rates, a row a point; see :meth:`seconds`."""

    values: FloatArray
    measured: FloatArray
    pair: np.ndarray[tuple[int], np.dtype[np.str_]]
    model: np.ndarray[tuple[int], np.dtype[np.str_]]
    device: np.ndarray[tuple[int], np.dtype[np.str_]]

    def log_error(self, of: FloatArray, rows: IntArray) -> FloatArray:
        """Return the logarithm of estimated over measured TPOT."""
        read, decoding, head_read, head, mixed_read, mixed, share, *others = self.values[rows].T
        weights_of, keys_of, decoding_of, encoding_of, link_of, collective, kernel, iteration = np.exp(of)
        alone = np.maximum(read / weights_of, decoding / decoding_of)
        beside = np.maximum(mixed_read / weights_of, mixed / encoding_of)
        seconds = alone + share * np.maximum(0.0, beside - alone)
        seconds = seconds + np.maximum(head_read / weights_of, head / decoding_of) + iteration
        factors = 1 / keys_of, 1 / encoding_of, 1 / link_of, collective, kernel
        seconds = seconds + sum(term * factor for term, factor in zip(others, factors, strict=True))
        return np.asarray(np.log(seconds) - np.log(self.measured[rows]))


def terms(points: Sequence[MeasuredPoint]) -> Terms:
    """Return the terms of each point: what takes time in the library's own estimate, at full rates."""
    values = np.array([_row(point) for point in points])
    return Terms(
        values,
        np.array([point.tpot for point in points]),
        np.array([f"{point.model} on {point.device}" for point in points]),
        np.array([point.model for point in points]),
        np.array([point.device for point in points]),
    )


def _row(point: MeasuredPoint) -> list[float]:
    infinite, device, shape = float("inf"), ROOFLINE_DEVICES[point.device], point.shape
    off = dict.fromkeys(("weights", "keys", "decoding", "encoding", "link"), infinite)
    off |= dict.fromkeys(("collective", "kernel", "iteration"), 0.0)

    def line(**kept: float) -> Roofline:
        return Roofline(shape, device, point.degree, Efficiency(**(off | kept)))

    def alone(**kept: float) -> float:
        return line(**kept).tpot(point.sequences, point.input_tokens, point.output_tokens)

    each = np.array([point.sequences])
    together = max(1.0, point.sequences / point.output_tokens)
    all_tokens = each + together * point.input_tokens
    reading, decoding, encoding = line(weights=1.0), line(decoding=1.0), line(encoding=1.0)
    matrices = (
        shape.layers * reading.layer_seconds(each, prompts=False),
        shape.layers * decoding.layer_seconds(each, prompts=False),
        reading.head_seconds(each),
        decoding.head_seconds(each),
        shape.layers * reading.layer_seconds(all_tokens, prompts=True),
        shape.layers * encoding.layer_seconds(all_tokens, prompts=True),
    )
    attention = encoding.encode_attention(np.array([point.input_tokens]))
    attention = attention * shape.layers * point.sequences / point.output_tokens
    share = point.sequences / point.output_tokens / together
    others = [alone(**{name: 1.0}) for name in ("keys", "link", "collective", "kernel")]
    return [*(float(each[0]) for each in matrices), share, others[0], float(attention[0]), *others[1:]]


def fit(known: Terms, rows: IntArray) -> FloatArray:
    """Return the logarithms of the factors that come nearest to some points; a pair weighs as its root."""
    start = np.log(astuple(START))
    sizes = Counter(known.pair[rows].tolist())
    weight = np.array([sizes[pair] ** -0.25 for pair in known.pair[rows].tolist()])
    weight *= np.sqrt(len(rows) / (weight**2).sum())

    def residuals(of: FloatArray) -> FloatArray:
        pull = np.sqrt(len(rows)) * _PULL * (of - start) / _WIDTHS
        return np.concatenate((known.log_error(of, rows) * weight, pull))

    return np.asarray(least_squares(residuals, start, loss="soft_l1", f_scale=0.3).x)


def left_out_errors(known: Terms) -> FloatArray:
    """Return each point's log error by factors that saw neither its model nor device; NaN if too few."""
    errors = np.full(len(known.measured), np.nan)
    for pair, size in Counter(known.pair.tolist()).items():
        rows = np.flatnonzero(known.pair == pair)
        others = _others(known, rows)
        if size >= _FEW and len(others):
            errors[rows] = known.log_error(fit(known, others), rows)
    return errors


def _others(known: Terms, rows: IntArray) -> IntArray:
    at = rows[0]
    return np.flatnonzero((known.model != known.model[at]) & (known.device != known.device[at]))


def table(known: Terms, errors: FloatArray) -> list[dict[str, object]]:
    """Return, for each model on each device, the median and what its error bar holds of its points."""
    found: list[dict[str, object]] = []
    for pair in sorted(set(known.pair.tolist())):
        rows = np.flatnonzero(known.pair == pair)
        others = _others(known, rows)
        others = others[~np.isnan(errors[others])]
        if np.isnan(errors[rows]).any() or not len(others):
            continue
        low, high = np.quantile(errors[others], COVERED)
        inside = (errors[rows] >= low) & (errors[rows] <= high)
        found.append(
            {
                "pair": pair,
                "points": len(rows),
                "median": float(np.exp(np.median(errors[rows]))),
                "bar": [float(np.exp(low)), float(np.exp(high))],
                "held": float(inside.mean()),
            }
        )
    return found


def by(names: np.ndarray[tuple[int], np.dtype[np.str_]], errors: FloatArray) -> dict[str, dict[str, float]]:
    """Return, by name, the points, their median, and the share within the error bar that estimates print."""
    found = {}
    for name in sorted(set(names[~np.isnan(errors)].tolist())):
        ratios = np.exp(errors[(names == name) & ~np.isnan(errors)])
        inside = (ratios >= ERROR_BAR[0]) & (ratios <= ERROR_BAR[1])
        found[name] = {
            "points": len(ratios),
            "median": float(np.median(ratios)),
            "held": float(inside.mean()),
        }
    return found


def sharing(points: Sequence[MeasuredPoint]) -> list[str]:
    """Return what more devices of a layer gain, measured and estimated, a sentence each."""
    found: dict[tuple[object, ...], dict[int, list[tuple[float, float]]]] = {}
    for point in points:
        if point.expert_degree == 1:
            estimate = Roofline(point.shape, ROOFLINE_DEVICES[point.device], point.degree)
            lengths = point.sequences, point.input_tokens, point.output_tokens
            same = (point.device, point.backend, point.shape, *lengths)
            both = point.tpot, estimate.tpot(*lengths)
            found.setdefault(same, {}).setdefault(point.degree, []).append(both)
    lines = []
    for few, many in ((1, 2), (1, 4), (1, 8), (2, 4), (4, 8)):
        pairs = [
            np.median(of[many], axis=0) / np.median(of[few], axis=0)
            for of in found.values()
            if few in of and many in of
        ]
        if pairs:
            measured, estimated = np.median(pairs, axis=0)
            off = np.quantile([pair[1] / pair[0] for pair in pairs], (0.5, 0.1, 0.9))
            line = f"TP {many} over TP {few}: {len(pairs)} points, TPOT measured {measured:.2f} x, estimated"
            lines.append(
                f"{line} {estimated:.2f} x; quotient {off[0]:.2f}, 80 % {off[1]:.2f} to {off[2]:.2f}"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--json", metavar="OUT")
    args = parser.parse_args(argv)
    points, left_out = read_aiconfigurator(args.file)
    known = terms(points)
    errors = left_out_errors(known)
    rows = table(known, errors)
    judged = errors[~np.isnan(errors)]
    whole = np.exp(fit(known, np.arange(len(points))))
    held = np.array([(row["held"], row["points"]) for row in rows], dtype=np.float64)
    result: dict[str, Any] = {
        "points": len(points),
        "left_out": dict(left_out),
        "efficiency": dict(zip(Efficiency.__dataclass_fields__, whole.tolist(), strict=True)),
        "median": float(np.exp(np.median(judged))),
        "bar": np.exp(np.quantile(judged, COVERED)).tolist(),
        "held": float(np.average(held[:, 0], weights=held[:, 1])),
        "pairs": rows,
        "all": by(np.full(len(errors), "all"), errors),
        "devices": by(known.device, errors),
        "models": by(known.model, errors),
        "devices of a layer": by(np.array([f"TP {point.degree}" for point in points]), errors),
        "devices of the experts": by(np.array([f"EP {point.expert_degree}" for point in points]), errors),
    }
    for reason, many in left_out.items():
        print(f"left out {many:5d}  {reason}")
    print("efficiency " + ", ".join(f"{name} {value:.3g}" for name, value in result["efficiency"].items()))
    print(f"{len(judged)} points of models and devices left out: median {result['median']:.3f}")
    print(f"middle 90 % of the errors {result['bar']}; a bar from other pairs holds {result['held']:.1%}")
    for kind in ("all", "devices", "models", "devices of a layer", "devices of the experts"):
        for name, one in result[kind].items():
            share = f"{one['held']:.0%} within the printed bar {ERROR_BAR}"
            print(f"  {name:32s} {one['points']:5.0f} points, median {one['median']:.2f}, {share}")
    for row in rows:
        figures = f"{row['points']:5d} points, median {row['median']:.2f}, held {row['held']:.0%}"
        print(f"  {row['pair']:32s} {figures}")
    print("\n".join(sharing(points)))
    if args.json:
        with open(args.json, "w") as stream:
            json.dump(result, stream, indent=1)
    return result


if __name__ == "__main__":
    main()
