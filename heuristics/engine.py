"""What the loop asks of an engine, simulated or real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..data.trace import Stage


class Engine(Protocol):
    """
    A few methods that prefill, decode and tell the time; requests are positions in the workload.

    An engine knows (or finds out) when a request is done; the loop only learns it.
    """

    @property
    def time(self) -> float:
        """Seconds after the job's start."""
        ...

    def prefill(self, requests: Sequence[int], slots: Sequence[int]) -> tuple[Stage, list[int]]:
        """
        Prefill requests together, each into its free slot.

        Returns stage: The record of the stage.
        Returns finished: The requests that are done already: they had no decode step to run.
        """
        ...

    def decode(self, decode_steps: int, until: float) -> tuple[Stage, list[int]]:
        """
        Decode at most ``decode_steps`` rounds over all occupied slots.

        Stops after the step in which a request finishes, and after the first step that ends at or after
        ``until`` seconds.

        Returns stage: The record of the decode steps run, at least one.
        Returns finished: The requests that are done, in the order of their slots; their slots are free.
        """
        ...

    def evict(self, requests: Sequence[int]) -> None:
        """Free the slots of running requests; their tokens are kept for a later prefill."""
        ...

    def wait(self, until: float) -> None:
        """Let time pass until ``until`` seconds."""
        ...

    def describe(self) -> Mapping[str, object]:
        """Return the engine's name and what it says about model, device and versions."""
        ...
