"""Annealing over the times of prefill stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

import numpy as np

from ....data.arrays import IntArray
from ....data.problem import Problem
from ....data.schedule import Schedule
from ....models.bounds.least_counts import cheapest_stages, cost_terms
from ..constructive import ski_rental_schedule
from .parameters import StageTimeParameters
from .slot_price import slot_price, slots_by_lengths
from .spans import LengthProfile, Spans
from .times import StageCosts, StageTimesSearch


@dataclass(frozen=True, slots=True, eq=False)
class LevelSplit:
    """Head of full levels, and the rest, with far fewer stages.

    A level holds a longest request in every slot.
    """

    problem: Problem
    levels: IntArray
    """Requests of each level, shape (levels, slots)."""
    rest: Problem
    """The problem without them."""
    others: IntArray
    """Requests of the rest, shape (requests of the rest,)."""

    @classmethod
    def of(cls, problem: Problem) -> LevelSplit:
        """Split a problem; the rest keeps a longest request."""
        longest = np.flatnonzero(problem.decode_steps == problem.decode_steps.max())
        levels = (len(longest) - 1) // problem.slots
        if levels < 1 or problem.prefill_token_cap is not None:
            none = np.empty((0, problem.slots), dtype=np.int64)
            return cls(problem, none, problem, np.arange(len(problem)))
        head = longest[: levels * problem.slots]
        rest_of_requests = np.setdiff1d(np.arange(len(problem)), head)
        rest = Problem(
            problem.workload.select(rest_of_requests),
            problem.cost,
            problem.slots,
            prefill_emits_first_token=problem.prefill_emits_first_token,
        )
        return cls(problem, head.reshape(levels, problem.slots), rest, rest_of_requests)

    def least_makespan(self, times: IntArray) -> float:
        """Return the least seconds for some stage times of the rest."""
        levels = len(self.levels)
        stages = cheapest_stages(self.problem, levels + len(times) - 1)
        decode_steps = levels * int(self.problem.decode_steps.max()) + int(times[-1])
        return sum(cost_terms(self.problem, stages, decode_steps).values())

    def schedule(self, bin_of: IntArray, decode_steps: IntArray) -> Schedule:
        """Return the whole problem's schedule for one of the rest."""
        levels = len(self.levels)
        bins = np.empty(len(self.problem), dtype=np.int64)
        bins[self.levels] = np.arange(levels)[:, None]
        bins[self.others] = bin_of + levels
        full = np.full(levels, self.problem.decode_steps.max())
        return Schedule.from_bins(self.problem, bins, np.concatenate((full, decode_steps)))


class StageAnnealing:
    """Walk over stage times that cools down once.

    rng: Draws the moves.
    split: The problem's full levels and the rest, whose stage times are annealed.
    start: Initial stage times of the rest.
    """

    def __init__(
        self,
        problem: Problem,
        costs: StageCosts,
        rng: np.random.Generator,
        split: LevelSplit,
        profile: LengthProfile,
        start: IntArray,
    ) -> None:
        self._costs, self._values = costs, costs.values
        self._few = len(problem) <= self._values.few_requests
        self._hot, self._steps = self._values.hot if self._few else self._values.cold, 0
        self.split, self.profile = split, profile
        self.walk = StageTimesSearch(profile, costs, start, rng)

    @classmethod
    def of(
        cls,
        problem: Problem,
        costs: StageCosts,
        rng: np.random.Generator,
        late: Callable[[], bool],
        most_spans: tuple[int, int],
    ) -> StageAnnealing | None:
        """Begin from the cheapest of several starts; None without one.

        late: Returns True if no further start may be tried.
        """
        split = LevelSplit.of(problem)
        profile = LengthProfile.of(split.rest.decode_steps)
        about, widest = most_spans
        spread = initial_times(profile, costs, rng, about)
        largest = min(widest, about + about // 2), widest
        start = _start_times(split.rest, profile, costs, spread, late, largest)
        return None if start is None else cls(problem, costs, rng, split, profile, start)

    def step(self, done: float, late: Callable[[], bool]) -> None:
        """Take a step of the walk.

        done: Share of the annealing that is over, 0 to 1.
        late: Returns True if the step has to end at once.
        """
        self._steps += 1
        values = self._values
        if self._steps == values.timed_steps and not self._few:
            expected = values.timed_steps / max(done, 1e-9)
            self._hot = min(values.hot, max(values.cold, values.hot * expected / values.long_walk))
        temperature = self._hot * (values.cold / self._hot) ** min(1.0, done)
        self.walk.step(self._costs.dearest * temperature, values.kink, late)


def _start_times(
    problem: Problem,
    profile: LengthProfile,
    costs: StageCosts,
    spread: Iterator[IntArray],
    late: Callable[[], bool],
    most_spans: tuple[int, int],
) -> IntArray | None:
    """Return the cheapest stage times, scaled to the slots; None without any."""
    constructed: list[IntArray] = []
    for patience in costs.values.start_patiences:
        if late() and constructed:
            break
        constructed.append(np.asarray(ski_rental_schedule(problem, patience=patience).starts))
    pairs = zip_longest(islice(spread, costs.values.start_numbers), constructed)
    tried = [times for pair in pairs for times in pair if times is not None]
    sizes = [Spans.number_between(times, profile) for times in tried]
    # Constructed stages may have many more spans than spread ones, and take as much longer to price.
    few = [times for times, size in zip(tried, sizes, strict=True) if size <= most_spans[0]]
    priceable = few or [times for times, size in zip(tried, sizes, strict=True) if size <= most_spans[1]]
    if not priceable:
        return None
    best = _cheapest(priceable, profile, costs, late)
    price = slot_price(best, profile)
    if price is None:
        return best
    # As long as the given slots need: the walk then has no lack of slots to make up for first.
    end = max(profile.longest, math.ceil(best[-1] * price.slots / costs.slots * costs.values.start_scale))
    scaled: IntArray = np.rint(best * (end / best[-1])).astype(np.int64)
    return scaled


def _cheapest(
    tried: Sequence[IntArray], profile: LengthProfile, costs: StageCosts, late: Callable[[], bool]
) -> IntArray:
    """Return the stage times of least penalised cost."""
    best, lowest = tried[-1], np.inf
    for times in tried:
        price = slot_price(times, profile)
        if (
            price is not None
            and (seconds := float(costs.guide(times, price.slots, costs.values.kink))) < lowest
        ):
            best, lowest = times, seconds
        if late():
            break
    return best


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
