"""Simulation of rollout steps: barriers, partial rollouts, tail batching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...data.arrays import FloatArray, IntArray
from ...data.lengths.steps import Way
from ...data.problem import Problem
from ..engine import Engine
from ..loop import Execution
from ..policy import State, Step
from ..queues.queue_policy import QueuedPolicy
from ..simulator import Progress, Simulator
from .groups import group_numbers


@dataclass(frozen=True, slots=True, eq=False)
class StepsRun:
    """Times and lengths of several rollout steps."""

    seconds: FloatArray
    """Model seconds of each step, without training, shape (steps,)."""

    begun: IntArray
    """Step in which each request began, -1 if stopped, shape (requests,)."""

    ended: IntArray
    """Step in which each request ended, -1 if stopped, shape (requests,)."""

    tokens: IntArray
    """Tokens of each kept completion, 0 if stopped, shape (requests,)."""

    lost: int
    """Decode steps of stopped or restarted requests."""

    @property
    def makespan(self) -> float:
        """Seconds of all steps."""
        return float(self.seconds.sum())

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """True for completed requests, shape (requests,)."""
        return self.ended >= 0

    @property
    def stale_share(self) -> float:
        """Share of kept completions that began in an earlier step."""
        completed = self.kept
        return float((self.ended[completed] > self.begun[completed]).mean())

    @property
    def staleness(self) -> float:
        """Mean number of steps of a kept completion."""
        completed = self.kept
        return float((self.ended[completed] - self.begun[completed]).mean())

    def ages(self) -> list[int]:
        """Return how many kept completions began 0, 1, 2 and so on steps before their end."""
        kept = self.kept
        ages: list[int] = np.bincount(self.ended[kept] - self.begun[kept]).tolist()
        return ages

    def kept_bias(self, truth: IntArray) -> float:
        """Return the kept completions' mean length over that of all, minus one."""
        return float(truth[self.kept].mean() / truth.mean() - 1)

    def early_bias(self, truth: IntArray) -> float:
        """Return :meth:`kept_bias` of completions before the last step."""
        early = self.kept & (self.ended < len(self.seconds) - 1)
        return float(truth[early].mean() / truth.mean() - 1) if early.any() else 0.0


class StepsEngine(Engine, Protocol):
    """Engine with weights that change between steps."""

    def forget_prompts(self) -> None:
        """Drop shared prompts from the cache."""
        ...

    def recompute(self) -> None:
        """Drop the whole KV cache while nothing runs."""
        ...

    def restart(self, requests: Sequence[int]) -> None:
        """Drop all tokens of requests that do not run."""
        ...


def simulate_steps(
    problem: Problem, step: IntArray, way: Way, policy: QueuedPolicy, output_tokens: IntArray | None = None
) -> StepsRun:
    """Simulate steps of rollouts, as :func:`serve_steps` serves them."""
    simulator = Simulator(problem, progress=Progress.none(problem, output_tokens))
    return serve_steps(problem, step, way, policy, simulator)


def serve_steps(
    problem: Problem, step: IntArray, way: Way, policy: QueuedPolicy, engine: StepsEngine
) -> StepsRun:
    """Serve steps of rollouts on a fresh engine and policy.

    ``problem`` holds the requests of all steps with the lengths that the policy may use. ``step``, shape
    (requests,), ascends, and each group lies within one step. Training time between steps is not counted.
    Raises ValueError if steps descend, a group spans steps, or ``way.keep`` has no effect.
    """
    group, groups = group_numbers(problem)
    step = np.asarray(step, dtype=np.int64)
    _check(problem.workload.ids, step, group, groups, way)
    first = np.unique(group, return_index=True)[1]
    # Groups in order of arrival, and how many of them each step has.
    order = group[np.sort(first)]
    sizes = np.unique(step[first][order], return_counts=True)[1].tolist()
    serving = _Serving(problem, group, way, policy, engine)
    if way.groups is not None:
        _some_groups(serving, order, sizes, way.groups)
    elif way.restart:
        _tail_batching(serving, order, sizes[0], way)
    else:
        _partial_rollouts(serving, order, sizes, way)
    return serving.run


def _partial_rollouts(serving: _Serving, order: IntArray, sizes: Sequence[int], way: Way) -> None:
    """End each step once enough groups are complete.

    The others resume in the next step.
    """
    released = 0
    for last, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        until = min(len(order), last + math.ceil(way.ahead * size))
        serving.release(order[released:until].tolist())
        released = max(released, until)
        serving.serve(last)
        if way.keep_kv:
            # Resumed requests keep their cache; new ones need prompts under the new weights.
            serving.engine.forget_prompts()
        else:
            serving.stop(serving.running)
            serving.engine.recompute()
        serving.end_step()


def _some_groups(serving: _Serving, order: IntArray, sizes: Sequence[int], share: float) -> None:
    """End each step once a share of its groups is complete; give the others up."""
    begun = 0
    for size in sizes:
        groups = order[begun : begun + size].tolist()
        begun += size
        serving.release(groups)
        serving.serve(serving.complete + max(1, round(share * size)))
        serving.forget_incomplete(groups)
        serving.engine.recompute()
        serving.end_step()


