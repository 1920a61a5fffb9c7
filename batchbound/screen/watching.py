"""Progress of a run, its watchdog, and what is said when it stops."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..data.files.disk import WriteError
from ..data.plan import Plan
from ..data.readers.completions import ending_of
from ..options.run import JobOptions
from .interrupts import terminating
from .progress import plan_progress, progress
from .terminal import INTERRUPTED, note, warn

if TYPE_CHECKING:
    from ..data.trace import Stage
    from ..executor.jobs.journal import Journal
    from ..executor.jobs.plan_clock import Follower


class Watch:
    """Watcher of one run, which knows the journals of its completions."""

    def __init__(self, options: JobOptions) -> None:
        self._options = options
        self._running: list[Journal] = []

    @contextmanager
    def on_model(self, plan: Plan, journal: Journal) -> Iterator[Callable[[Stage, int], None]]:
        """Show progress, and end the process if a stage hangs."""
        self._running.append(journal)
        _say_kept(journal, self._options.answers, "completion")
        with _watched(plan, journal, self._options.stalled) as on_stage:
            yield on_stage

    @contextmanager
    def on_servers(self, left: int, journal: Journal) -> Iterator[Callable[[int], None]]:
        """Show progress by requests."""
        self._running.append(journal)
        lines = journal.finished.lines(journal.finished)
        failed = sum(ending_of(line) in ("failed", "expired") for line in lines)
        _say_kept(journal, self._options.answers, "request", failed)
        with progress(left, "requests") as advance:
            yield advance

    def status_of(self, run: Callable[[], int]) -> int:
        """Return the exit status of a run; say why it stopped, and what it finished."""
        from ..executor.models.faults import RunStoppedError, TerminatedError

        running = self._running
        try:
            # Up to the end of the run, as it also writes the outputs.
            with terminating():
                return run()
        except (RunStoppedError, TerminatedError) as error:
            _say_stopped(str(error), running)
            return 1
        except WriteError as error:
            if not running:
                raise
            _say_stopped(str(error), running)
            return 1
        except KeyboardInterrupt:
            if not running:
                raise
            _say_stopped("interrupted", running)
            return INTERRUPTED


@contextmanager
def _watched(plan: Plan, journal: Journal, seconds: float) -> Iterator[Callable[[Stage, int], None]]:
    """Yield a callback that updates progress and the watchdog."""
    from ..executor.jobs.plan_clock import Follower
    from ..executor.jobs.watchdog import Watchdog

    with (
        Watchdog(seconds, lambda: _abandon(journal, seconds)) as watchdog,
        _progress(plan, journal) as on_progress,
    ):

        def on_stage(stage: Stage, done: int) -> None:
            watchdog.alive()
            on_progress(stage, done)

        def on_part(part: Stage, done: int) -> None:
            watchdog.alive()
            on_progress.on_part(part, done)

        yield Follower(on_stage, on_progress.on_begin, on_part)


@contextmanager
def _progress(plan: Plan, journal: Journal) -> Iterator[Follower]:
    """Yield a callback for progress: by the plan, or by requests."""
    from ..executor.jobs.plan_clock import Follower, PlanClock

    names = plan.workload.ids.tolist()
    left = [i for i, name in enumerate(names) if name not in journal.finished]
    if len(plan.fleet.replicas) > 1 or not left:
        with progress(len(left), "requests") as count:
            yield Follower(lambda _, done: count(done), lambda _: None)
        return
    bound = None if plan.claim is None else plan.claim.seconds
    position = {name: i for i, name in enumerate(names)}
    reported = len(journal.finished)

    def ended() -> Iterator[tuple[int, int]]:
        nonlocal reported
        new = list(journal.finished.latest(len(journal.finished) - reported))
        reported = len(journal.finished)
        return ((position[name], _tokens(row)) for name, row in new)

    clock = PlanClock(plan.problem, plan.schedule, left, bound, ended, unknown=plan.lengths_unknown)
    named = set[int]()
    with plan_progress(clock.begin) as advance:

        def on_part(part: Stage, done: int) -> None:
            advance(clock.during(part, done))
            if plan.lengths_unknown:
                long = [request for request in clock.passing(LONG, part) if request not in named]
                named.update(long)
                _note_long([names[request] for request in long])

        yield Follower(lambda stage, done: advance(clock.after(stage, done)), clock.begun, on_part)


LONG = 2_000
"""Tokens of a completion of unknown length from which it is named."""


def _note_long(names: Sequence[str]) -> None:
    if names:
        more = "" if len(names) <= 3 else f" and {len(names) - 3:,} others"
        hint = "Ctrl-C, and the same command with --longest-completion N, limits them"
        note(f"{', '.join(names[:3])}{more} passed {LONG:,} tokens; {hint}")


def _tokens(row: Mapping[str, Any]) -> int:
    from ..executor.jobs.length_estimator import UNKNOWN

    body = (row.get("response") or {}).get("body") or {}
    return int(body.get("usage", {}).get("completion_tokens", UNKNOWN))


def _say_stopped(reason: str, running: Sequence[Journal]) -> None:
    """Print why a run stopped and how much it finished."""
    warn(f"stopped: {reason}")
    kept = [journal for journal in running if journal.finished]
    for journal in kept:
        warn(f"{len(journal.finished)} finished completions are in {journal.path}; the same command resumes")
    if not running:
        warn("it had not begun; the same command starts it")
    elif not kept:
        warn("no completion was finished")


def _abandon(journal: Journal, seconds: float) -> None:
    """End the process of a hanging call; completions are on disk."""
    _say_stopped(f"no stage ended for {seconds:g} s, a device call may hang (see --stall-seconds)", [journal])
    os._exit(1)


def _say_kept(journal: Journal, output: str, what: str, failed: int = 0) -> None:
    """Print how much an earlier run finished, and damaged lines."""
    if journal.finished:
        count = len(journal.finished) - failed
        errors = f" and {failed:,} failed" if failed else ""
        note(f"{output}: continuing after {count:,} finished {what}{'' if count == 1 else 's'}{errors}")
    if journal.dropped:
        lines = ", ".join(map(str, journal.dropped[:10])) + (" ..." if len(journal.dropped) > 10 else "")
        warn(f"{journal.path}: damaged in line {lines}; their requests run again")
