"""
BATON's 30 short queries: the lengths of their answers as far as its Table 2 tells them.

The paper publishes ten completion times (static batches and BATON at batch 2 to 10) but not the lengths:
"both the input and response range from a few dozen to 200 words". Here the lengths and their order are
inferred from the ten times.

Assumed: queries are served in one order; a static batch takes as many rounds as its longest answer; BATON
gives a freed row to the next query at once; prefills cost nothing (the paper ran them apart for all ways); a
round takes a + b * batch size seconds, in both ways alike. Fitted: a, b and the 30 lengths in their order, by
simulated annealing on the sum of squared relative errors. Chosen: the range of the lengths, and the seed. Ten
numbers do not tell thirty: other seeds give other lists with errors alike.

Run: ``python benchmarks/baton_lengths.py`` (half a minute on one CPU thread)
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

TABLE_2 = {2: (161.77, 83.43), 4: (92.68, 49.61), 6: (61.70, 37.25), 8: (50.07, 31.08), 10: (40.45, 30.99)}
"""BATON, Table 2: seconds of the static benchmark and of BATON by batch size, on the 30 queries."""

QUERIES = 30
RANGES = {"stated": (24, 200), "free": (1, 400)}
"""Shortest and longest answer: as the paper states them (two dozen to 200), or no bound to speak of."""

TRIES = 100_000
"""Lists of lengths that the search looks at."""
_HOT, _COLD = 3e-3, 3e-7
"""First and last temperature, in squared relative errors."""


@dataclass(frozen=True, slots=True)
class Fit:
    """
    Lengths that explain the published times, and how well.

    Parameters
    ----------
    lengths
        Decode steps of each answer, in the order in which the queries are served.
    seconds
        Of a decode step: the part without rows, and what each row adds.
    errors
        Fitted over published seconds, less one; static and BATON, shape (batch sizes, 2).
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, float]
    errors: NDArray[np.float64]

    @property
    def loss(self) -> float:
        """Sum of the squared errors."""
        return float((self.errors**2).sum())


def static_steps(lengths: Sequence[int], slots: int) -> int:
    """Return the decode steps of one full batch after the other, each until its longest answer ends."""
    return sum(max(lengths[begin : begin + slots]) for begin in range(0, len(lengths), slots))


def refilled_steps(lengths: Sequence[int], slots: int) -> int:
    """Return the decode steps if the next query takes each row that falls free."""
    ends = list(lengths[:slots])
    heapq.heapify(ends)
    for decode_steps in lengths[slots:]:
        heapq.heapreplace(ends, ends[0] + decode_steps)
    return max(ends)


def fit_seconds(lengths: Sequence[int]) -> Fit:
    """Return the seconds of a step, never fewer with more rows, that explain the published times best."""
    decode_steps = [(static_steps(lengths, slots), refilled_steps(lengths, slots)) for slots in TABLE_2]
    # Errors are relative: each row of the least squares is divided by what was published.
    shares = (np.array(decode_steps) / np.array(list(TABLE_2.values()))).ravel()
    slopes = shares * np.repeat(list(TABLE_2), 2)
    a, b, c = shares @ shares, shares @ slopes, slopes @ slopes
    per_row = (a * slopes.sum() - b * shares.sum()) / (a * c - b * b)
    per_row = max(0.0, per_row)
    base = (shares.sum() - b * per_row) / a
    errors = (base * shares + per_row * slopes - 1).reshape(-1, 2)
    return Fit(tuple(lengths), (float(base), float(per_row)), errors)


@cache
def reconstruct(shortest: int, longest: int, seed: int = 0, tries: int = TRIES) -> Fit:
    """
    Return lengths in a range that explain the published times as well as the search can.

    Parameters
    ----------
    shortest, longest
        The range. Lengths have no unit: only their ratios count.
    seed
        Of the lengths it starts from, uniform in the range, and of its moves.
    tries
        Lists tried.
    """
    rng = random.Random(seed)
    now = best = fit_seconds([rng.randint(shortest, longest) for _ in range(QUERIES)])
    for at in range(tries):
        temperature = _HOT * (_COLD / _HOT) ** (at / tries)
        lengths = list(now.lengths)
        i = rng.randrange(QUERIES)
        if rng.random() < 0.4:
            j = rng.randrange(QUERIES)
            lengths[i], lengths[j] = lengths[j], lengths[i]
        elif rng.random() < 0.5:
            lengths[i] = rng.randint(shortest, longest)
        else:
            lengths[i] = min(longest, max(shortest, lengths[i] + rng.randint(-10, 10)))
        new = fit_seconds(lengths)
        if new.loss < now.loss or rng.random() < math.exp((now.loss - new.loss) / temperature):
            now = new
            best = min(best, new, key=lambda fit: fit.loss)
    return best


def largest_ratio(shortest: int, longest: int, slots: int) -> float:
    """
    Return what static batches of any lengths in a range, in any order, take at most, over any other way.

    A batch of B answers whose longest has l steps holds at least l + (B - 1) shortest of them, and no way
    gives more than B tokens a step: it takes (l + (B - 1) shortest) / B steps for what the static batch
    takes l for. The quotient grows with l. For decode steps that take equal time in both ways.
    """
    return slots * longest / (longest + (slots - 1) * shortest)


def any_order(lengths: Sequence[int], slots: int) -> float:
    """Return how many times as long static batches in this order take as the best order could at all."""
    return static_steps(lengths, slots) / max(max(lengths), sum(lengths) / slots)


def show(name: str, seed: int, tries: int) -> None:
    """Print a reconstruction with its errors."""
    fit = reconstruct(*RANGES[name], seed, tries)
    base, per_row = fit.seconds
    print(
        f"\n{name}, seed {seed}: root mean square error {math.sqrt(fit.loss / fit.errors.size):.1%}; ", end=""
    )
    print(f"a decode step takes {1e3 * base:.1f} + {1e3 * per_row:.2f} x batch size ms")
    print(f"  lengths {list(fit.lengths)}, mean {np.mean(fit.lengths):.0f}")
    print(
        f"  {'batch':>5s} {'static':>8s} {'error':>7s} {'BATON':>8s} {'error':>7s} {'speed-up':>9s} ", end=""
    )
    print(f"{'fitted':>7s} {'any order':>10s}")
    for (slots, (static, refilled)), (before, after) in zip(TABLE_2.items(), fit.errors, strict=True):
        ratio = static_steps(fit.lengths, slots) / refilled_steps(fit.lengths, slots)
        print(f"  {slots:5d} {static:8.2f} {before:+7.1%} {refilled:8.2f} {after:+7.1%} ", end="")
        print(f"{static / refilled:8.2f}x {ratio:6.2f}x {any_order(fit.lengths, slots):9.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=TRIES, help="lists of lengths (default %(default)s)")
    arguments = parser.parse_args()
    static, refilled = TABLE_2[2]
    share = (2 * refilled - static) / static
    shortest, longest = RANGES["stated"]
    most = largest_ratio(shortest, longest, 2)
    print(
        f"""If decode steps take equal time in both ways: at batch 2 the longer answers of the 15 pairs take
{static} s one after the other, and all 30 at most 2 x {refilled} s. So the 15 shorter ones come to
{share:.1%} of the longer ones at most: {share * longest:.0f} words beside {longest}.
With answers of {shortest} to {longest} words no order gives more than {most:.2f}x;
published are {static / refilled:.2f}x."""
    )
    for name in RANGES:
        for seed in range(arguments.seeds):
            show(name, seed, arguments.tries)


if __name__ == "__main__":
    main()
