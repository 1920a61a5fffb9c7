"""Several steps of rollouts in a row: with a barrier between them, or with partial rollouts that go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...data.costs.cost import FloatArray, IntArray
from ...data.lengths.steps_plan import Way
from ...data.problem import Problem
from ...data.trace import Stage
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


class StepsEngine(Engine, Protocol):
    """An engine that can be told that the weights change, and that a completion begins anew."""

    def forget_prompts(self) -> None:
        """Let go of shared prompts that are kept: what begins computes them anew."""
        ...

    def recompute(self) -> None:
        """Let go of all keys and values that are kept: what goes on computes them anew. Nothing runs."""
        ...

    def restart(self, requests: Sequence[int]) -> None:
        """Let go of all tokens of requests that do not run: they begin anew."""
        ...


def simulate_steps(
    problem: Problem, step: IntArray, way: Way, policy: QueuedPolicy, output_tokens: IntArray | None = None
) -> StepsRun:
    """Return what steps of rollouts come to in the simulator, as :func:`serve_steps` does on an engine."""
    simulator = Simulator(problem, progress=Progress.none(problem, output_tokens))
    return serve_steps(problem, step, way, policy, simulator)


def serve_steps(
    problem: Problem, step: IntArray, way: Way, policy: QueuedPolicy, engine: StepsEngine
) -> StepsRun:
    """
    Return what steps of rollouts come to on an engine.

    Nothing is counted for the training between steps, which takes as long in every way.

    Parameters
    ----------
    problem, step, way, policy, engine
        As :class:`StepsServing` takes them.

    Raises
    ------
    ValueError
        As there.
    """
    serving = StepsServing(problem, step, way, policy, engine)
    while serving.advance():
        pass
    return serving.run


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
        Which requests have ended, shape (requests,). One counts as ended, too, as soon as its group is
        complete without it: it ended in the same decode step as the last that is kept.
    """
    simulator = Simulator(problem, progress=Progress.none(problem, lengths))
    serving = StepsServing(problem, step, way, policy, simulator)
    serving.watched = ended
    while serving.advance():
        pass
    return np.zeros(len(problem), dtype=np.int64) if serving.reached is None else serving.reached


class _Evicting:
    """A policy that first stops what it is told to."""

    def __init__(self, policy: QueuedPolicy) -> None:
        self._policy = policy
        self.stop: list[int] = []

    def put_back(self, requests: Sequence[int]) -> None:
        """Tell the queue of requests that are stopped."""
        self._policy.queue.put_back(requests)

    def take(self, requests: Sequence[int]) -> None:
        """Tell the queue of requests that have begun."""
        self._policy.queue.take(requests)

    def __call__(self, state: State) -> Step:
        if self.stop:
            stopped, self.stop = self.stop, []
            self.put_back(stopped)
            return Step(rounds=0, evict=stopped)
        return self._policy(state)


