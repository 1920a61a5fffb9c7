"""Record of an instance replayed on a server with forced lengths."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arrays import FloatArray, IntArray
from ..bound import gap_above
from ..files.disk import InputError, read_json_object, write_json
from ..files.kinds import refuse_other_kinds
from ..files.record import plain, record
from ..iteration_plan import IterationPlan
from ..plan import drop_defaults
from ..schedule import Violation
from .server_run import ServerCount

KIND = "batchbound_replay"


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """Run of a plan's requests on a server, each with its planned length.

    Parameters
    ----------
    plan
        Instance: requests, limits, sending order, simulation and bounds.
    server
        Counters of the server.
    sent, finished
        Start and end of each request, seconds after the first was sent, shape (completions,).
    prompt_tokens, completion_tokens
        Tokens by the server's count, shape (completions,).
    read_at, read_iterations
        Readings of the server's counter of iterations: seconds, and iterations since the start, shape
        (readings,). Empty for a server without the counter.
    """

    JSON_HEADER: ClassVar = (KIND, 1)
    JSON_HINT: ClassVar = "Replay it again."

    plan: IterationPlan
    server: ServerCount
    sent: FloatArray
    finished: FloatArray
    prompt_tokens: IntArray
    completion_tokens: IntArray
    read_at: FloatArray
    read_iterations: IntArray

    @property
    def iterations(self) -> int | None:
        """Iterations of the server; None if it does not count them."""
        return int(self.read_iterations[-1]) if len(self.read_iterations) else None

    @property
    def ended(self) -> FloatArray | None:
        """Iterations up to each end, interpolated between readings, shape (completions,)."""
        if not len(self.read_iterations):
            return None
        return np.interp(self.finished, self.read_at, self.read_iterations)

    @property
    def value(self) -> float | None:
        """Value of the plan's aim in iterations; of the makespan without one."""
        ended = self.ended
        if ended is None or self.plan.aim is None:
            return self.iterations
        return self.plan.aim.goal.value(ended)

    @property
    def simulated(self) -> int | None:
        """The same in the simulation."""
        return self.plan.iterations if self.plan.aim is None else self.plan.value

    @property
    def least(self) -> int:
        """Its bound."""
        return self.plan.bound.iterations if self.plan.aim is None else self.plan.aim.bound.value

    @property
    def error(self) -> float | None:
        """Excess of the run over the simulation, as a fraction."""
        return gap_above(self.value, self.simulated)

    def check(self) -> Violation | None:
        """Return what contradicts a replay of the plan, or None."""
        count, work = len(self.plan.workload), self.plan.workload
        columns = (self.sent, self.finished, self.prompt_tokens, self.completion_tokens)
        if any(column.shape != (count,) for column in columns):
            return Violation("each request is replayed once", f"there are not {count} entries in each column")
        if (wrong := np.flatnonzero(self.completion_tokens != work.output_tokens)).size:
            name, k = str(work.ids[wrong[0]]), int(wrong[0])
            what = f"{name!r} has {self.completion_tokens[k]} tokens, planned are {work.output_tokens[k]}"
            return Violation("lengths are forced", what)
        stated = self.prompt_tokens > 0
        if (self.prompt_tokens != work.input_tokens)[stated].any():
            return Violation("prompts are the plan's", "the server counts other tokens")
        if not (
            np.isfinite(self.finished).all() and (self.sent >= 0).all() and (self.finished > self.sent).all()
        ):
            return Violation("times are in order", "a request ends before it is sent")
        if self.read_at.shape != self.read_iterations.shape or (np.diff(self.read_at) < 0).any():
            return Violation("readings are in order", "the seconds of readings fall")
        if (np.diff(self.read_iterations) < 0).any():
            return Violation("readings are in order", "the counted iterations fall")
        iterations = self.iterations
        if iterations is not None and iterations < self.plan.bound.iterations:
            what = f"{iterations} iterations are below the bound of {self.plan.bound.iterations}"
            return Violation("the bound holds", f"{what}: an assumption is broken")
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the replay to ``path`` atomically."""
        value: dict[str, Any] = plain(self)
        drop_defaults(value["plan"]["workload"], value["plan"]["maker"])
        value["plan"] = {name: entry for name, entry in value["plan"].items() if entry is not None}
        write_json(path, value)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Replayed:
        """Load a replay that :meth:`save` wrote; raise InputError if it is none, or inconsistent."""
        refuse_other_kinds(path, "no replay", {KIND})
        replayed = record(cls, read_json_object(path), file=path)
        violation = replayed.plan.check() or replayed.check()
        if violation is not None:
            raise InputError(f"the replay contradicts itself: {violation}", file=path, hint=cls.JSON_HINT)
        return replayed
