"""Robust plans from predicted lengths, chosen over sampled lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..data.arrays import FloatArray, IntArray
from ..data.expectation import Expectation, Follow
from ..data.fleet import Fleet, FleetSchedule
from ..data.lengths.prediction_error import LogNormalError, PredictionError
from ..data.plan import Plan, Provenance
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..heuristics.follow import following, queue_order
from ..heuristics.simulate import simulate
from ..models.bounds.prove import proven_bound
from ..solvers.result import Limits, Status
from ..solvers.search.constructive import ski_rental_schedule
from ..solvers.solve import DEFAULT_SOLVER
from .plan import make_plan

PATIENCE = (0.5, 1.0)
"""Patiences of the ski-rental rule, compared for each queue."""

HELD_BACK = (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Shares of the slots for the longest requests that are held back."""

SAMPLES = 99
"""Sampled sets of lengths for the interval, from the fifth to the fifth last makespan."""

SAMPLES_SIMULATED = 39
"""The same if each sample needs a simulation."""

HELD_BACK_SIMULATED = (0.0, 0.5, 0.75)
"""Held-back shares if each sample needs a simulation."""

LOOKS = (10, 32)
"""Samples after which candidates are dropped, and after which one is chosen."""

LOOKS_SIMULATED = (5, 15)
"""The same if each needs a simulation."""

WORTH_LEAVING = 3e-3
"""Relative gain for which a predicted order replaces the given one."""

MANY = 20_000
"""Requests from which fewer samples are taken."""


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """One way to serve requests: a queue, or a schedule to follow."""

    follow: Follow
    patience: float
    problem: Problem
    held_back: int = 0
    schedule: Schedule | None = None

    @property
    def name(self) -> str:
        held = f" but {self.held_back} held back" if self.held_back else ""
        return f"{self.follow}{held}, patience {self.patience:g}, {self.problem.slots} slots"

    @property
    def plain(self) -> bool:
        return self.follow == "as-given"

    @property
    def order(self) -> IntArray:
        return queue_order(self.problem, self.follow, self.held_back)

    def nominal_schedule(self) -> Schedule:
        if self.schedule is not None:
            return self.schedule
        return ski_rental_schedule(self.problem, order=self.order, patience=self.patience)

    def makespans(self, truths: Sequence[Problem]) -> FloatArray:
        """Return the makespan for each sample of lengths, shape (samples,)."""
        problem, order = self.problem, self.order
        if self.schedule is None and not _simulated(problem):
            # Lengths only decide when a slot is freed: one pass replaces the simulation.
            sized = [
                true if true.slots == problem.slots else replace(true, slots=problem.slots) for true in truths
            ]
            return np.array(
                [
                    ski_rental_schedule(true, order=order, patience=self.patience).makespan(true)
                    for true in sized
                ]
            )
        nominal, way = self.nominal_schedule(), self.expectation(np.zeros(1), {}, {})
        lengths = np.stack([true.workload.output_tokens for true in truths])
        return np.array(
            [simulate(problem, following(way, nominal, problem), each).makespan for each in lengths]
        )

    def expectation(
        self, seconds: FloatArray, error: Mapping[str, object], compared: Mapping[str, float]
    ) -> Expectation:
        return Expectation.of(
            seconds.tolist(),
            self.follow,
            self.patience,
            held_back=self.held_back,
            error=error,
            compared=compared,
        )


