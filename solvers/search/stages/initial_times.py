"""Initial stage times, spread unevenly over the decode steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....data.arrays import IntArray
from .parameters import StageTimeParameters
from .slot_price import slots_by_lengths
from .spans import LengthProfile, Spans
from .times import StageCosts


def initial_times(
    profile: LengthProfile, costs: StageCosts, rng: np.random.Generator, most_spans: int
) -> Iterator[IntArray]:
    """Yield stage times, the most promising number of stages first.

    With S stages there are about S² / 2 spans between them. A request finds one hardly longer than itself if
    no two spans are equal; evenly spread stages would have only S different ones.

    costs: Costs of a stage and a decode step, and the slots.
    most_spans: Spans between stages from which no more stages are tried.
    """
    worked = int(np.diff(profile.at_most, prepend=0) @ np.arange(profile.longest + 1))
    end = max(profile.longest, -(-worked // costs.slots))
    values = costs.values
    fewest = max(1, -(-profile.requests // costs.slots))
    tried: list[tuple[float, int, IntArray]] = []
    count = fewest
    while True:
        drawn = _drawn(end, count, rng, values)
        spans = Spans.number_between(drawn[0], profile)
        if spans > values.most_spans:
            break
        guide = costs.guide(drawn, slots_by_lengths(drawn, profile), 0.0)
        best = np.argsort(guide, kind="stable")[: values.kept_draws]
        tried += [(float(guide[k]), count, drawn[k]) for k in best if np.isfinite(guide[k])]
        count = max(count + 1, round(values.count_ratio * count))
        # No request needs a stage of its own, and a spare one helps no request.
        if count > profile.requests or spans * values.count_ratio**2 > most_spans:
            break
    # The best of each number first: lengths alone say more of the numbers than of the draws.
    by_count: dict[int, list[IntArray]] = {}
    for _, count, times in sorted(tried, key=lambda each: each[:2]):
        by_count.setdefault(count, []).append(times)
    counts = list(by_count)
    yield from (by_count[count][0] for count in counts[:2])
    yield from by_count[counts[0]][1:] if counts else ()
    yield from (times for count in counts[1:] for times in by_count[count][1 if count in counts[:2] else 0 :])


def _drawn(end: int, count: int, rng: np.random.Generator, values: StageTimeParameters) -> IntArray:
    """Return uneven stage times, shape (draws, count + 1)."""
    place = np.arange(1, count) + rng.uniform(-values.uneven, values.uneven, (values.draws, count - 1))
    bent = np.clip(place / count, 0.0, 1.0) ** rng.uniform(0.8, 1.25, (values.draws, 1))
    inner = np.sort(np.rint(bent * end).astype(np.int64), axis=1)
    first, last = np.zeros((values.draws, 1), dtype=np.int64), np.full((values.draws, 1), end, dtype=np.int64)
    return np.concatenate((first, inner, last), axis=1)
