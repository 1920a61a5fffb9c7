"""When to start a prefill stage: now, or after how many more decode steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from ...data.problem import Problem
from ..policy import UNTIL_CHANGE, State


def bearable_idle(problem: Problem, patience: float) -> float:
    """
    Return the slot-steps that slots may idle before a prefill stage starts, by the rule of ski rental.

    An idle slot-step is priced at its share ``decode_base / slots`` of a decode step, so that as many cost
    ``patience`` times what opening a stage costs. Infinite where decode steps cost nothing.

    problem: Its costs and slots are read.
    patience: Stage openings' worth of idle slot-steps to wait for (theta); 0 never waits.
    """
    cost = problem.cost
    if patience == 0:
        return 0.0
    if cost.decode_base == 0:
        return math.inf
    return patience * max(cost.prefill_base, cost.prefill_floor) * problem.slots / cost.decode_base


def steps_to_wait(bearable: float, idle: float, joining: int) -> int:
    """
    Return the decode steps after which slots have idled as long as the rule of ski rental bears.

    bearable: Slot-rounds that may idle (:func:`bearable_idle`).
    idle: Slot-rounds idled so far.
    joining: Requests that would be prefilled, each of which idles a slot until then; at least one.
    """
    return UNTIL_CHANGE if math.isinf(bearable) else max(0, math.ceil((bearable - idle) / joining))


@dataclass(frozen=True, slots=True)
class Opportunity:
    """
    The prefill stage that could start now.

    joining: Waiting requests it would prefill; at least one.
    tokens: Tokens it would prefill.
    unstarted: Requests that wait or have yet to arrive, those joining among them.
    idle: Slot-rounds that slots with a request to take have idled since the last prefill stage.
    full: Whether the stage is as large as the token cap allows.
    decoded: Tokens of all slots since the last prefill stage.
    running: Slots that decode.
    """

    joining: int
    tokens: int
    unstarted: int
    idle: int
    full: bool = False
    decoded: int = 0
    running: int = 0

    @classmethod
    def of(
        cls, state: State, requests: Sequence[int], idle: int, full: bool, decoded: int = 0
    ) -> Opportunity:
        """Return the stage that would prefill some of the requests that wait."""
        chosen = np.asarray(requests, dtype=np.int64)
        tokens = int((state.problem.prompt_tokens[chosen] + state.decoded[chosen]).sum())
        unstarted = state.unarrived + int(np.count_nonzero(state.waiting))
        return cls(len(chosen), tokens, unstarted, idle, full, decoded, len(state.running))


class PrefillRule(Protocol):
    """Decides between prefill and decode; asked while something runs and a request has a slot to take."""

    def __call__(self, problem: Problem, opportunity: Opportunity) -> int:
        """Return the decode steps to run before the stage starts: 0 to start it now."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Never waits: vLLM's rule, and the baseline of the hybrid offline-online paper."""

    def __call__(self, problem: Problem, opportunity: Opportunity) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True, slots=True)
class SkiRental:
    """
    Waits until the idle slot-steps have cost a share of what opening a stage costs.

    An idle slot-step is priced at its share ``decode_base / slots`` of a step. The prompts' tokens have
    to be prefilled anyway, so their cost does not count: renting or buying, as in ski rental, where either
    choice is paid for at most twice. A full stage never waits, nor one of the last requests: none could join.

    patience: Stage openings' worth of idle slot-steps to wait for (theta).
    """

    patience: float = 0.5

    def __call__(self, problem: Problem, opportunity: Opportunity) -> int:
        """Return the decode steps until the idle slot-steps reach their price."""
        if opportunity.full or opportunity.joining == opportunity.unstarted:
            return 0
        return steps_to_wait(bearable_idle(problem, self.patience), opportunity.idle, opportunity.joining)


@dataclass(frozen=True, slots=True)
class Lagrangian:
    r"""
    Waits until the waited decode time exceeds the stage's cost: the hybrid paper's rule (41)-(43).

    The paper compares :math:`C_p = \sum_l T^p_l`, all of the stage with its tokens, to "the waited decode
    time" :math:`C_d = T^d \sum N^d_i w_{ijk}` and goes on decoding while :math:`C_p \ge C_d`. Which tokens
    the sum covers is not said; here they are the slot-steps idled since the last stage, or in the most
    literal reading all that were decoded since.

    reading: What :math:`T^d` is: ``"decode_step"``, a slot's share of a decode step with every slot active,
        as in (8); or ``"token"``, the time per token of Table III, which leaves out the base of a decode
        step. ``"literal"`` is ``"token"``, over all tokens decoded since the last stage.
    """

    reading: Literal["decode_step", "token", "literal"] = "decode_step"

    def __call__(self, problem: Problem, opportunity: Opportunity) -> int:
        """Return the decode steps until the waited decode time exceeds the stage's cost."""
        stage = float(problem.cost.prefill_seconds(opportunity.tokens))
        price = problem.cost.decode_per_slot
        if self.reading == "decode_step":
            price += problem.cost.decode_base / problem.slots
        if stage >= price * UNTIL_CHANGE:
            return UNTIL_CHANGE
        so_far, a_step = opportunity.idle, opportunity.joining
        if self.reading == "literal":
            so_far, a_step = opportunity.decoded, opportunity.running
        waited = math.floor((stage / price - so_far) / a_step) + 1
        return max(0, waited)


@dataclass(frozen=True, slots=True)
class Threshold:
    """
    Waits until enough requests have a free slot to take.

    share: Enough, as a share of the slots; of fewer waiting requests than that, all of them.
    count: Enough, as a number of requests; whichever of the two is reached first.
    """

    share: float = 1.0
    count: int | None = None

    def __call__(self, problem: Problem, opportunity: Opportunity) -> int:
        """Return 0 once there are enough, else wait for the next change."""
        enough = min(math.ceil(self.share * problem.slots), opportunity.unstarted)
        if self.count is not None:
            enough = min(enough, self.count)
        return 0 if opportunity.full or opportunity.joining >= enough else UNTIL_CHANGE