def make_robust_plan(
    problem: Problem,
    error: PredictionError,
    *,
    longest: IntArray | None = None,
    slots: Sequence[int] = (),
    solver: str = DEFAULT_SOLVER,
    limits: Limits | None = None,
    provenance: Provenance | None = None,
) -> Plan:
    """Plan from predicted lengths with a stated error.

    The planned lengths are the means of the true ones given the predictions. Over sampled lengths a searched
    schedule, repaired as completions end, is compared with queues. The queues are longest first or in the
    given order, with several patiences of the ski-rental rule. The plan follows the least mean makespan, and
    states its interval.

    longest: Most tokens of each completion (its ``max_tokens``), shape (requests,); None for no limit.
    """
    problem = problem.without_arrivals()
    limits = Limits(seconds=1.5) if limits is None else limits
    predicted = problem.workload.output_tokens
    longest = _longest(problem, longest)
    if isinstance(error, LogNormalError):
        error = error.for_predictions(predicted, longest)
    planned = replace(
        problem, workload=problem.workload.with_output_tokens(error.expected(predicted, longest))
    )
    plan = make_plan(planned, solver=solver, limits=limits, provenance=provenance, evicting=False)
    candidates = [_Candidate("schedule", 0.5, planned, schedule=plan.schedule)]
    for number in dict.fromkeys((problem.slots, *slots)):
        candidates += _queues(planned if number == problem.slots else replace(planned, slots=number))
    samples = SAMPLES_SIMULATED if _simulated(problem) or len(problem) >= MANY else SAMPLES
    drawn = error.sample(predicted, np.random.default_rng(limits.seed), samples, longest)
    truths = [replace(problem, workload=problem.workload.with_output_tokens(row)) for row in drawn]
    chosen, reached, compared = _choose(candidates, truths)
    expected = chosen.expectation(reached, error.to_json(), compared)
    if chosen.schedule is not None:
        return replace(plan, expected=expected)
    return _as_queue(plan, chosen, expected)


def _queues(problem: Problem) -> list[_Candidate]:
    shares, patiences = (HELD_BACK_SIMULATED, PATIENCE[:1]) if _simulated(problem) else (HELD_BACK, PATIENCE)
    held = dict.fromkeys(min(round(share * problem.slots), len(problem) - 1) for share in shares)
    queues = [_Candidate("longest-first", patience, problem, many) for many in held for patience in patiences]
    return queues + [_Candidate("as-given", patience, problem) for patience in patiences]


def _simulated(problem: Problem) -> bool:
    return problem.kv_capacity is not None or problem.prefill_token_cap is not None


def _longest(problem: Problem, longest: IntArray | None) -> IntArray | None:
    limits = [problem.max_position, problem.kv_capacity]
    rooms = [limit - problem.prompt_tokens for limit in limits if limit is not None]
    if longest is not None:
        rooms.append(longest)
    return np.minimum.reduce(rooms) if rooms else None


def _choose(
    candidates: Sequence[_Candidate], truths: Sequence[Problem]
) -> tuple[_Candidate, FloatArray, dict[str, float]]:
    """Choose the candidate of the least mean makespan.

    Makespans differ more between samples than between candidates. So the mean of a candidate dropped early is
    estimated from its ratio to the chosen one over the samples of both.
    """
    first, second = LOOKS_SIMULATED if _simulated(truths[0]) else LOOKS
    found = {candidate.name: candidate.makespans(truths[:first]) for candidate in candidates}

    def charged(candidate: _Candidate) -> FloatArray:
        seconds: FloatArray = found[candidate.name] * (1.0 if candidate.plain else 1 + WORTH_LEAVING)
        return seconds

    best = min(map(charged, candidates), key=lambda seconds: float(seconds.mean()))
    left = []
    for candidate in candidates:
        worse = charged(candidate) - best
        if worse.mean() <= 2 * worse.std() / np.sqrt(len(worse)) + 1e-9:
            left.append(candidate)
    more = truths[first:second]
    for candidate in left if len(left) > 1 else ():
        found[candidate.name] = np.concatenate((found[candidate.name], candidate.makespans(more)))
    chosen = min(left, key=lambda candidate: float(charged(candidate).mean()))
    rest = truths[len(found[chosen.name]) :]
    seconds = np.concatenate((found[chosen.name], chosen.makespans(rest)))
    ratios = {name: float(each.mean() / seconds[: len(each)].mean()) for name, each in found.items()}
    return chosen, seconds, {name: ratio * float(seconds.mean()) for name, ratio in ratios.items()}


def _as_queue(plan: Plan, chosen: _Candidate, expected: Expectation) -> Plan:
    schedule = chosen.nominal_schedule()
    other = chosen.problem.slots != plan.problem.slots
    return replace(
        plan,
        fleet=Fleet.of(chosen.problem, 1),
        shares=FleetSchedule.of(schedule),
        makespan=schedule.makespan(chosen.problem),
        bound=proven_bound(chosen.problem) if other else plan.bound,
        maker=replace(plan.maker, solver=f"{chosen.follow} queue", status=str(Status.FEASIBLE)),
        expected=expected,
    )