def _tail_batching(serving: _Serving, order: IntArray, size: int, way: Way) -> None:
    """Serve short steps, and long steps of restarted groups."""
    begun, late = 0, list[int]()
    while begun < len(order) or late:
        if len(late) >= size or begun == len(order):
            mine, late = late[:size], late[size:]
            serving.release(mine)
            serving.serve(serving.complete + len(mine))
        else:
            new = order[begun : begun + size + math.ceil(way.ahead * size)].tolist()
            begun += len(new)
            serving.release(new)
            serving.serve(serving.complete + min(size, len(new)))
            late += serving.forget_incomplete(new)
        serving.engine.recompute()
        serving.end_step()


class _Evicting:
    """Policy that evicts the requests in ``stop`` before another policy decides."""

    def __init__(self, policy: QueuedPolicy) -> None:
        self._policy = policy
        self.stop: list[int] = []

    def put_back(self, requests: Sequence[int]) -> None:
        self._policy.queue.put_back(requests)

    def __call__(self, state: State) -> Step:
        if self.stop:
            stopped, self.stop = self.stop, []
            self.put_back(stopped)
            return Step(decode_steps=0, evict=stopped)
        return self._policy(state)


class _Serving:
    """Released and complete groups."""

    def __init__(
        self, problem: Problem, group: IntArray, way: Way, policy: QueuedPolicy, engine: StepsEngine
    ) -> None:
        self.engine, self.complete = engine, 0
        self._problem, self._group, self._keep = problem, group, way.keep
        size = np.bincount(group)
        self._wanted = size if way.keep is None else np.minimum(size, way.keep)
        self._ends = np.zeros(len(size), dtype=np.int64)
        self._waiting = np.zeros(len(problem), dtype=np.bool_)
        self._decoded = np.zeros(len(problem), dtype=np.int64)
        self._policy = _Evicting(policy)
        self._execution = Execution(problem, self._policy, engine, queue=(self._waiting, self._decoded))
        self._begun, self._ended = (np.full(len(problem), -1, dtype=np.int64) for _ in range(2))
        self._forgotten, self._counted, self._seconds = 0, 0, list[float]()

    @property
    def run(self) -> StepsRun:
        emitted = int(self._problem.prefill_emits_first_token)
        tokens = np.where(self._ended >= 0, self._decoded + emitted, 0)
        stopped = (self._ended < 0) & (self._ends == self._wanted)[self._group]
        lost = self._forgotten + int(self._decoded[stopped].sum())
        return StepsRun(np.array(self._seconds), self._begun, self._ended, tokens, lost)

    @property
    def running(self) -> IntArray:
        return self._execution.state.running

    def release(self, groups: Sequence[int]) -> None:
        self._waiting[np.isin(self._group, groups)] = True

    def serve(self, complete: int) -> None:
        while self.complete < complete:
            ended = list(self._execution.step())
            fresh = np.append(self.running, np.array(ended, dtype=np.int64))
            self._begun[fresh[self._begun[fresh] < 0]] = len(self._seconds)
            for request in ended:
                self._end(request)

    def end_step(self) -> None:
        """Append the step's seconds by the cost model."""
        cost, stages = self._problem.cost, self._execution.stages
        self._seconds.append(
            sum(stage.model_seconds(cost, overheads=False) for stage in stages[self._counted :])
        )
        self._counted = len(stages)

    def stop(self, requests: IntArray) -> None:
        self._policy.stop = requests[np.isin(requests, self.running)].tolist()
        if self._policy.stop:
            for _ in self._execution.step():
                raise AssertionError("nothing ends while requests are evicted")

    def forget_incomplete(self, groups: Sequence[int]) -> list[int]:
        """Evict incomplete groups, drop their tokens, and return them."""
        incomplete = [group for group in groups if self._ends[group] < self._wanted[group]]
        if incomplete:
            requests = np.concatenate([np.flatnonzero(self._group == group) for group in incomplete])
            self.stop(requests)
            self._policy.put_back(requests.tolist())
            self._waiting[requests] = False
            self._forgotten += int(self._decoded[requests].sum())
            self._ends[incomplete] = 0
            self._begun[requests] = self._ended[requests] = -1
            self.engine.restart(requests.tolist())
            self._decoded[requests] = 0
        return incomplete

    def _end(self, request: int) -> None:
        group = self._group[request]
        if self._ends[group] == self._wanted[group]:
            # It ended in the same decode step as the last that its group keeps.
            return
        self._ended[request] = len(self._seconds)
        self._ends[group] += 1
        if self._ends[group] == self._wanted[group]:
            self.complete += 1
            if self._keep is not None:
                over = np.flatnonzero((self._group == group) & (self._ended < 0))
                self.stop(over)
                self._waiting[over] = False


def _check(ids: npt.NDArray[np.object_], step: IntArray, group: IntArray, groups: int, way: Way) -> None:
    if (np.diff(step) < 0).any():
        raise ValueError("the requests' steps descend; give them step by step")
    low, high = np.full(groups, step.max()), np.full(groups, step.min())
    np.minimum.at(low, group, step)
    np.maximum.at(high, group, step)
    if (low != high).any():
        members = np.flatnonzero(group == int(np.argmax(low != high)))
        member = members[step[members] != step[members[0]]][0]
        first, second = (repr(str(ids[at])) for at in (members[0], member))
        raise ValueError(f"a group has requests in several steps, {first} and {second} among them")
    largest = int(np.bincount(group).max())
    if way.keep is not None and way.keep >= largest:
        raise ValueError(
            f"keep is {way.keep}, and no group has more than {largest} requests: it has no effect"
        )
