"""Several steps of rollouts in a row: with a barrier between them, or with partial rollouts that go on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.costs.cost import FloatArray, IntArray
from ...data.lengths.steps_plan import Way
from ...data.problem import Problem
from ..engine import Engine
from ..loop import Execution
from ..policy import State, Step
from ..queues.queue_policy import QueuedPolicy
from ..simulator import Progress, Simulator
from .queues import group_numbers


@dataclass(frozen=True, slots=True, eq=False)
class StepsRun:
    """
    What several steps came to.

    Parameters
    ----------
    seconds
        Of each step, by the cost model, shape (steps run,).
    begun, ended
        The step in which each request began and ended, -1 for one that was stopped for good, shape
        (requests,).
    tokens
        Tokens of each request that was kept, 0 for one that was stopped, shape (requests,).
    lost
        Decode steps of requests that were stopped or started again, over all slots.
    """

    seconds: FloatArray
    begun: IntArray
    ended: IntArray
    tokens: IntArray
    lost: int

    @property
    def makespan(self) -> float:
        """Seconds of all steps."""
        return float(self.seconds.sum())

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Whether each request was completed."""
        return self.ended >= 0

    @property
    def stale_share(self) -> float:
        """Share of the kept completions that began under the weights of an earlier step."""
        kept = self.kept
        return float((self.ended[kept] > self.begun[kept]).mean())

    @property
    def staleness(self) -> float:
        """Steps between the beginning and the end of a kept completion, on average."""
        kept = self.kept
        return float((self.ended[kept] - self.begun[kept]).mean())

    def kept_bias(self, truth: IntArray) -> float:
        """Return by what share kept completions are longer than all, on average; negative if shorter."""
        return float(truth[self.kept].mean() / truth.mean() - 1)

    def early_bias(self, truth: IntArray) -> float:
        """Return by what share those kept before the last step are longer than all, on average."""
        early = self.kept & (self.ended < len(self.seconds) - 1)
        return float(truth[early].mean() / truth.mean() - 1) if early.any() else 0.0


def simulate_steps(
    problem: Problem, step: IntArray, way: Way, policy: QueuedPolicy, output_tokens: IntArray | None = None
) -> StepsRun:
    """Return what steps of rollouts come to in the simulator, as :func:`serve_steps` does on an engine."""
    return _Steps(problem, step, way, policy, output_tokens).run()


def serve_steps(problem: Problem, step: IntArray, way: Way, policy: QueuedPolicy, engine: Engine) -> StepsRun:
    """
    Return what steps of rollouts come to on an engine.

    Nothing is counted for the training between steps, which takes as long in every way.

    Parameters
    ----------
    problem
        The requests of all steps, with the lengths the policy may count on.
    step
        The step of each request, not descending, every group within one step, shape (requests,).
    way
        When a step ends.
    policy
        A fresh policy of a queue.
    engine
        Carries the steps out; fresh.

    Raises
    ------
    ValueError
        If a group has requests in several steps, steps descend, fewer completions than are kept, or something
        is to start or be computed again: an engine keeps what it has decoded, and its KV cache.
    """
    if way.restart or (way.ahead and not way.keep_kv):
        raise ValueError("an engine keeps what it has decoded with its KV cache: say keep_kv, not restart")
    return _Steps(problem, step, way, policy, None, engine).run()


def reached_tokens(
    problem: Problem,
    step: IntArray,
    way: Way,
    policy: QueuedPolicy,
    lengths: IntArray,
    ended: npt.NDArray[np.bool_],
) -> IntArray:
    """
    Return the tokens each request has when the last of those that have ended does, 0 of one not begun.

    Parameters
    ----------
    problem, step, way, policy
        As of :func:`simulate_steps`.
    lengths
        Of what has ended its tokens, of the others more than it can have, shape (requests,).
    ended
        Which requests have ended, shape (requests,). Nothing is known of the others if the way stops one of
        them before.
    """
    steps = _Steps(problem, step, way, policy, lengths)
    steps.watched = ended
    steps.run()
    if steps.reached is None:
        return np.zeros(len(problem), dtype=np.int64)
    return np.where(steps.reached > 0, steps.reached + int(problem.prefill_emits_first_token), 0)


class _Evicting:
    """A policy that first stops what it is told to."""

    def __init__(self, policy: QueuedPolicy) -> None:
        self._policy = policy
        self.stop: list[int] = []

    def put_back(self, requests: Sequence[int]) -> None:
        """Tell the queue of requests that are stopped."""
        self._policy.queue.put_back(requests)

    def __call__(self, state: State) -> Step:
        if self.stop:
            stopped, self.stop = self.stop, []
            self.put_back(stopped)
            return Step(rounds=0, evict=stopped)
        return self._policy(state)


