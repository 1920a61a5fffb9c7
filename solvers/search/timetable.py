"""
The timetable search: stage times fixed ahead, and at each the requests that end just before a later one.

Requests that end together leave their slots to one prefill stage. Given the times of all stages, a stage
so takes, of the requests that wait, those that waste the fewest rounds before a later stage, the longest
ones first; annealing moves the times. A step costs a few milliseconds whatever the lengths, where the slot
flow's linear programme takes seconds over a hundred stages, and it knows what every round holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...data.costs.cost import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...heuristics.queues.ordered import longest_first
from .constructive import ski_rental_schedule

STAGES = (0.25, 0.4, 0.6, 0.9)
"""Numbers of stages to start from, in those of the ski-rental rule."""

SLACK = 0.6
"""How far the first timetables' end is from the fewest rounds there could be, on the way to the rule's."""

LEAST_SLACK = 0.01
"""How far it is at least, as a share of the fewest rounds."""

PREFERENCE = 0.02
"""Rounds wasted per round of length that the longer of two requests may waste more, at the start."""

HOT, COLD = 2.0, 0.08
"""Temperatures at the start and the end, in costs of a prefill stage."""

LEFT_OUT = (3.0, 12.0)
"""What the rounds of requests left out are charged at the start and the end, in their share of a round."""

MOST_LEFT_OUT = 4
"""Slots' worth of requests left out from which a timetable makes no schedule."""

SPARE = 64
"""Requests beyond the free slots that are tried where memory or tokens refuse some."""


@dataclass(frozen=True, slots=True, eq=False)
class _Timetable:
    """Stage times and the end, rising, shape (stages + 1,), and the preference for long requests."""

    times: IntArray
    preference: float

    def changed(self, rng: np.random.Generator) -> _Timetable:
        """Return it with some times shifted, one more or one less, or another preference."""
        times, kind, shift = self.times.copy(), rng.random(), int(rng.choice((-1, 1)) * rng.geometric(0.3))
        one, other = np.sort(rng.integers(1, len(times), 2))
        if kind < 0.35:
            times[one] += shift
        elif kind < 0.6:
            times[one:] += shift
        elif kind < 0.75:
            times[one : other + 1] += shift
        elif kind < 0.85:
            times = np.delete(times, one) if one < len(times) - 1 else times
        elif kind < 0.95:
            times = np.append(times, rng.integers(1, max(2, times[-1])))
        else:
            return _Timetable(times, float(np.clip(self.preference * np.exp(0.3 * rng.normal()), 1e-4, 0.5)))
        times = np.unique(np.maximum(times, 0))
        return _Timetable(times, self.preference) if len(times) > 1 else self


@dataclass(frozen=True, slots=True, eq=False)
class _Filled:
    """Who is prefilled when: the stage of each request, -1 for none, and what that costs."""

    stage_of: IntArray
    seconds: float
    left_out: float

    def charged(self, weight: float) -> float:
        return self.seconds + weight * self.left_out


