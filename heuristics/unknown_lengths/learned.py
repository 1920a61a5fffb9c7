"""Our policy for unknown lengths: by arrival, unless groups differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ..policy import State, Step
from ..queues.admission import Admission
from ..queues.ordered import Ordered, arrival_order
from ..queues.prefill_rules import SkiRental
from ..queues.queue_policy import QueuedPolicy, QueuePolicy
from .groups import LEAST_SHARE, SURE, group_numbers, has_groups, place_in_group
from .lengths import NOTHING, Known, LengthModel, Observed

SCOUTS = 2
"""Requests of each group that start first in the last waves."""

WAVES_AT_FIRST = 3.0
"""Waves that are ordered before any request has ended."""

WAVES_AT_ONE = 100.0
"""Ordered waves at an intraclass correlation of one, with its square."""

LEARN_EVERY = 16
"""Updates of the model: one per 1/16 more finished requests."""

LEARN_EVERY_SINGLE = 4
"""The same for a job without groups, where an end only tells how far to trust the predictions."""

ALIKE = 0.3
"""Intraclass correlation for replacing running requests."""

LEAST_CUT = 0.02
"""Probability of a cut at the cap from which running requests may be replaced.

With a cap, a request that has run long is near its end. Without one, the longer a request has run the more it
has left, and the oldest should continue (Weber 1982); jobs with moves took longer then.
"""

AT_MOST = 0.95
"""Quantile of the remaining length that compares requests."""

WAVES_MOVED = 1.5
"""Most waiting waves when running requests may be replaced."""

REST = 0.15
"""Least time between moves of a request, in mean lengths."""

MARGIN = 0.3
"""Least gain in remaining length for a replacement, in mean lengths."""


class Learner:
    """Knowledge of a job's lengths while it runs.

    problem: Its groups are read, its lengths are not.
    known: Earlier knowledge.
    """

    def __init__(self, problem: Problem, known: Known = NOTHING) -> None:
        self.group, self.groups = group_numbers(problem)
        self.known, self._slots = known, problem.slots
        self._every = LEARN_EVERY if self.groups < len(self.group) else LEARN_EVERY_SINGLE
        self.started = np.zeros(len(problem), dtype=np.bool_)
        self.ended = np.zeros(len(problem), dtype=np.bool_)
        self.stopped = np.zeros(len(problem), dtype=np.bool_)
        """Stopped requests: the length of one that does not wait again is unknown."""
        self._ends = self._learnt_at = -1
        self._model: LengthModel | None = None

    def observe(self, state: State) -> None:
        """Record the requests that have ended since the last call."""
        self.ended = self.started & ~state.waiting & ~self.stopped
        self.ended[state.running] = False
        self._ends = int(np.count_nonzero(self.ended))

    def model(self, state: State, *, now: bool = False) -> LengthModel | None:
        """Return the model of lengths, or None before any end.

        now: Include tokens decoded since the last end.
        """
        past = self.known.past is not None and bool(self.known.past.ended.any())
        if not self._ends and not past:
            return None
        due = self._learnt_at + max(1, self._learnt_at // self._every)
        if self._model is None or self._ends >= due or now:
            begun = np.flatnonzero(self.started)
            observed = Observed(self.group[begun], state.decoded[begun], self.ended[begun])
            self._model = LengthModel.learnt(observed, self.groups, self.known, self._wanted())
            self._learnt_at = self._ends
        return self._model

    def _wanted(self) -> npt.NDArray[np.bool_] | None:
        """Return which groups are unfinished if each has one request; else None."""
        if self.groups < len(self.group):
            return None
        wanted = np.zeros(self.groups, dtype=np.bool_)
        wanted[self.group[~self.ended]] = True
        return wanted

    def ordered_requests(self, state: State) -> float:
        """Return how many of the last waiting requests to order.

        An order matters at the end of the job, when slots run dry, so only the last waves are ordered. Their
        number grows with the share of variance that groups explain (:data:`WAVES_AT_ONE`), and is zero if
        that share may be negligible. On a single step, an order by group effects can move the longest
        requests to the end, as arrival can.
        """
        model = self.model(state)
        if self.known.score is not None and (model is None or model.predicted_share >= LEAST_SHARE):
            return float(len(self.group))
        if model is None:
            return WAVES_AT_FIRST * self._slots
        if model.probability_of_share(LEAST_SHARE) < SURE:
            return 0.0
        return WAVES_AT_ONE * model.share**2 * self._slots


class LearnedOrder:
    """Queue by arrival, with its last requests by remaining length.

    problem: Its arrivals are read, its lengths are not.
    learner: Knowledge of lengths.
    """

    def __init__(self, problem: Problem, learner: Learner) -> None:
        self._learner = learner
        self._arrival_rank = np.argsort(arrival_order(problem))
        score = learner.known.score
        predicted = np.zeros(learner.groups, dtype=np.bool_) if score is None else ~np.isnan(score)
        self._scouted: npt.NDArray[np.bool_] = ~predicted[learner.group]
        self.since = np.zeros(len(problem), dtype=np.int64)
        """Decode steps each request had when it last joined."""
        self._left_by: LengthModel | None = None
        self._left = np.zeros(len(problem))
        self._left_at = np.zeros(len(problem), dtype=np.int64)

    def propose(self, state: State, free: IntArray) -> tuple[list[int], list[int]]:
        """Return the next waiting requests, one per free slot."""
        learner = self._learner
        learner.observe(state)
        waiting = np.flatnonzero(state.waiting)
        begun = learner.started[waiting]
        waiting = waiting[np.lexsort((self._arrival_rank[waiting], ~begun))]
        before = max(0, math.ceil(len(waiting) - learner.ordered_requests(state)))
        if before < len(free):
            last = waiting[before:]
            waiting = np.concatenate((waiting[:before], last[self._by_length(state, last)]))
        requests: list[int] = waiting[: len(free)].tolist()
        return requests, free[: len(requests)].tolist()

    def take(self, requests: Sequence[int]) -> None:
        """Record that these requests are prefilled."""
        self._learner.started[requests] = True
        self._learner.stopped[requests] = False

    def put_back(self, requests: Sequence[int]) -> None:
        """Record that some requests wait again, or are stopped."""
        self._learner.stopped[requests] = True

    def left(self, state: State, requests: IntArray) -> FloatArray:
        """Return the expected decode steps left, shape (requests,)."""
        model, learner = self._learner.model(state), self._learner
        if model is None:
            score = learner.known.score
            return np.zeros(len(requests)) if score is None else np.nan_to_num(score)[learner.group[requests]]
        tokens = state.decoded[requests]
        if model is not self._left_by or (tokens != self._left_at[requests]).any():
            # Few proposals change the model or what a waiting request has decoded.
            self._left_by, self._left_at = model, np.full(len(self._left), -1)
            self._left_at[requests] = tokens
            self._left[requests] = _told_apart(model.remaining(learner.group[requests], tokens))
        return self._left[requests]

    def left_at_most(self, state: State, model: LengthModel, requests: IntArray) -> FloatArray:
        """Return each request's quantile of decode steps left."""
        group, tokens = self._learner.group[requests], state.decoded[requests]
        # The expected length breaks ties, such as requests that may all reach the cap.
        steps_left = model.remaining_at_most(group, tokens, AT_MOST) + model.remaining(group, tokens) / 1000
        return _told_apart(steps_left)

    def _by_length(self, state: State, waiting: IntArray) -> IntArray:
        """Order waiting requests: scouts first, then the longest expected."""
        learner = self._learner
        if not self._scouted.any():
            return np.argsort(-self.left(state, waiting), kind="stable")
        group = learner.group[waiting]
        started = np.bincount(learner.group[learner.started], minlength=learner.groups)
        scout = (place_in_group(group) + started[group] < SCOUTS) & self._scouted[waiting]
        scout &= ~learner.started[waiting]
        return np.lexsort((np.where(scout, 0.0, -self.left(state, waiting)), ~scout))


