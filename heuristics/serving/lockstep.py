"""Replicas in step, as they share their experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .device import DeviceBatch
from .simulation import ServingError, ServingJob, ServingRun


class GroupDevice(Protocol):
    """Device that runs one iteration of several replicas at once."""

    def run(self, work: Sequence[DeviceBatch]) -> float:
        """Return an iteration's seconds; idle replicas have no batch."""
        ...


def serve_in_step(jobs: Sequence[ServingJob], device: GroupDevice) -> list[ServingRun]:
    """Serve replicas in lockstep at the pace of the slowest.

    A replica without requests waits for its next arrival and joins the first iteration that begins after it.
    Raises ServingError as :func:`.serve_on_device` does.

    jobs: One per replica, each with its own requests, policy and ledger, not yet begun.
    """
    steps = [job.iterations() for job in jobs]
    waiting = {at: next(step, None) for at, step in enumerate(steps)}
    begun = 0.0
    while ready := {at: ask for at, ask in waiting.items() if ask is not None}:
        begun = max(begun, min(start for start, _ in ready.values()))
        joined = {at: ask for at, ask in ready.items() if ask[0] <= begun}
        seconds = device.run([work for _, work in joined.values()])
        if not seconds >= 0:
            raise ServingError(f"an iteration of {len(joined)} replicas took {seconds} s")
        for at, (start, _) in joined.items():
            try:
                waiting[at] = steps[at].send(begun - start + seconds)
            except StopIteration:
                waiting[at] = None
        begun += seconds
    return [job.result() for job in jobs]
