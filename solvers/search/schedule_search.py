"""The schedule search: the least makespan found within a time limit, lengths known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...data.costs.cost import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from .backward import BackwardSearch, slots_are_scarcer
from .chains import ChainAnnealing, packing_pays, requests_are_few
from .constructive import ski_rental_schedule
from .incumbent import Incumbent
from .memory.beam import BeamSearch, beam_pays
from .memory.insertion import MOST_REQUESTS, InsertionAnnealing
from .prefill_only import StageExchange, evenly_packed
from .reinsertion import MOST_ROUNDS, Reinsertion
from .stage_merge import merge_stages
from .stage_split import stages_capped
from .stages.annealing import FEW, StageAnnealing
from .stages.rounding import shift_times
from .stages.slot_flow import Spans, stretched, whole_slots
from .stages.spread import MOST_SPANS
from .stages.times import StageCosts
from .stages.within_memory import served_within_memory
from .starts import starts

STARTS_SHARE = 0.25
"""The share of the limits after which no further rule is tried for a start."""

SCARCE_STARTS_SHARE = 0.15
"""That share where memory is scarcer than slots and no rule has beaten what is built from its end by then."""

STARTS_SECONDS = 0.2
"""Seconds that the rules may take in any case: twice a limit of a tenth, and less than its tolerance."""

OVERTIME, OVERTIME_SECONDS = 0.02, 0.12
"""How long after the limit the rules that it left no time for may be tried: a share of it, and seconds."""

START_SHARE = 0.3
"""The share of what is left of the limits after which the annealing looks for no better start."""

START_SPANS = (1200, 800, 400)
"""Spans between the stages that the annealing begins with; fewer where more made no schedule."""

BRIEF = 3.0
"""Seconds left up to which it begins with fewer."""

BRIEF_SPANS, BRIEF_STAGES = 1800, 160
"""Spans and stages up to which it begins at all then: from twice as many on a step takes a second."""

UNCAPPED_SHARE = 0.7
"""The share of the limits in which a token cap is left out of account, and stages are split to keep it."""

RELAXED_SHARE = 0.4
"""The share of the limits in which memory is left out of account there, where slots are scarcer."""

RELAXED_FEW = 0.1
"""That share of few requests, which are put one by one where that does not do."""

SHORT_SHARE = 0.4
"""The share of what is left then in which requests of one that is short of memory are moved elsewhere."""

BEAM_SLOTS, BEAM_SHARE = 6, 0.3
"""Slots up to which beams are searched where memory is enough, and the share of the limits that they take."""

BEAM_SHARES, ORDER_SHARES = (0.4, 0.2), ((0.5,), (0.4, 0.7))
"""
The shares of what is left each time in which a beam search makes schedules of few requests there, and then
orders of them are annealed, once or twice: the second ones where that is mostly better.
"""

ORDERS_PAY = 60, 8
"""Requests up to which, and slots beyond which, it is: a beam is narrow there, and orders are soon tried."""

PACKED_SHARE = 0.3
"""The share of the limits in which requests without a decode step are packed evenly into prefill stages."""

MOST_PACKED = 20_000
"""Requests up to which they are: of more, one packing takes half a second and longer."""

BACKWARD_SHARE = 0.25
"""The share of the limits for backward constructions and orders there, before requests are moved."""

MERGE_SHARE = 0.2
"""The share of what is left of the limits in which prefill stages of the best schedule there are given up."""

BACKWARD_FEW = 0.1
"""That share where few requests are put one by one afterwards."""

PACKING_SHARE = 0.1
"""The share of the seconds left that packing slots full takes at most."""

PLACED_SECONDS = 1e-6
"""What placing a slot's requests in stages takes at least, for each pair of them."""

CHAIN_SHARE = 0.5
"""The share of what is left of the limits in which requests of slots packed full are exchanged."""

FIRST_ROUNDING = 0.5
"""Seconds at which stage times are first made a schedule on the way; then at twice as many, and so on."""

GROUPED_SHARE = 0.4
"""The share of the limits after which requests are moved where each stage computes shared prompts again."""

STEP_SECONDS = 0.01
"""Seconds that a step stands for where steps are limited."""

STRETCHED = 1e-3
"""Rounds by which stage times are first stretched where whole slots are too few, as a share of all rounds."""

STRETCHES = 6
"""Times that stage times are stretched, each by twice as much, until whole slots are enough."""

LONGEST_ROUNDING = 2.0
"""Seconds allowed to turn one set of stage times into whole slots."""

