"""Progress of a run in its plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...data.bound import gap_above
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...data.trace import Stage
from ...heuristics.simulate import remaining_schedule
from .length_estimator import LengthEstimator

EACH = 1e-4
"""Seconds between forecasts, for each request; larger reacts later."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Progress of a run.

    done, planned: Planned seconds done, including an earlier interrupted run, and of the whole plan.
    slowdown: Measured seconds per planned second in this run.
    left: Remaining seconds at that pace; infinite while nothing is known of the lengths.
    gap: Expected gap in model seconds if the rest follows the plan; None off the plan or without a bound.
    longer: Running completions beyond their planned lengths.
    finished, requests: Finished requests, including an earlier run's, and all requests.
    speed: Decoded tokens per second of this run.
    """

    done: float
    planned: float
    slowdown: float
    left: float
    gap: float | None
    longer: int = 0
    finished: int = 0
    requests: int = 0
    speed: float = 0.0


@dataclass(frozen=True, slots=True)
class Follower:
    """Callbacks of a run.

    on_stage: Function to call after each stage with it and the number of finished requests.
    on_begin: Function to call with the next requests to prefill.
    on_part: Function to call with the part of a long stage that has run, and the finished requests.
    """

    on_stage: Callable[[Stage, int], None]
    on_begin: Callable[[npt.NDArray[np.int64]], None]
    on_part: Callable[[Stage, int], None] = lambda stage, finished: None

    def __call__(self, stage: Stage, finished: int) -> None:
        """Report a stage."""
        self.on_stage(stage, finished)


class PlanClock:
    """Clock of planned seconds, driven by a run's stages.

    Between two planned ends of requests it follows the cost model. When a run finishes requests early, it
    moves to the point where the plan would have finished as many. If lengths differ from the plan, the
    lengths seen so far predict the rest.

    left: Requests that this run serves, ascending; an earlier run completed the others.
    bound: Proven bound of the whole plan in model seconds, or None.
    ended: Function that returns the newly ended requests with their tokens or UNKNOWN. It may name a request
        one stage late.
    unknown: True if the planned lengths are caps, which say nothing of the lengths.
    """

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        left: npt.ArrayLike,
        bound: float | None = None,
        ended: Callable[[], Iterable[tuple[int, int]]] = tuple,
        *,
        unknown: bool = False,
    ) -> None:
        rows = np.asarray(left, dtype=np.int64)
        count = len(problem)
        self._cost, self._bound = problem.cost, bound if len(rows) == len(problem) else None
        self._planned = schedule.makespan(problem)
        if len(rows) < len(problem):
            problem, schedule = remaining_schedule(problem, schedule, rows)
        self._rest = schedule.makespan(problem)
        self._before = max(0.0, self._planned - self._rest)
        self._ends = np.append(np.sort(schedule.finishes(problem)), self._rest)
        self._at = self._modelled = self._charged = 0.0
        self._lengths, self._unknown = LengthEstimator(problem, schedule, unknown=unknown), unknown
        self._position = {int(request): k for k, request in enumerate(rows)}
        self._ended, self._due, self._foretold = ended, 0.0, -1.0
        self._requests, self._tokens = count, 0

    @property
    def begin(self) -> Standing:
        """Progress before the first stage."""
        seconds_left = math.inf if self._unknown else self._rest
        before = self._requests - len(self._position)
        return Standing(self._before, self._planned, 1.0, seconds_left, None, 0, before, self._requests)

    def begun(self, requests: npt.ArrayLike) -> None:
        """Note the next requests to prefill."""
        self._lengths.begun([self._position[int(request)] for request in np.asarray(requests)])

    def after(self, stage: Stage, finished: int) -> Standing:
        """Return the progress of the run after a stage."""
        self._tokens += stage.tokens if stage.kind == "decode" else 0
        before = self._requests - len(self._position)
        speed = self._tokens / stage.end if stage.end else 0.0
        standing = self._after(stage, finished)
        return replace(standing, finished=before + finished, requests=self._requests, speed=speed)

    def during(self, part: Stage, finished: int) -> Standing:
        """Return the progress in the middle of a stage, of which a part has run."""
        clock = copy(self)
        clock._lengths, clock._ended = copy(self._lengths), tuple
        standing = clock.after(part, finished)
        if clock._lengths.as_planned or self._foretold < 0:
            return standing
        pace = part.end / clock._modelled if clock._modelled else 1.0
        if part.end >= self._due:
            self._foretold = part.end + pace * clock._lengths.seconds_left()
            self._due = 1.01 * part.end + EACH * len(self._position)
        clock._foretold = self._foretold
        present = clock._off_plan(part, pace)
        return replace(standing, done=present.done, left=present.left, longer=present.longer)

    def passing(self, tokens: int, part: Stage) -> list[int]:
        """Return the running requests that have so many tokens after a part of a stage."""
        requests = list(self._position)
        return [requests[position] for position in self._lengths.passing(tokens - part.decode_steps)]

    def _after(self, stage: Stage, finished: int) -> Standing:
        self._modelled += stage.model_seconds(self._cost, overheads=False)
        self._charged += stage.model_seconds(self._cost)
        reached = float(self._ends[finished - 1]) if finished else 0.0
        coming = float(self._ends[min(finished, len(self._ends) - 1)])
        self._at = max(self._at, min(max(self._modelled, reached), coming))
        pace = stage.end / self._modelled if self._modelled else 1.0
        self._learn(stage, pace)
        if finished == len(self._position):
            self._at = max(self._at, self._rest)
        elif not self._lengths.as_planned and self._foretold >= 0:
            return self._off_plan(stage, pace)
        slowdown = stage.end / self._at if self._at else 1.0
        gap = None
        if self._bound and abs(self._modelled - self._at) <= 1e-6 * self._rest:
            gap = gap_above(self._charged + self._rest - self._at, self._bound)
        seconds_left = math.inf if self._unknown else max(0.0, slowdown * (self._rest - self._at))
        return Standing(self._before + self._at, self._before + self._rest, slowdown, seconds_left, gap)

    def _off_plan(self, stage: Stage, slowdown: float) -> Standing:
        seconds_left, longer = max(0.0, self._foretold - stage.end), self._lengths.longer
        done = self._at
        if (longer or self._unknown) and stage.end:
            share = self._rest * stage.end / (stage.end + seconds_left)
            # Caps say nothing of where a run stands.
            done = share if self._unknown else min(done, share)
        return Standing(self._before + done, self._before + self._rest, slowdown, seconds_left, None, longer)

    def _learn(self, stage: Stage, slowdown: float) -> None:
        """Note ended requests; update the forecast if it is due."""
        for request, tokens in self._ended():
            self._lengths.ended(self._position[request], tokens)
        if not self._lengths.as_planned and stage.start >= self._due:
            # Forecasts of many requests take time, so not each stage has one.
            self._foretold = stage.start + slowdown * self._lengths.seconds_left()
            self._due = 1.01 * stage.start + EACH * len(self._position)
        self._lengths.ran(stage)
