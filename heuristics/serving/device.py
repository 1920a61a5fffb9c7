"""What carries out the iterations of a serving policy: a cost model's clock, or an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...data.arrays import IntArray
from ...data.costs.iteration_cost import MixedCost


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """
    What a device is to do next, checked by the referee.

    decodes: Requests that generate a token from their last one, shape (decodes,).
    prefill: Requests, each with how many tokens of its prompt (and of its completion, if computed anew) are
        computed.
    held: Tokens of keys and values each request has on the device when the iteration is done, shape
        (requests,).
    swap_out, swap_in: Requests that go to the host's memory, or come back, before it begins.
    swapped: Tokens of both.
    drawn: Requests whose next token is drawn at the end.
    """

    decodes: IntArray
    prefill: Sequence[tuple[int, int]]
    held: IntArray
    swap_out: Sequence[int] = ()
    swap_in: Sequence[int] = ()
    swapped: int = 0
    drawn: int = 0


class ServingDevice(Protocol):
    """Carries iterations out."""

    def run(self, work: DeviceBatch) -> float:
        """Return the seconds it took."""
        ...


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """Takes the time that the cost model of an iteration says."""

    cost: MixedCost

    def run(self, work: DeviceBatch) -> float:
        """Return the seconds the iteration would take."""
        prompt_tokens = sum(new for _, new in work.prefill)
        # new * (new + 2 * held before)
        pairs = sum(new * (2 * int(work.held[request]) - new) for request, new in work.prefill)
        kv_tokens = int(work.held[work.decodes].sum())
        seconds = self.cost.seconds(len(work.decodes), kv_tokens, prompt_tokens, pairs)
        return seconds + self.cost.swap_per_token * work.swapped
