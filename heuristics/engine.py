"""Interface between the execution loop and an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..data.trace import Stage


class Engine(Protocol):
    """Engine that prefills, decodes and keeps time.

    Requests are positions in the workload. The engine reports to the loop when one is done.
    """

    @property
    def time(self) -> float:
        """Seconds after the job's start."""
        ...

    def prefill(self, requests: Sequence[int], slots: Sequence[int]) -> tuple[Stage, list[int]]:
        """Prefill requests together; return the stage and finished requests.

        Each goes into its free slot. Requests without decode steps are finished at once.
        """
        ...

    def decode(self, decode_steps: int, until: float) -> tuple[Stage, list[int]]:
        """Run at most ``decode_steps`` decode steps over all occupied slots.

        It stops after the step in which a request finishes, and after the first that ends at or after
        ``until`` seconds. The result is the stage, with one decode step at least, and the finished requests
        in the order of their slots, which are free now.
        """
        ...

    def evict(self, requests: Sequence[int]) -> None:
        """Free the slots of running requests, but keep their tokens."""
        ...

    def wait(self, until: float) -> None:
        """Wait until some seconds after the job's start."""
        ...

    def describe(self) -> Mapping[str, object]:
        """Return the engine's name, model, device and versions."""
        ...
