"""The interface between the execution loop and an engine, simulated or real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..data.trace import Stage


class Engine(Protocol):
    """Engine that prefills, decodes and keeps time; requests are positions in the workload.

    The engine decides when a request is done, and reports it to the loop.
    """

    @property
    def time(self) -> float:
        """Seconds after the job's start."""
        ...

    def prefill(self, requests: Sequence[int], slots: Sequence[int]) -> tuple[Stage, list[int]]:
        """Prefill requests together, each into its free slot.

        returns stage: The record of the stage.
        returns finished: Requests that are done, as they need no decode step.
        """
        ...

    def decode(self, decode_steps: int, until: float) -> tuple[Stage, list[int]]:
        """Run at most ``decode_steps`` decode steps over all occupied slots.

        Stops after the step in which a request finishes, and after the first that ends at or after ``until``
        seconds.

        returns stage: The record of the decode steps run, at least one.
        returns finished: Finished requests in the order of their slots, which are free now.
        """
        ...

    def evict(self, requests: Sequence[int]) -> None:
        """Free the slots of running requests; their tokens are kept for a later prefill."""
        ...

    def wait(self, until: float) -> None:
        """Let time pass until ``until`` seconds."""
        ...

    def describe(self) -> Mapping[str, object]:
        """Return the engine's name, model, device and versions."""
        ...