def _told_apart(steps: FloatArray) -> FloatArray:
    """Round decode steps, for the same order on every machine."""
    return np.round(steps, 6)


class SurvivalPolicy:
    """Policy by arrival, and an order once observed lengths justify it.

    It sees the groups, the started requests, their decoded tokens and which have ended, but no length. Until
    the last waves, requests are served by arrival. These are ordered by a model of lengths
    (:class:`~.lengths.LengthModel`), with :data:`SCOUTS` of each group first. In the last wave, if KV cache
    can move to the host, waiting requests replace running ones. Such a request must be expected to have more
    left by :data:`MARGIN` of the mean length plus the cost of the move. None moves within :data:`REST` of the
    mean length since it joined.

    problem: Its groups, arrivals and prompts are read, its lengths are not.
    known: Earlier knowledge of lengths.
    swap: Seconds a token of KV cache takes to the host or back; None if none is moved.
    """

    def __init__(self, problem: Problem, known: Known = NOTHING, swap: float | None = None) -> None:
        self._learner = Learner(problem, known)
        self.queue = LearnedOrder(problem, self._learner)
        self._admission = Admission(problem, "present")
        self._dispatch = QueuePolicy(self.queue, SkiRental(), self._admission)
        self._swap, self._problem = swap, problem
        self._looked = 0

    def __call__(self, state: State) -> Step:
        """Return the next step."""
        step = self._preempting(state) if self._may_preempt(state) else None
        if step is None:
            step = self._dispatch(state)
        if len(step.prefill):
            chosen = np.asarray(step.prefill)
            self.queue.since[chosen] = state.decoded[chosen]
        elif (
            self._swap is not None and step.decode_steps and self._learner.ended.any() and state.waiting.any()
        ):
            step = Step(decode_steps=min(step.decode_steps, max(1, round(REST * self._mean(state) / 4))))
        return step

    def _mean(self, state: State) -> float:
        """Return the expected length of requests not yet started."""
        model = self._learner.model(state)
        return 0.0 if model is None else float((model.mass @ model.lengths).mean())

    def _may_preempt(self, state: State) -> bool:
        if self._swap is None or self._problem.cost.decode_base == 0 or state.free_slots.size:
            return False
        waiting = int(np.count_nonzero(state.waiting))
        if not 0 < waiting <= WAVES_MOVED * self._problem.slots:
            return False
        self._learner.observe(state)
        if waiting > self._learner.ordered_requests(state):
            return False
        model = self._learner.model(state)
        if model is None or model.probability_of_share(ALIKE) < SURE or model.capped < LEAST_CUT:
            return False
        return state.steps_done - self._looked >= REST * self._mean(state) / 4

    def _preempting(self, state: State) -> Step | None:
        self._looked = state.steps_done
        model = self._learner.model(state, now=True)
        if model is None:
            return None
        queue, mean = self.queue, self._mean(state)
        running, waiting = state.running, np.flatnonzero(state.waiting)
        running = running[state.decoded[running] - queue.since[running] >= REST * mean]
        running_left = queue.left_at_most(state, model, running)
        waiting_left = queue.left_at_most(state, model, waiting)
        running = running[(shortest_first := np.argsort(running_left, kind="stable"))]
        waiting = waiting[(longest_first := np.argsort(-waiting_left, kind="stable"))]
        pairs = min(len(running), len(waiting))
        out, into = running[:pairs], waiting[:pairs]
        gain = waiting_left[longest_first][:pairs] - running_left[shortest_first][:pairs]
        worth = gain > np.maximum(MARGIN * mean, self._moved_steps(state, out, into))
        count = pairs if worth.all() else int(np.argmin(worth))
        if not count or not self._fits(state, out[:count], into[:count]):
            return None
        slots = [int(np.flatnonzero(state.slot_request == request)[0]) for request in out[:count]]
        entering = into[:count].tolist()
        queue.take(entering)
        self._admission.enter(entering)
        leaving = out[:count].tolist()
        queue.put_back(leaving)
        return Step(prefill=entering, slots=slots, decode_steps=0, evict=leaving)

    def _moved_steps(self, state: State, out: IntArray, into: IntArray) -> FloatArray:
        """Return the slot-steps lost to moving each pair."""
        assert self._swap is not None
        kv_tokens = self._problem.prompt_tokens + state.decoded
        tokens = 2 * kv_tokens[out] + np.where(self._learner.started[into], kv_tokens[into], 0)
        steps = self._swap * tokens / self._problem.cost.decode_base * self._problem.slots
        return np.asarray(steps, dtype=np.float64)

    def _fits(self, state: State, out: IntArray, into: IntArray) -> bool:
        """Return whether memory and the token cap allow the change."""
        kv_tokens = self._problem.kv_at_start + state.decoded
        if self._admission.capacity is not None:
            after = state.kv_held - int(kv_tokens[out].sum()) + int(kv_tokens[into].sum())
            if after > self._admission.room_at_entry:
                return False
        cap = self._problem.prefill_token_cap
        return cap is None or int(kv_tokens[into].sum()) <= cap


def learned_lengths(problem: Problem, known: Known = NOTHING, swap: float | None = None) -> QueuedPolicy:
    """Return :class:`SurvivalPolicy`, or order of arrival without groups.

    Moves need a group of two requests. For single requests only their own run tells more than the prediction,
    and such jobs took longer with moves (``docs/rollouts.md``).
    """
    several = has_groups(problem)
    if known.score is None and not several:
        return QueuePolicy(Ordered(arrival_order(problem)), SkiRental(), Admission(problem, "present"))
    return SurvivalPolicy(problem, known, swap if several else None)
