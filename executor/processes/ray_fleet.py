"""Job on several replicas, each a Ray actor."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...data.arrays import IntArray
from ...data.fleet import Fleet, FleetSchedule
from ...data.schedule import Schedule
from ...data.trace import Stage, Trace
from ...heuristics.fleet.policy import FleetPolicy, NamedPolicy
from ..models.faults import MOST_FAILURES, RequestFailedError, RunStoppedError
from .engine_spec import EngineSpec
from .ray_replica import ReplicaActor

_LOG = logging.getLogger(__name__)


LAST_WORD = 10.0
"""Seconds for a replica to reply."""


class FleetLostError(RunStoppedError):
    """Error of a fleet without replicas; completions were delivered."""


@dataclass(frozen=True, slots=True, eq=False)
class FleetOutcome:
    """Run of a fleet.

    traces: One per replica, also of a dead one: all stages it reported, and the requests it finished.
    lost: Replicas that died, failed or hung before all was completed, and why.
    moved: Requests served by another replica than planned.
    """

    traces: tuple[Trace, ...]
    lost: Mapping[int, str]
    moved: int


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """Callbacks on a fleet's events other than completions.

    on_stage: Called with the replica and each stage.
    on_failure: Called once with each request on which the model fails, and why; the others are served. None
        stops at the first.
    """

    on_stage: Callable[[int, Stage], None] | None = None
    on_failure: Callable[[int, str], None] | None = None


@dataclass(slots=True)
class _Log:
    """Reports of a replica so far."""

    stages: list[Stage] = field(default_factory=list)
    stage_of: dict[int, int] = field(default_factory=dict)
    first_stage: dict[int, int] = field(default_factory=dict)
    evictions: int = 0
    slot_of: dict[int, int] = field(default_factory=dict)
    finished: dict[int, tuple[float, int]] = field(default_factory=dict)
    engine: Mapping[str, object] = field(default_factory=dict)

    def trace(self, fleet: Fleet, replica: int) -> Trace:
        rows = sorted(self.finished)
        stage_of = np.array([self.stage_of[row] for row in rows], dtype=np.int64)
        firsts = [self.stages[self.first_stage[row]] for row in rows]
        begun = np.array([stage.start for stage in firsts])
        first = np.array([stage.end for stage in firsts])
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
            evictions=self.evictions,
            engine=self.engine,
        )


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, as Ray's aborts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class RayFleet:
    """Replicas on a local Ray or a cluster.

    Each is an actor with its own engine and GPU, if any.
    """

    def __init__(
        self, spec: EngineSpec, replicas: int, address: str | None = None, patience: float | None = None
    ) -> None:
        self._patience = patience
        try:
            import ray
        except ImportError:
            raise ImportError("several replicas need Ray: in the clone, run `pip install '.[ray]'`") from None

        self._ours = not ray.is_initialized()
        if self._ours:
            options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
            if address is None:
                # Replicas share fewer cores; a wait for a free one would never end.
                options["num_cpus"] = max(replicas, 1)
                # Ray lowers its priority by default; here its actors are the main work.
                options["_system_config"] = {"worker_niceness": 0}
            with _own_sigterm():
                try:
                    ray.init(address=address, configure_logging=False, **options)
                except Exception as error:  # a node that takes too long to start raises a bare Exception
                    raise RunStoppedError(f"Ray does not start ({error}); start the run again") from error
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= replicas else 0
        actor = ray.remote(max_concurrency=4, max_restarts=0, num_cpus=1, num_gpus=gpus)(ReplicaActor)
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
        policy: FleetPolicy | NamedPolicy | None = None,
        listener: Listener | None = None,
    ) -> FleetOutcome:
        """Serve every request of a fleet by its schedule.

        Each replica follows the policy, or else replays its own schedule and repairs it where lengths differ.
        A replica without requests takes those of a dead one, then half of those that wait at the one with
        most left, longest first.

        Shapes: most_tokens (requests,).
        """
        if len(schedule.schedules) != len(self.actors):
            raise ValueError(f"{len(schedule.schedules)} schedules for {len(self.actors)} replicas")
        way = _Way(schedule, policy, backoff, self._patience)
        told = listener or Listener()
        return _Serving(self.actors, fleet, way, prompts, most_tokens, on_answer, told).run()


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """Rules of a job: schedules or policy, exchange, and timeouts."""

    schedule: FleetSchedule
    policy: FleetPolicy | NamedPolicy | None
    backoff: bool
    patience: float | None

    def policy_for(self, share: IntArray) -> FleetPolicy | NamedPolicy | None:
        return None if self.policy is None else self.policy.select(share)


class _Serving:
    """Running job: its requests by replica, and its reports."""

    def __init__(
        self,
        actors: Sequence[Any],
        fleet: Fleet,
        way: _Way,
        prompts: Sequence[Sequence[int]],
        most_tokens: IntArray,
        on_answer: Callable[[int, list[int]], None],
        told: Listener,
    ) -> None:
        schedule = way.schedule
        self._actors, self._fleet, self._prompts = actors, fleet, prompts
        self._most, self._on_answer, self._told, self._failures = most_tokens, on_answer, told, 0
        self._decode_steps, self._way = fleet.decode_steps, way
        self._dispatched = schedule.replica_of
        self._planned: list[Schedule | None] = list(schedule.schedules)
        self._held = [set(np.flatnonzero(self._dispatched == k).tolist()) for k in range(len(actors))]
        self._orphans: set[int] = set()
        self._logs = [_Log() for _ in actors]
        self._streams: dict[Any, int] = {}
        self._lost: dict[int, str] = {}
        self._done: set[int] = set()
        self._moved = 0
        self._heard = [time.monotonic()] * len(actors)
        self._unsure: set[int] = set()

    def run(self) -> FleetOutcome:
        import ray

        # A replica that loads faster would take requests that the others have not begun.
        ray.wait([actor.pid.remote() for actor in self._actors], num_returns=len(self._actors))
        for k in range(len(self._actors)):
            self._start(k)
        while len(self._done) < len(self._fleet):
            if not self._streams:
                self._orphans.update(*self._held)
                if len(self._lost) == len(self._actors):
                    why = "; ".join(f"replica {k}: {why}" for k, why in sorted(self._lost.items()))
                    raise FleetLostError(f"all {len(self._actors)} replicas died: {why}")
                for k in range(len(self._actors)):
                    self._start(k)
            ready, _ = ray.wait(list(self._streams), num_returns=1, timeout=1.0)
            for stream in ready:
                self._follow(stream)
            self._give_up_the_hung()
        self._ask_the_idle()
        traces = tuple(log.trace(self._fleet, k) for k, log in enumerate(self._logs))
        return FleetOutcome(traces, self._lost, self._moved)

    def _ask_the_idle(self) -> None:
        """Count dead replicas without open reports as lost."""
        import ray

        pending = {actor.pid.remote(): k for k, actor in enumerate(self._actors) if k not in self._lost}
        answered, _ = (
            ray.wait(list(pending), num_returns=len(pending), timeout=LAST_WORD) if pending else ([], [])
        )
        for reply in answered:
            try:
                ray.get(reply)
            except ray.exceptions.RayActorError as error:
                self._count_as_lost(pending[reply], _why(error))

    def _give_up_the_hung(self) -> None:
        import ray

        patience, now = self._way.patience, time.monotonic()
        if patience is None:
            return
        silent = {k: stream for stream, k in self._streams.items() if now - self._heard[k] > patience}
        if len(silent) + len(self._lost) == len(self._actors):
            # No replica could take over: the run's own watchdog decides.
            return
        for k, stream in silent.items():
            del self._streams[stream]
            ray.kill(self._actors[k])
            self._lose(k, f"no report for {patience:g} s")

    def _follow(self, stream: Any) -> None:
        import ray

        k = self._streams[stream]
        self._heard[k] = time.monotonic()
        try:
            for event in ray.get(next(stream)):
                self._take(k, event)
        except StopIteration:
            del self._streams[stream]
            self._give_back_unsure(k)
            if self._held[k]:
                raise RuntimeError(
                    f"replica {k} ended with {len(self._held[k])} requests unanswered"
                ) from None
            self._start(k)
        except ray.exceptions.RayActorError as error:
            del self._streams[stream]
            self._lose(k, _why(error))
        except ray.exceptions.RayTaskError as error:
            del self._streams[stream]
            if isinstance(error.cause, RequestFailedError):
                self._fail(k, error.cause)
            else:
                self._lose(k, _why(error.cause))

    def _fail(self, k: int, error: RequestFailedError) -> None:
        self._failures += 1
        if self._told.on_failure is None or self._failures == MOST_FAILURES:
            raise RunStoppedError(str(error)) from None
        request = self._fleet.workload.ids.tolist().index(error.name)
        log = self._logs[k]
        for held in self._held[k]:
            # Running requests begin again, which is no eviction.
            log.stage_of.pop(held, None)
            log.first_stage.pop(held, None)
        self._held[k].discard(request)
        if request not in self._done:
            self._done.add(request)
            self._told.on_failure(request, str(error))
        self._give_back_unsure(k)
        self._start(k)

    def _give_back_unsure(self, k: int) -> None:
        """Serve elsewhere the requests that a replica may have released."""
        if k in self._unsure:
            self._unsure.discard(k)
            self._orphans |= self._held[k]
            self._held[k] = set()

    def _take(self, k: int, event: tuple[Any, ...]) -> None:
        log = self._logs[k]
        if event[0] == "stage":
            _, stage, requests, slots = event
            for request, slot in zip(requests, slots, strict=True):
                log.evictions += request in log.stage_of
                log.first_stage.setdefault(request, len(log.stages))
                log.stage_of[request], log.slot_of[request] = len(log.stages), slot
            log.stages.append(stage)
            if self._told.on_stage is not None:
                self._told.on_stage(k, stage)
        elif event[0] == "completion":
            _, request, tokens, end = event
            self._held[k].discard(request)
            if request not in self._done:
                self._done.add(request)
                log.finished[request] = (end, len(tokens))
                self._moved += int(self._dispatched[request] != k)
                self._failures = 0
                self._on_answer(request, tokens)
        else:
            log.engine = event[1]

    def _count_as_lost(self, k: int, why: str) -> None:
        self._lost[k] = why
        self._logs[k].engine = {**self._logs[k].engine, "lost": why}

    def _lose(self, k: int, why: str) -> None:
        self._count_as_lost(k, why)
        self._orphans |= self._held[k]
        self._held[k] = set()
        _LOG.warning("replica %d died (%s); %d of its requests go elsewhere", k, why, len(self._orphans))
        busy = set(self._streams.values())
        for replica in range(len(self._actors)):
            if replica not in busy and replica not in self._lost:
                self._start(replica)

    def _start(self, k: int) -> None:
        """Give an idle replica a share of requests."""
        if k in self._lost:
            return
        planned, self._planned[k] = self._planned[k], None
        if not self._held[k]:
            if self._orphans:
                alive = len(self._actors) - len(self._lost)
                longest = sorted(self._orphans, key=lambda i: -int(self._decode_steps[i]))
                self._held[k] = set(longest[:: max(1, alive)])
                self._orphans -= self._held[k]
            elif self._way.backoff:
                self._held[k] = self._take_over(k)
        requests = sorted(self._held[k])
        if not requests:
            return
        share = np.array(requests, dtype=np.int64)
        self._heard[k] = time.monotonic()
        stream = (
            self._actors[k]
            .serve.options(num_returns="streaming")
            .remote(
                self._fleet.problem_of(k, share),
                planned,
                requests,
                [list(self._prompts[i]) for i in requests],
                self._most[share],
                self._way.policy_for(share),
            )
        )
        self._streams[stream] = k

    def _take_over(self, thief: int) -> set[int]:
        import ray

        donors = [k for k in set(self._streams.values()) if k != thief and k not in self._lost]
        donors.sort(key=lambda k: -sum(int(self._decode_steps[i]) for i in self._held[k]))
        for victim in donors:
            try:
                released = ray.get(self._actors[victim].release.remote(), timeout=LAST_WORD)
            except ray.exceptions.GetTimeoutError:
                self._unsure.add(victim)
                continue
            except ray.exceptions.RayActorError:
                continue  # Its stream reports the death, too.
            taken = set(released) - self._done
            self._held[victim] -= taken
            if taken:
                return taken
        return set()


def _why(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    reason = lines[-1].strip() if lines else ""
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__
