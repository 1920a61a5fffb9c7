"""A job on several replicas, each a Ray actor with an engine of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..data.cost import IntArray
from ..data.fleet import Fleet, FleetSchedule
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..data.trace import Stage, Trace
from ..heuristics.policy import Policy, State, Step
from ..heuristics.replay import Replay
from .fleet_simulation import longest_first_policy
from .loop import execute

_LOG = logging.getLogger(__name__)
_QUIET = 0.05
"""Seconds of events that travel to the driver together."""


class FleetLostError(RuntimeError):
    """Every replica died; what was answered before has been handed over."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """
    What each replica loads.

    Parameters
    ----------
    model, load_format, dtype, device, seed
        As :func:`~batchbound.executor.model_source.load_model` takes them; ``seed`` is of sampling, too.
    tier
        Layout of keys and values.
    eos_ids
        Tokens that end an answer.
    sampling
        Fields of :class:`~batchbound.executor.sampling.Sampler`.
    threads
        CPU threads of torch in each replica, or None for torch's own.
    """

    model: str
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    tier: str = "auto"
    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    threads: int | None = 1


@dataclass(frozen=True, slots=True, eq=False)
class FleetOutcome:
    """
    What a fleet did.

    Parameters
    ----------
    traces
        One per replica, also of one that died: all stages it reported, and the requests it finished.
    lost
        The replicas that died, and why.
    moved
        Requests that were served by another replica than they were dispatched to.
    """

    traces: tuple[Trace, ...]
    lost: Mapping[int, str]
    moved: int


@dataclass(slots=True)
class _Log:
    """What a replica reported so far."""

    stages: list[Stage] = field(default_factory=list)
    stage_of: dict[int, int] = field(default_factory=dict)
    slot_of: dict[int, int] = field(default_factory=dict)
    finished: dict[int, tuple[float, int]] = field(default_factory=dict)
    engine: Mapping[str, object] = field(default_factory=dict)

    def trace(self, fleet: Fleet, replica: int) -> Trace:
        """Return the trace of what finished."""
        rows = sorted(self.finished)
        stage_of = np.array([self.stage_of[row] for row in rows], dtype=np.int64)
        begun = np.array([self.stages[stage].start for stage in stage_of.tolist()])
        first = np.array([self.stages[stage].end for stage in stage_of.tolist()])
        return Trace(
            ids=tuple(fleet.workload.ids[rows].tolist()),
            slots=fleet.replicas[replica].slots,
            stages=tuple(self.stages),
            stage_of=stage_of,
            slot_of=np.array([self.slot_of[row] for row in rows], dtype=np.int64),
            queued=np.zeros(len(rows)),
            prefilled=begun,
            first_token=first,
            finished=np.array([self.finished[row][0] for row in rows]),
            tokens=np.array([self.finished[row][1] for row in rows], dtype=np.int64),
            engine=self.engine,
        )


class RayFleet:
    """
    Replicas on a local Ray or a cluster, each an actor with its own engine, a GPU each where there are any.

    Parameters
    ----------
    spec
        What each loads.
    replicas
        How many.
    address
        Of a running cluster; None for a Ray of this machine that ends with the fleet.

    Raises
    ------
    ImportError
        If Ray is not installed.
    """

    def __init__(self, spec: EngineSpec, replicas: int, address: str | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise ImportError("several replicas need Ray: pip install 'batchbound[ray]'") from None

        self._ours = not ray.is_initialized()
        if self._ours:
            options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
            if address is None:
                # Replicas take turns on fewer cores; waiting for a free one would wait for ever.
                options["num_cpus"] = max(replicas, 1)
                # Ray gives way to all else on the machine by default; here its actors are the work itself.
                options["_system_config"] = {"worker_niceness": 0}
            ray.init(address=address, configure_logging=False, **options)
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= replicas else 0
        actor = ray.remote(max_concurrency=4, max_restarts=0, num_cpus=1, num_gpus=gpus)(_Replica)
        self.actors: list[Any] = [actor.remote(spec) for _ in range(replicas)]

    def close(self) -> None:
        """End the actors, and Ray if it was started here."""
        import ray

        for actor in self.actors:
            ray.kill(actor)
        if self._ours:
            ray.shutdown()

    def serve(
        self,
        fleet: Fleet,
        schedule: FleetSchedule,
        prompts: Sequence[Sequence[int]],
        most_tokens: IntArray,
        on_answer: Callable[[int, list[int]], None],
        *,
        backoff: bool = True,
        on_stage: Callable[[int, Stage], None] | None = None,
    ) -> FleetOutcome:
        """
        Serve every request of a fleet as its schedule says, and return what each replica did.

        Each replica replays its own schedule, and repairs it where lengths turn out different. One that runs
        dry takes over what a dead one left, then half of what waits at the one with most left; that is
        served longest first.

        Parameters
        ----------
        fleet, schedule
            The requests, the replicas' slots and limits, and what each is to do when.
        prompts
            Token ids of each prompt.
        most_tokens
            Tokens after which each answer ends, shape (requests,).
        on_answer
            Called once with each request and its tokens, as it finishes.
        backoff
            Whether a replica that runs dry takes from others that live, too.
        on_stage
            Called with the replica and the record of each stage.

        Raises
        ------
        ValueError
            If the schedule is not of as many replicas as there are.
        FleetLostError
            If every replica died.
        """
        if len(schedule.schedules) != len(self.actors):
            raise ValueError(f"{len(schedule.schedules)} schedules for {len(self.actors)} replicas")
        serving = _Serving(self.actors, fleet, schedule, prompts, most_tokens, on_answer, on_stage, backoff)
        return serving.run()


class _Serving:
    """One job under way: who has what, and what has been reported."""

    def __init__(
        self,
        actors: Sequence[Any],
        fleet: Fleet,
        schedule: FleetSchedule,
        prompts: Sequence[Sequence[int]],
        most_tokens: IntArray,
        on_answer: Callable[[int, list[int]], None],
        on_stage: Callable[[int, Stage], None] | None,
        backoff: bool,
    ) -> None:
        self._actors, self._fleet, self._prompts = actors, fleet, prompts
        self._most, self._on_answer, self._on_stage = most_tokens, on_answer, on_stage
        self._rounds, self._backoff = fleet.rounds, backoff
        self._dispatched = schedule.replica_of
        self._planned: list[Schedule | None] = list(schedule.schedules)
        self._held = [set(np.flatnonzero(self._dispatched == k).tolist()) for k in range(len(actors))]
        self._orphans: set[int] = set()
        self._logs = [_Log() for _ in actors]
        self._streams: dict[Any, int] = {}
        self._lost: dict[int, str] = {}
        self._done: set[int] = set()
        self._moved = 0

    def run(self) -> FleetOutcome:
        import ray

        # One that loads faster would take over what the others have not begun.
        ray.wait([actor.pid.remote() for actor in self._actors], num_returns=len(self._actors))
        for k in range(len(self._actors)):
            self._start(k)
        while len(self._done) < len(self._fleet):
            if not self._streams:
                self._orphans.update(*self._held)
                if len(self._lost) == len(self._actors):
                    raise FleetLostError(f"all {len(self._actors)} replicas died: {self._lost}")
                for k in range(len(self._actors)):
                    self._start(k)
            ready, _ = ray.wait(list(self._streams), num_returns=1, timeout=1.0)
            for stream in ready:
                self._follow(stream)
        traces = tuple(log.trace(self._fleet, k) for k, log in enumerate(self._logs))
        return FleetOutcome(traces, self._lost, self._moved)

    def _follow(self, stream: Any) -> None:
        """Take the next report of a replica: events, its end, or its death."""
        import ray

        k = self._streams[stream]
        try:
            for event in ray.get(next(stream)):
                self._take(k, event)
        except StopIteration:
            del self._streams[stream]
            if self._held[k]:
                raise RuntimeError(
                    f"replica {k} ended with {len(self._held[k])} requests unanswered"
                ) from None
            self._start(k)
        except ray.exceptions.RayActorError as error:
            del self._streams[stream]
            self._lose(k, type(error).__name__)

    def _take(self, k: int, event: tuple[Any, ...]) -> None:
        log = self._logs[k]
        if event[0] == "stage":
            _, stage, requests, slots = event
            for request, slot in zip(requests, slots, strict=True):
                log.stage_of[request], log.slot_of[request] = len(log.stages), slot
            log.stages.append(stage)
            if self._on_stage is not None:
                self._on_stage(k, stage)
        elif event[0] == "answer":
            _, request, tokens, end = event
            self._held[k].discard(request)
            if request not in self._done:
                self._done.add(request)
                log.finished[request] = (end, len(tokens))
                self._moved += int(self._dispatched[request] != k)
                self._on_answer(request, tokens)
        else:
            log.engine = event[1]

    def _lose(self, k: int, why: str) -> None:
        self._lost[k] = why
        self._logs[k].engine = {**self._logs[k].engine, "lost": why}
        self._orphans |= self._held[k]
        self._held[k] = set()
        _LOG.warning("replica %d died (%s); %d of its requests go elsewhere", k, why, len(self._orphans))
        busy = set(self._streams.values())
        for other in range(len(self._actors)):
            if other not in busy and other not in self._lost:
                self._start(other)

    def _start(self, k: int) -> None:
        """Give a replica that has nothing to do its share, what a dead one left, or half of another's."""
        if k in self._lost:
            return
        planned, self._planned[k] = self._planned[k], None
        if not self._held[k]:
            if self._orphans:
                alive = len(self._actors) - len(self._lost)
                longest = sorted(self._orphans, key=lambda i: -int(self._rounds[i]))
                self._held[k] = set(longest[:: max(1, alive)])
                self._orphans -= self._held[k]
            elif self._backoff:
                self._held[k] = self._take_over(k)
        requests = sorted(self._held[k])
        if not requests:
            return
        share = np.array(requests, dtype=np.int64)
        stream = (
            self._actors[k]
            .serve.options(num_returns="streaming")
            .remote(
                self._fleet.problem_of(k, share),
                planned,
                requests,
                [list(self._prompts[i]) for i in requests],
                self._most[share],
            )
        )
        self._streams[stream] = k

    def _take_over(self, thief: int) -> set[int]:
        import ray

        others = [k for k in set(self._streams.values()) if k != thief and k not in self._lost]
        others.sort(key=lambda k: -sum(int(self._rounds[i]) for i in self._held[k]))
        for victim in others:
            try:
                released = ray.get(self._actors[victim].release.remote())
            except ray.exceptions.RayActorError:
                continue  # Its stream reports the death, too.
            taken = set(released) - self._done
            self._held[victim] -= taken
            if taken:
                return taken
        return set()