ROUNDING_LEFT = 0.4
"""The share of the seconds left that one attempt may take."""

ROUNDING_SHARE = 0.08
"""Most of the time that is kept for turning the last stage times into a schedule."""

ROUNDINGS = 12
"""Seconds kept for that, in times of what the last one took."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleSearchOutcome:
    """
    What a schedule search found.

    Parameters
    ----------
    schedule
        The best schedule, which keeps every rule of the problem, without idle rounds.
    makespan
        Its seconds.
    improvements
        Seconds since the search began and the makespan found then, in order.
    """

    schedule: Schedule
    makespan: float
    iterations: int
    improvements: tuple[tuple[float, float], ...]


def search_schedule(
    problem: Problem,
    *,
    seconds: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    start: Schedule | None = None,
    enough: float = 0.0,
) -> ScheduleSearchOutcome:
    """
    Return the best schedule found, never worse than ``start``.

    As :class:`ScheduleSearch`, from its starts to its end.

    Parameters
    ----------
    problem
        The problem scheduled. Arrival times count in the makespan but do not steer the search.
    seconds
        Wall-clock limit; None for no limit.
    iterations
        Steps of the search; with this limit and no other the outcome is the same for the same seed.
    seed
        Draws the moves.
    start
        A schedule to improve on.
    enough
        Seconds, a proven bound say, at which the search ends: nothing better exists.

    Raises
    ------
    ValueError
        If no limit is given, or ``start`` breaks a rule of the problem.
    """
    search = ScheduleSearch(problem, seconds=seconds, iterations=iterations, seed=seed)
    search.begin(start)
    search.improve(enough)
    return search.outcome()


class ScheduleSearch:
    """
    A search in two parts, the schedules it starts from and what improves them, on one clock.

    Between the two there is room for the proof of a bound. Starts from every rule that could be run instead
    (:func:`~batchbound.solvers.search.starts.starts`). Where memory can't run out, it then anneals over the
    rounds at which prefill stages happen, with the slots needed at given stages as a linear programme; else
    it builds schedules from their end and in other orders, and takes requests out of the best one and puts
    them back elsewhere.

    Parameters
    ----------
    problem, seconds, iterations, seed
        As of :func:`search_schedule`; the clock begins here.

    Raises
    ------
    ValueError
        If no limit is given.
    """

    def __init__(
        self, problem: Problem, *, seconds: float | None = None, iterations: int | None = None, seed: int = 0
    ) -> None:
        if seconds is None and iterations is None:
            raise ValueError("a schedule search needs a limit: seconds or iterations")
        self.incumbent = Incumbent(problem, seconds, iterations)
        self._problem = problem
        self._rng = np.random.default_rng(seed)
        self._untried: list[Callable[[float], Schedule | None]] = []
        self._starts_end = math.inf
        self._attempt = 0
        self._reserve = ROUNDING_SHARE
        self._short: Schedule | None = None

    def begin(self, start: Schedule | None = None) -> None:
        """
        Offer the given schedule and those of the rules, as many as a share of the limits allows.

        Raises
        ------
        ValueError
            If ``start`` breaks a rule of the problem.
        """
        best = self.incumbent
        if start is not None:
            violation = start.check(self._problem)
            if violation is not None:
                raise ValueError(f"the start schedule breaks a rule: {violation}")
            best.offer(start)
        self._untried = starts(self._problem, lambda: best.elapsed > self._starts_end)
        scarce = self._problem.memory_can_run_out and not slots_are_scarcer(self._problem)
        if scarce:
            self._try(max(STARTS_SECONDS, SCARCE_STARTS_SHARE * best.seconds))
        if not scarce or len(best.improvements) > 1:
            self._try(max(STARTS_SECONDS, STARTS_SHARE * best.seconds))
        if best.schedule is None:
            best.offer(ski_rental_schedule(self._problem))

    def _try(self, end: float) -> None:
        """Offer the schedules of rules that have not been tried, until some seconds are over."""
        best, self._starts_end = self.incumbent, end
        while self._untried and best.elapsed <= end:
            schedule = self._untried[0](best.makespan)
            if best.elapsed > end and schedule is None:
                # It may have been cut off, and is tried again against a better schedule.
                break
            del self._untried[0]
            if schedule is not None:
                best.offer(schedule)

    def improve(self, enough: float = 0.0) -> None:
        """
        Search until the limits are used up.

        Parameters
        ----------
        enough
            Seconds, a proven bound say, at which the search ends: nothing better exists.
        """
        best = self.incumbent
        best.enough = enough
        if not self._problem.rounds.any():
            self._pack_stages()
        elif self._problem.memory_can_run_out:
            self._serve_scarce_memory()
        else:
            if self._problem.prefill_token_cap is not None:
                self._relax((UNCAPPED_SHARE,))
            again = len(self._problem.prefix_tokens) > 0 and not self._problem.keeps_every_prefix
            # Stage times know nothing of groups: what they are worth is seen beside a start that does.
            step = self._reinsertion() if again else None
            self._anneal_within(1.0 if step is None else GROUPED_SHARE)
            if step is not None:
                self._until(1.0, step)
        if not best.proven:
            # What there was no time for: against a good schedule most rules are soon given up.
            self._try(best.seconds + OVERTIME * best.seconds + OVERTIME_SECONDS)

    def _pack_stages(self) -> None:
        """Pack the prefill stages of a job without a decode step, then exchange requests between them."""
        if len(self._problem.prefix_tokens):
            return
        best = self.incumbent
        few = len(self._problem) <= MOST_PACKED
        for schedule in evenly_packed(self._problem, self._rng, PACKING_SHARE * best.left) if few else ():
            best.steps += 1
            best.offer(schedule)
            if best.progress >= PACKED_SHARE:
                break
        assert best.schedule is not None, "a search begins with a schedule"
        self._until(1.0, StageExchange(self._problem, self._rng, best.schedule).step)

    def _anneal_within(self, share: float) -> None:
        """Search orders and stage times until a share of the limits is used up."""
        best = self.incumbent
        limits, best.seconds, best.most = (best.seconds, best.most), share * best.seconds, share * best.most
        if self._beam_pays():
            self._put_one_by_one(BeamSearch(self._problem, self._rng), BEAM_SHARE)
        if packing_pays(self._problem):
            self._chain()
        self._anneal()
        best.seconds, best.most = limits

    def _beam_pays(self) -> bool:
        """Return whether requests put one by one fill the slots better than stage times that are annealed."""
        problem, cost = self._problem, self._problem.cost
        if cost.decode_base == 0 or problem.slots > BEAM_SLOTS or not beam_pays(problem):
            return False
        return len(problem) > FEW or max(cost.prefill_base, cost.prefill_floor) >= cost.decode_base

    def outcome(self) -> ScheduleSearchOutcome:
        """Return what was found."""
        best = self.incumbent
        assert best.schedule is not None, "a search begins with a schedule"
        return ScheduleSearchOutcome(best.schedule, best.makespan, best.steps, tuple(best.improvements))

    def _until(self, share: float, step: Callable[[float], Schedule | None]) -> None:
        """Offer what steps make, each told how much of its time is over, up to a share of the limits."""
        # No step begins that would mostly be over time: of large problems one takes a tenth of a second.
        best = self.incumbent
        begun, took = best.progress, 0.0
        while (now := best.progress) < share and best.left >= 0.5 * took:
            best.steps += 1
            before = best.elapsed
            schedule = step((now - begun) / (share - begun))
            if schedule is not None:
                best.offer(schedule)
            took = best.elapsed - before

    def _serve_scarce_memory(self) -> None:
        """Construct backwards, then improve on the best schedule."""
        best, backward = self.incumbent, BackwardSearch(self._problem, self._rng)

        def step(_: float) -> Schedule | None:
            schedule = backward.step(self._late)
            if schedule is None or schedule.makespan(self._problem) >= best.makespan:
                return schedule
            return self._merged(schedule)

        rounds_cost = bool(self._problem.cost.decode_base) and bool(self._problem.rounds.any())
        few, served = rounds_cost and len(self._problem) <= MOST_REQUESTS, False
        if slots_are_scarcer(self._problem):
            relaxed = self._relax((RELAXED_FEW if few else RELAXED_SHARE, 1.0))
            served = not few and relaxed is not None and self._serve_within_memory(relaxed)
        if not few:
            self._merge_best()
        if self._short is not None:
            walk = Reinsertion(self._problem, self._rng, self._short)
            self._until(best.progress + SHORT_SHARE * (1.0 - best.progress), walk.step)
        if len(self._problem) > FEW and not served:
            share = BACKWARD_FEW if few else BACKWARD_SHARE
            self._until(best.progress + share * (1.0 - best.progress), step)
            self._merge_best()
        if few:
            self._put_few()
        self._until(1.0, self._reinsertion() or step)

    def _put_few(self) -> None:
        """Search beams, and anneal over orders from the best schedule on, or from the longest request."""
        problem, start = self._problem, None
        orders_pay = int(len(problem) <= ORDERS_PAY[0] and problem.slots > ORDERS_PAY[1])
        if beam_pays(problem):
            self._put_one_by_one(BeamSearch(problem, self._rng), BEAM_SHARES[orders_pay])
            start = self.incumbent.schedule
        for share in ORDER_SHARES[orders_pay]:
            self._put_one_by_one(InsertionAnnealing(problem, self._rng, start), share)
            start = self.incumbent.schedule

    def _merge_best(self) -> None:
        """Give up prefill stages of the best schedule, for a share of what is left."""
        best = self.incumbent
        assert best.schedule is not None, "a search begins with a schedule"
        end = best.elapsed + MERGE_SHARE * best.left
        if best.progress < 1.0:
            best.offer(merge_stages(self._problem, best.schedule, lambda: best.elapsed > end, wide=True))

    def _late(self) -> bool:
        """Return whether no seconds are left."""
        return self.incumbent.left <= 0

    def _merged(self, schedule: Schedule) -> Schedule:
        """Return a schedule without the prefill stages that can be given up."""
        return merge_stages(self._problem, schedule.without_idle_rounds(self._problem), self._late)

    def _put_one_by_one(self, walk: BeamSearch | InsertionAnnealing, share: float) -> None:
        """Search the orders in which few requests are put one by one, for a share of what is left."""

        def step(done: float) -> Schedule | None:
            schedule = walk.step(done)
            return None if schedule is None else self._merged(schedule)

        progress = self.incumbent.progress
        self._until(progress + share * (1.0 - progress), step)

    def _relax(self, shares: tuple[float, ...]) -> Schedule | None:
        """
        Search as if there were neither cap nor capacity, so long as what is found keeps the capacity.

        Returns the first schedule that does not, or None.
        """
        best, problem, start = self.incumbent, self._problem, None
        if best.progress >= 1.0 or shares[0] * best.left < STARTS_SECONDS:
            return None
        for share in shares:
            start = self._relaxed(share, start)
            capped = stages_capped(problem, start)
            best.offer(capped)
            if capped.check(problem) is not None:
                return start
            if best.progress >= 1.0:
                break
        return None

    def _relaxed(self, share: float, start: Schedule | None) -> Schedule:
        """Return what a share of what is left of the limits finds with neither cap nor capacity."""
        best = self.incumbent
        found = search_schedule(
            replace(self._problem, kv_capacity=None, prefill_token_cap=None),
            seconds=share * best.left if np.isfinite(best.seconds) else None,
            iterations=math.ceil(share * (best.most - best.steps)) if np.isfinite(best.most) else None,
            seed=int(self._rng.integers(2**31)),
            start=start,
            enough=best.enough,
        )
        best.steps += found.iterations
        return found.schedule

    def _serve_within_memory(self, relaxed: Schedule) -> bool:
        """Offer a schedule of a relaxed one's stage times that keeps the capacity; return if it is best."""
        best, problem = self.incumbent, self._problem
        used = np.unique(relaxed.bin_of[problem.rounds > 0])
        times = np.append(relaxed.starts[used], relaxed.rounds.sum()) - relaxed.starts[used[0]]
        for attempt in range(STRETCHES):
            later = stretched(times, STRETCHED * times[-1] * 2.0**attempt if attempt else 0.0)
            if best.progress >= 1.0:
                break
            found = served_within_memory(problem, later, self._rounding_seconds(), self._rng)
            if found is None:
                break
            found = stages_capped(problem, found)
            if found.makespan(problem) >= best.makespan:
                break
            if best.offer(found):
                return True
            if self._short is None:
                self._short = found
        return False

    def _reinsertion(self) -> Callable[[float], Schedule | None] | None:
        """Return what moves requests of the best schedule elsewhere, or None where it is no use."""
        schedule, problem = self.incumbent.schedule, self._problem
        assert schedule is not None, "a search begins with a schedule"
        if problem.cost.decode_base == 0 or not 0 < schedule.rounds.sum() <= MOST_ROUNDS:
            return None
        return Reinsertion(problem, self._rng, schedule).step

    def _chain(self) -> None:
        """Pack the slots full, and anneal over which requests follow one another there if they are few."""
        best = self.incumbent
        if best.progress >= 1.0 or PLACED_SECONDS * len(self._problem) ** 2 / self._problem.slots > best.left:
            return
        walk = ChainAnnealing(self._problem, self._rng, PACKING_SHARE * best.left)
        if requests_are_few(self._problem):
            self._until(best.progress + CHAIN_SHARE * (1.0 - best.progress), walk.step)
        else:
            best.offer(walk.schedule())

    def _anneal(self) -> None:
        """Anneal over the stage times where they are few enough; make schedules of the best."""
        costs, best = StageCosts.of(self._problem), self.incumbent
        # Stage times know no token cap: the search without the cap has split stages to keep it.
        capped = self._problem.prefill_token_cap is not None
        if capped or costs.round == 0 or not self._problem.rounds.any() or best.progress >= 1.0:
            return
        annealing = self._begun(costs)
        if annealing is None:
            return
        begun, next_rounding = best.progress, FIRST_ROUNDING
        while best.progress < 1.0 - self._reserve:
            best.steps += 1
            done = (best.progress - begun) / (1.0 - self._reserve - begun)
            annealing.step(done, lambda: best.elapsed > best.seconds)
            if self._clock >= next_rounding:
                next_rounding *= 2
                for times in annealing.walk.feasible()[:1]:
                    self._realise(times, annealing)
        for times in annealing.walk.feasible():
            self._realise(times, annealing)
        # A short walk may end where a part of a slot is lacking, and have met no better times with enough.
        self._realise(annealing.walk.times, annealing)

    def _begun(self, costs: StageCosts) -> StageAnnealing | None:
        """Return an annealing from stages that make a schedule, or from few; None if all have too many."""
        best, annealing = self.incumbent, None
        late = best.progress + START_SHARE * (1.0 - best.progress)
        brief = best.left <= BRIEF
        widest = BRIEF_SPANS if brief else MOST_SPANS
        most_stages = BRIEF_STAGES if brief else len(self._problem)
        if len(self._problem) > most_stages * self._problem.slots:
            return None
        for spans in START_SPANS[brief:]:
            annealing = StageAnnealing.of(
                self._problem, costs, self._rng, lambda: best.progress > late, (spans, widest)
            )
            if annealing is not None and len(annealing.walk.times) > most_stages + 1:
                return None
            if annealing is None:
                break
            if self._realise(annealing.walk.times, annealing) or best.progress > late:
                break
            if Spans.number_between(annealing.walk.times, annealing.profile) <= START_SPANS[-1]:
                break
        return annealing

    @property
    def _clock(self) -> float:
        """Seconds since the search began, or what stands for them where steps are what is limited."""
        best = self.incumbent
        return best.elapsed if np.isinf(best.most) else best.steps * STEP_SECONDS

    def _rounding_seconds(self) -> float:
        """Return the seconds for one attempt at whole slots; no limit if time does not limit the search."""
        if np.isinf(self.incumbent.seconds):
            return self.incumbent.seconds
        return min(max(ROUNDING_LEFT * self.incumbent.left, 0.05), LONGEST_ROUNDING)

    def _realise(self, times: IntArray, annealing: StageAnnealing) -> bool:
        """
        Offer a schedule with these stage times, and return whether there is one.

        Where whole slots are too few though fractions of them suffice, a few rounds more, spread evenly over
        the stages, make up for it. The next times are first stretched by a little less than was needed.
        """
        split, best = annealing.split, self.incumbent
        for attempt in range(max(0, self._attempt - 1), STRETCHES):
            most = max(1.0, STRETCHED * times[-1]) * 2.0 ** (attempt - 1) if attempt else 0.0
            later = stretched(times, most)
            if best.progress >= 1.0 or split.least_makespan(later) >= best.makespan:
                return False
            begun = best.elapsed
            schedule = self._served(later, annealing)
            if schedule is not None:
                self._attempt = attempt
                self._reserve = min(ROUNDING_SHARE, ROUNDINGS * (best.elapsed - begun) / best.seconds)
                best.offer(schedule)
                return True
        return False

    def _served(self, times: IntArray, annealing: StageAnnealing) -> Schedule | None:
        """Return a schedule of these stage times that takes whole slots, or None if none is found."""
        split, profile = annealing.split, annealing.profile
        allowed = self._rounding_seconds()
        flow = whole_slots(times, profile, self._problem.slots, allowed)
        if flow is None:
            return None
        times, spans = shift_times(times, *flow, profile)
        return split.schedule(spans.first[spans.of_requests(flow[1], split.rest.rounds)], np.diff(times))