class StepsServing:
    """
    Steps of rollouts as they are served, one after another: between two of them the weights may change.

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

    Attributes
    ----------
    served
        Steps that have ended.
    begun, ended
        The step in which each request began and ended, -1 for none, shape (requests,).
    beside
        Whether each ended in the same decode step as the last of its group that is kept, and is not kept
        itself, shape (requests,).

    Raises
    ------
    ValueError
        If a group has requests in several steps, steps descend, or fewer completions than are kept.
    """

    def __init__(
        self, problem: Problem, step: IntArray, way: Way, policy: QueuedPolicy, engine: StepsEngine
    ) -> None:
        self._group, groups = group_numbers(problem)
        step = np.asarray(step, dtype=np.int64)
        _check(problem.workload.ids, step, self._group, groups, way)
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
        self._policy, self._engine = _Evicting(policy), engine
        self._execution = Execution(problem, self._policy, engine, queue=(self._waiting, self._decoded))
        self._ends = np.zeros(groups, dtype=np.int64)
        self._complete = 0
        self.begun, self.ended = (np.full(len(problem), -1, dtype=np.int64) for _ in range(2))
        self.beside = np.zeros(len(problem), dtype=np.bool_)
        self.served, self._forgotten, self._seconds = 0, 0, list[float]()
        self._counted = 0
        self._there: Mapping[int, int] = {}
        self._steps = self._rounds() if way.restart else self._stream()
        self.watched: npt.NDArray[np.bool_] | None = None
        self.reached: IntArray | None = None
        """Tokens of each request when all that are watched had ended."""
        self._on_end: Callable[[int], None] | None = None

    @property
    def run(self) -> StepsRun:
        """What the steps so far came to."""
        tokens = np.where(self.ended >= 0, self.tokens, 0)
        stopped = (self.ended < 0) & (self._ends == self._wanted)[self._group]
        lost = self._forgotten + int(self._decoded[stopped].sum())
        return StepsRun(np.array(self._seconds), self.begun, self.ended, tokens, lost)

    @property
    def over(self) -> bool:
        """Whether every group is complete."""
        return self._complete == len(self._members)

    @property
    def tokens(self) -> IntArray:
        """Tokens of each request so far, 0 of one that has not begun, shape (requests,)."""
        some = (self._decoded > 0) | (self.begun >= 0)
        return np.where(some, self._decoded + int(self._problem.prefill_emits_first_token), 0)

    @property
    def under_way(self) -> IntArray:
        """The requests that have begun and are to go on."""
        to_go = self._waiting.copy()
        to_go[self._running()] = True
        return np.flatnonzero(to_go & (self.begun >= 0))

    def advance(self, there: Mapping[int, int] | None = None) -> bool:
        """
        Serve the next step to its end, and return whether there was one.

        Parameters
        ----------
        there
            Tokens of requests that have ended in it already, in the order in which they did: in a part of
            it that broke off, all that it began with beside them being as it was at the step's begin.
        """
        self._there = there or {}
        return next(self._steps, None) is not None

    def watch(
        self, on_end: Callable[[int], None], on_stage: Callable[[Stage, int], None] | None = None
    ) -> None:
        """
        Tell somebody of what comes.

        Parameters
        ----------
        on_end
            Called with each request that has all its tokens, kept or not, as it ends.
        on_stage
            Called after each stage with its record and the number of requests finished so far.
        """
        self._on_end, self._execution.on_stage = on_end, on_stage

    def go_on_with(self, engine: StepsEngine) -> None:
        """Serve the steps to come on another engine, which has what this one has decoded."""
        self._engine = self._execution.engine = engine

    def _step_ended(self) -> int:
        """Count a step, by the cost model, whatever the engine's clock is."""
        cost, stages = self._problem.cost, self._execution.stages
        self._seconds.append(
            sum(stage.model_seconds(cost, overheads=False) for stage in stages[self._counted :])
        )
        self._counted = len(stages)
        self.served += 1
        return self.served

    def _stream(self) -> Iterator[int]:
        """Serve steps of which what is not complete goes on in the next."""
        released = 0
        for last, size in zip(np.cumsum(self._sizes).tolist(), self._sizes.tolist(), strict=True):
            until = min(len(self._order), last + math.ceil(self._way.ahead * size))
            self._release(self._order[released:until])
            released = max(released, until)
            self._serve(last)
            if self._way.keep_kv:
                # Of what goes on, not of what begins by the weights of then.
                self._engine.forget_prompts()
            else:
                if self._running().size:
                    self._stop(self._running())
                self._engine.recompute()
            yield self._step_ended()

    def _rounds(self) -> Iterator[int]:
        """Serve short rounds, and long ones of the groups that were not complete in them."""
        size, begun = int(self._sizes[0]), 0
        late: list[int] = []
        while begun < len(self._order) or late:
            if len(late) >= size or begun == len(self._order):
                mine, late = late[:size], late[size:]
                self._release(mine)
                self._serve(self._complete + len(mine))
            else:
                new = self._order[begun : begun + size + math.ceil(self._way.ahead * size)].tolist()
                begun += len(new)
                self._release(new)
                self._serve(self._complete + min(size, len(new)))
                left = [group for group in new if self._ends[group] < self._wanted[group]]
                self._forget(left)
                late += left
            self._engine.recompute()
            yield self._step_ended()

    def _release(self, groups: Sequence[int] | IntArray) -> None:
        for group in groups:
            self._waiting[self._members[int(group)]] = True

    def _running(self) -> IntArray:
        return self._execution.state.running

    def _serve(self, complete: int) -> None:
        """Serve until a number of groups are complete."""
        for request, tokens in self._there.items():
            self._policy.take([request])
            self._waiting[request] = False
            self._decoded[request] = tokens - int(self._problem.prefill_emits_first_token)
            self._end(request)
        while self._complete < complete:
            ended = list(self._execution.step())
            running = self._running()
            fresh = running[self.begun[running] < 0]
            self.begun[fresh] = self.served
            for request in ended:
                self._end(request)
            if ended and self.watched is not None and self.reached is None and self._through(self.watched):
                self.reached = self.tokens

    def _through(self, requests: npt.NDArray[np.bool_]) -> bool:
        """Tell whether each of some requests has ended, or enough others of its group have."""
        complete = (self._ends == self._wanted)[self._group]
        return bool((complete | (self.ended >= 0))[requests].all())

    def _end(self, request: int) -> None:
        """Note that a request has all its tokens."""
        if self.begun[request] < 0:
            self.begun[request] = self.served
        group = self._group[request]
        # It may end in the same decode step as the last that is kept.
        kept = self._ends[group] < self._wanted[group]
        if kept:
            self.ended[request] = self.served
        if self._on_end is not None:
            self._on_end(request)
        if not kept:
            self.beside[request] = True
            return
        self._ends[group] += 1
        if self._ends[group] == self._wanted[group]:
            self._complete += 1
            if self._way.keep is not None:
                self._drop(self._members[group])

    def _drop(self, requests: IntArray) -> None:
        """Stop those of a group that are not kept, for good."""
        over = requests[self.ended[requests] < 0]
        running = over[np.isin(over, self._running())]
        if running.size:
            self._stop(running)
        self._waiting[over] = False

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
        self._forgotten += int(self._decoded[requests].sum())
        self._ends[list(groups)] = 0
        self.begun[requests] = self.ended[requests] = -1
        self._engine.restart(requests.tolist())
        self._decoded[requests] = 0


def _check(ids: npt.NDArray[np.object_], step: IntArray, group: IntArray, groups: int, way: Way) -> None:
    if (np.diff(step) < 0).any():
        raise ValueError("the requests' steps descend; give them step by step")
    low, high = np.full(groups, step.max()), np.full(groups, step.min())
    np.minimum.at(low, group, step)
    np.maximum.at(high, group, step)
    if (low != high).any():
        there = np.flatnonzero(group == int(np.argmax(low != high)))
        other = there[step[there] != step[there[0]]][0]
        first, second = (repr(str(ids[at])) for at in (there[0], other))
        raise ValueError(f"a group has requests in several steps, {first} and {second} among them")
    most = int(np.bincount(group).max())
    if way.keep is not None and way.keep >= most:
        raise ValueError(f"keep is {way.keep}, and no group has more than {most} requests: it has no effect")