class _Replica:
    """The actor: a loaded model that serves shares of a job one after another."""

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        from .model_source import load_model
        from .tiers import choose_tier

        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self._spec = spec
        self._model = load_model(
            spec.model,
            load_format=spec.load_format,  # type: ignore[arg-type]
            dtype=spec.dtype,
            device=spec.device,
            seed=spec.seed,
        )
        self._tier = choose_tier(self._model, spec.tier)
        self._policy: _Releasing | None = None
        self._began: float | None = None

    def pid(self) -> int:
        """Return the process the replica runs in."""
        import os

        return os.getpid()

    def release(self) -> list[int]:
        """Give up half of the requests that wait, and return them."""
        return [] if self._policy is None else self._policy.release()

    def serve(
        self,
        problem: Problem,
        planned: Schedule | None,
        requests: list[int],
        prompts: list[list[int]],
        most: IntArray,
    ) -> Any:
        """Yield lists of events: what engine it is, each stage with what it prefilled, each answer."""
        events: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        policy = _Releasing(problem, planned, requests)
        self._policy = policy
        work = threading.Thread(
            target=self._serve, args=(problem, policy, prompts, most, events), daemon=True
        )
        work.start()
        ended = False
        while not ended:
            batch = [events.get()]
            until = time.monotonic() + _QUIET
            while batch[-1] is not None and (left := until - time.monotonic()) > 0:
                try:
                    batch.append(events.get(timeout=left))
                except queue.Empty:
                    break
            ended = batch[-1] is None
            for event in batch:
                if event is not None and event[0] == "error":
                    raise event[1]
            yield [event for event in batch if event is not None]
        self._policy = None

    def _serve(
        self,
        problem: Problem,
        policy: _Releasing,
        prompts: list[list[int]],
        most: IntArray,
        events: queue.SimpleQueue[tuple[Any, ...] | None],
    ) -> None:
        from .huggingface import HuggingFaceEngine
        from .sampling import Sampler

        try:
            engine = HuggingFaceEngine(
                problem,
                self._model,
                prompts,
                most,
                eos_ids=frozenset(self._spec.eos_ids),
                sampler=Sampler(**self._spec.sampling),  # type: ignore[arg-type]
                tier=self._tier,
            )
            now = time.perf_counter()
            self._began = now if self._began is None else self._began
            offset = now - self._began
            events.put(("engine", dict(engine.describe())))

            end = 0.0

            def staged(stage: Stage, _: int) -> None:
                nonlocal end
                taken, slots = policy.prefilled() if stage.kind == "prefill" else ([], [])
                end = stage.end + offset
                events.put(("stage", replace(stage, start=stage.start + offset, end=end), taken, slots))

            def finished(request: int) -> None:
                events.put(("answer", policy.requests[request], engine.answers[request], end))

            try:
                execute(problem, policy, engine, on_finish=finished, on_stage=staged)
            except _AllReleasedError:
                _LOG.debug("the rest of the share was taken over by another replica")
            events.put(None)
        except BaseException as error:
            events.put(("error", error))