class _Steps:
    """Steps as they run."""

    def __init__(
        self,
        problem: Problem,
        step: IntArray,
        way: Way,
        policy: QueuedPolicy,
        truth: IntArray | None,
        engine: Engine | None = None,
    ) -> None:
        self._group, groups = group_numbers(problem)
        step = np.asarray(step, dtype=np.int64)
        _check(step, self._group, groups, way)
        self._way, self._problem = way, problem
        # Groups in the order in which they come.
        self._order = self._group[np.sort(np.unique(self._group, return_index=True)[1])]
        first = np.unique(self._group, return_index=True)[1]
        of_group = step[first][self._order]
        self._sizes = np.unique(of_group, return_counts=True)[1]
        self._members = [np.flatnonzero(self._group == group) for group in range(groups)]
        size = np.bincount(self._group, minlength=groups)
        self._wanted = size if way.keep is None else np.minimum(size, way.keep)
        self._waiting = np.zeros(len(problem), dtype=np.bool_)
        self._decoded = np.zeros(len(problem), dtype=np.int64)
        self._progress = Progress.none(problem, truth)
        self._whole = self._progress.left.copy()
        self._policy = _Evicting(policy)
        self._execution = Execution(
            problem,
            self._policy,
            Simulator(problem, progress=self._progress) if engine is None else engine,
            queue=(self._waiting, self._decoded),
        )
        self._ends = np.zeros(groups, dtype=np.int64)
        self._begun, self._ended = (np.full(len(problem), -1, dtype=np.int64) for _ in range(2))
        self._now, self._lost, self._seconds = 0, 0, list[float]()
        self.watched: npt.NDArray[np.bool_] | None = None
        self.reached: IntArray | None = None
        """Decode steps of each request when all that are watched had ended."""

    def run(self) -> StepsRun:
        """Return what they come to."""
        for _ in self._rounds() if self._way.restart else self._stream():
            self._seconds.append(self._time() - sum(self._seconds))
            self._now += 1
        emitted = int(self._problem.prefill_emits_first_token)
        tokens = np.where(self._ended >= 0, self._decoded + emitted, 0)
        return StepsRun(np.array(self._seconds), self._begun, self._ended, tokens, self._lost)

    def _time(self) -> float:
        """Return the seconds so far by the cost model, whatever the engine's clock is."""
        cost = self._problem.cost
        return sum(stage.model_seconds(cost, overheads=False) for stage in self._execution.stages)

    def _stream(self) -> Iterator[None]:
        """Serve steps of which what is not complete goes on in the next."""
        released = 0
        for last, size in zip(np.cumsum(self._sizes).tolist(), self._sizes.tolist(), strict=True):
            until = min(len(self._order), last + math.ceil(self._way.ahead * size))
            self._release(self._order[released:until])
            released = max(released, until)
            self._serve(last)
            if not self._way.keep_kv and self._running().size:
                self._stop(self._running())
            yield

    def _rounds(self) -> Iterator[None]:
        """Serve short rounds, and long ones of the groups that were not complete in them."""
        size, begun = int(self._sizes[0]), 0
        late: list[int] = []
        while begun < len(self._order) or late:
            if len(late) >= size or begun == len(self._order):
                mine, late = late[:size], late[size:]
                self._release(mine)
                self._serve(self._complete() + len(mine))
            else:
                new = self._order[begun : begun + size + math.ceil(self._way.ahead * size)].tolist()
                begun += len(new)
                self._release(new)
                self._serve(self._complete() + min(size, len(new)))
                left = [group for group in new if self._ends[group] < self._wanted[group]]
                self._forget(left)
                late += left
            yield

    def _release(self, groups: Sequence[int] | IntArray) -> None:
        for group in groups:
            self._waiting[self._members[int(group)]] = True

    def _complete(self) -> int:
        return int(np.count_nonzero(self._ends >= self._wanted))

    def _running(self) -> IntArray:
        return self._execution.state.running

    def _serve(self, complete: int) -> None:
        """Serve until a number of groups are complete."""
        while self._complete() < complete:
            ended = list(self._execution.step())
            running = self._running()
            fresh = running[self._begun[running] < 0]
            self._begun[fresh] = self._now
            for request in ended:
                self._begun[request] = self._now if self._begun[request] < 0 else self._begun[request]
                group = self._group[request]
                if self._ends[group] >= self._wanted[group]:
                    # Ended in the same decode step as the last that was kept.
                    self._lost += int(self._decoded[request])
                    continue
                self._ended[request] = self._now
                self._ends[group] += 1
                if self._ends[group] == self._wanted[group] and self._way.keep is not None:
                    self._drop(self._members[group])
            if self.watched is not None and self.reached is None and (self._ended[self.watched] >= 0).all():
                self.reached = self._decoded.copy()

    def _drop(self, requests: IntArray) -> None:
        """Stop those of a group that are not kept, for good."""
        over = requests[self._ended[requests] < 0]
        running = over[np.isin(over, self._running())]
        if running.size:
            self._stop(running)
        self._waiting[over] = False
        self._lost += int(self._decoded[over].sum())

    def _stop(self, running: IntArray) -> None:
        self._policy.stop = running.tolist()
        for _ in self._execution.step():
            raise AssertionError("nothing ends as requests are stopped")

    def _forget(self, groups: Sequence[int]) -> None:
        """Stop groups, which start again from nothing."""
        if not groups:
            return
        requests = np.concatenate([self._members[group] for group in groups])
        running = requests[np.isin(requests, self._running())]
        if running.size:
            self._stop(running)
        self._policy.put_back(requests.tolist())
        self._waiting[requests] = False
        self._lost += int(self._decoded[requests].sum())
        self._ends[list(groups)] = 0
        self._begun[requests] = self._ended[requests] = -1
        for array, value in (
            (self._decoded, 0),
            (self._progress.decoded, 0),
            (self._progress.held, self._problem.kv_at_start[requests]),
            (self._progress.left, self._whole[requests]),
        ):
            array[requests] = value


def _check(step: IntArray, group: IntArray, groups: int, way: Way) -> None:
    if (np.diff(step) < 0).any():
        raise ValueError("the requests' steps descend; give them step by step")
    low, high = np.full(groups, step.max()), np.full(groups, step.min())
    np.minimum.at(low, group, step)
    np.maximum.at(high, group, step)
    if (low != high).any():
        raise ValueError("a group has requests in several steps")
    most = int(np.bincount(group).max())
    if way.keep is not None and way.keep >= most:
        raise ValueError(f"keep is {way.keep}, and no group has more than {most} requests: it has no effect")