class _Filler:
    """Fills timetables with a problem's requests, which it knows longest first."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.order = longest_first(problem)
        self._rounds = problem.rounds[self.order]
        self._prompt = problem.prompt_tokens[self.order]
        self._held = problem.kv_at_start[self.order]
        self._ramp = np.arange(int(self._rounds[0]) + 2)
        self._stage = max(problem.cost.prefill_base, problem.cost.prefill_floor)

    def fill(self, timetable: _Timetable) -> _Filled:
        """Return the timetable filled: stages of the requests, longest first."""
        times, problem, reach = timetable.times, self._problem, len(self._ramp)
        stage_of = np.full(len(self._rounds), -1, dtype=np.int64)
        waiting = np.arange(len(self._rounds))
        ending = np.zeros(int(times[-1]) + reach, dtype=np.int64)
        held = np.zeros(int(times[-1]) + reach, dtype=np.int64)
        active, last = 0, 0
        for stage, now in enumerate(times[:-1].tolist()):
            active -= int(ending[last : now + 1].sum())
            last = now + 1
            free = problem.slots - active
            if free <= 0 or not len(waiting):
                continue
            found = self._best(waiting, times[stage + 1 :] - now, timetable.preference, free)
            taken = self._allowed(waiting, found, free, held[now : now + reach])
            chosen = waiting[taken]
            stage_of[chosen] = stage
            running = self._rounds[chosen][self._rounds[chosen] > 0]
            ending += np.bincount(now + running, minlength=len(ending))
            active += len(running)
            waiting = np.delete(waiting, taken)
        served = stage_of >= 0
        end = int((times[stage_of[served]] + self._rounds[served]).max(initial=0))
        seconds = self._stage * len(np.unique(stage_of[served])) + problem.cost.decode_base * end
        left_out = problem.cost.decode_base * float((self._rounds[waiting] + 1).sum()) / problem.slots
        return _Filled(stage_of, seconds, left_out)

    def _best(self, waiting: IntArray, spans: IntArray, preference: float, free: int) -> IntArray:
        """Return places in ``waiting`` of requests that some span holds, the best to take first."""
        rounds = self._rounds[waiting]
        at = np.searchsorted(spans, rounds)
        holds = at < len(spans)
        score = np.where(holds, spans[np.minimum(at, len(spans) - 1)] - (1 + preference) * rounds, np.inf)
        most = min(len(waiting), free + SPARE)
        best = np.argpartition(score, most - 1)[:most]
        best = best[np.argsort(score[best], kind="stable")]
        found: IntArray = best[np.isfinite(score[best])]
        return found

    def _allowed(self, waiting: IntArray, found: IntArray, free: int, held: IntArray) -> IntArray:
        """Return the first of the found that memory and tokens allow, and add what they hold to ``held``."""
        cap, capacity = self._problem.prefill_token_cap, self._problem.kv_capacity
        taken = found[:free]
        if capacity is None and cap is None:
            return taken
        adds = self._holding(waiting[taken])
        within = capacity is None or int((held + adds).max()) <= capacity
        if within and (cap is None or int(self._prompt[waiting[taken]].sum()) <= cap):
            held += adds
            return taken
        kept: list[int] = []
        tokens = 0
        for place in found.tolist():
            if len(kept) == free:
                break
            request = waiting[place]
            rounds, prompt = max(1, int(self._rounds[request])), int(self._prompt[request])
            grown = held[:rounds] + self._ramp[:rounds] + self._held[request]
            if cap is not None and tokens + prompt > cap:
                continue
            if capacity is None or int(grown.max()) <= capacity:
                held[:rounds] = grown
                tokens += prompt
                kept.append(place)
        return np.array(kept, dtype=np.int64)

    def _holding(self, requests: IntArray) -> IntArray:
        """Return what requests hold together in each round after their prefill, shape (longest + 2,)."""
        rounds = np.maximum(1, self._rounds[requests])
        gone = np.cumsum(np.bincount(rounds, minlength=len(self._ramp)))
        freed = np.cumsum(np.bincount(rounds, weights=self._held[requests], minlength=len(self._ramp)))
        left: IntArray = self._held[requests].sum() - freed.astype(np.int64)
        return left + (len(requests) - gone) * self._ramp

    def schedule(self, timetable: _Timetable, filled: _Filled) -> Schedule | None:
        """Return the schedule, those left out prefilled last, or None if it breaks a rule."""
        served = filled.stage_of >= 0
        if not served.any() or len(served) - served.sum() > MOST_LEFT_OUT * self._problem.slots:
            return None
        stage_of = filled.stage_of
        times = timetable.times[: stage_of.max() + 1]
        ends = times[stage_of[served]] + self._rounds[served]
        end, left = int(ends.max()), np.flatnonzero(~served)
        tails = [self._together(ends, int(times[-1]), left), self._behind(end, left)]
        for stages, starts in tails if len(left) else [(left, left)]:
            bins = np.empty_like(stage_of)
            bins[self.order[served]] = stage_of[served]
            bins[self.order[left]] = len(times) + stages
            last = int((starts[stages] + self._rounds[left]).max(initial=end))
            try:
                rounds = np.diff(np.concatenate((times, starts, [last])))
                schedule = Schedule.from_bins(self._problem, bins, rounds)
            except ValueError:
                continue
            if schedule.check(self._problem) is None:
                return schedule
        return None

    def _together(self, ends: IntArray, last: int, left: IntArray) -> tuple[IntArray, IntArray]:
        """Return stages and their starts that prefill the left-out at once, as soon as slots are free."""
        busy = self._problem.slots - len(left)
        late = np.sort(ends)[::-1]
        start = int(late[busy]) if 0 <= busy < len(late) else int(late[0])
        return np.zeros(len(left), dtype=np.int64), np.array([max(last + 1, start)])

    def _behind(self, end: int, left: IntArray) -> tuple[IntArray, IntArray]:
        """Return stages and their starts that serve the left-out by the ski-rental rule, after all others."""
        if not len(left):
            return left, left
        rest = replace(self._problem, workload=self._problem.workload.select(self.order[left]))
        tail = ski_rental_schedule(rest)
        return tail.bin_of, end + tail.starts[:-1]


class TimetableAnnealing:
    """
    An annealing walk over timetables.

    Parameters
    ----------
    problem
        The problem scheduled, whose rounds cost something; arrival times are not looked at.
    rng
        Draws the moves.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self._problem, self._rng = problem, rng
        self._filler = _Filler(problem)
        self._at, self._now = min(
            ((timetable, self._filler.fill(timetable)) for timetable in _first(problem, rng)),
            key=lambda pair: pair[1].charged(LEFT_OUT[0]),
        )
        cost = problem.cost
        self._stage = max(cost.prefill_base, cost.prefill_floor, 1e-3 * cost.decode_base)
        self._begun = False
        self._least = np.inf

    def step(self, done: float) -> Schedule | None:
        """
        Do a step, and return the schedule of the timetable it ends at if that is the best one met so far.

        Parameters
        ----------
        done
            The share of the walk that is over, 0 to 1.
        """
        weight = LEFT_OUT[0] * (LEFT_OUT[1] / LEFT_OUT[0]) ** done
        temperature = self._stage * HOT * (COLD / HOT) ** done
        timetable = self._at.changed(self._rng) if self._begun else self._at
        filled = self._filler.fill(timetable) if self._begun else self._now
        self._begun = True
        if filled.charged(weight) > self._now.charged(weight) + temperature * self._rng.exponential():
            return None
        self._at, self._now = timetable, filled
        if filled.charged(LEFT_OUT[1]) >= self._least:
            return None
        self._least = filled.charged(LEFT_OUT[1])
        return self._filler.schedule(timetable, filled)


def _first(problem: Problem, rng: np.random.Generator) -> list[_Timetable]:
    """Return the stage times of the ski-rental rule, and uneven ones of fewer stages."""
    # Without the memory, which takes the rule a hundred times as long: the times are only to start from.
    times = np.unique(ski_rental_schedule(replace(problem, kv_capacity=None)).starts)
    fewest = problem.rounds.sum() / problem.slots
    if problem.kv_capacity is not None:
        fewest = max(fewest, problem.kv_token_rounds / problem.kv_capacity)
    slack = max(SLACK * (times[-1] - fewest), LEAST_SLACK * fewest)
    end = max(int(problem.rounds.max()), round(fewest + slack), 1)
    found = [_Timetable(times, PREFERENCE)] if len(times) > 1 else []
    for share in STAGES:
        count = max(1, round(share * len(times)))
        uneven = (np.arange(count) + rng.uniform(-0.4, 0.4, count)) * end / count
        stages = np.clip(np.rint(uneven).astype(np.int64), 0, end)
        found.append(_Timetable(np.unique(np.concatenate(([0], stages, [end]))), PREFERENCE))
    return found