class _AllReleasedError(Exception):
    """Nothing runs, and all that waited is served elsewhere."""


class _Releasing:
    """
    A policy whose waiting requests may be given up from another thread.

    Parameters
    ----------
    problem
        Of the share.
    planned
        What to replay; None to serve the longest first.
    requests
        The job's number of each request of the share.
    """

    def __init__(self, problem: Problem, planned: Schedule | None, requests: Sequence[int]) -> None:
        self._replay = None if planned is None else Replay(planned, problem)
        self._policy: Policy = self._replay or longest_first_policy(problem)
        self.requests = list(requests)
        self._lock = threading.Lock()
        self._gone = np.zeros(len(requests), dtype=np.bool_)
        self._begun = np.zeros(len(requests), dtype=np.bool_)
        self._rounds = problem.rounds
        self._step = Step()

    def __call__(self, state: State) -> Step:
        """Return the next step of the policy over what has not been given up."""
        with self._lock:
            state.waiting[self._gone] = False
            if not state.waiting.any() and not state.running.size:
                raise _AllReleasedError
            step = self._policy(state)
            self._begun[list(step.prefill)] = True
            if len(step.prefill):
                self._step = step
            return step

    def prefilled(self) -> tuple[list[int], list[int]]:
        """Return the job's requests of the latest prefill stage, and their slots."""
        return [self.requests[i] for i in self._step.prefill], list(self._step.slots)

    def release(self) -> list[int]:
        """Give up half of what has not begun, every other one by length, and return it."""
        with self._lock:
            waiting = np.flatnonzero(~self._begun & ~self._gone)
            longest = waiting[np.argsort(-self._rounds[waiting], kind="stable")]
            taken = longest[::2]
            self._gone[taken] = True
            if self._replay is not None:
                self._replay.withdraw(taken)
            return [self.requests[i] for i in taken.tolist()]
