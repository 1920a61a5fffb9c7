"""Rules that start a prefill stage now or later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from ...data.costs.cost import CostModel
from ...data.problem import Problem
from ..policy import UNTIL_CHANGE, State


def bearable_idle(problem: Problem, patience: float) -> float:
    """Return the slot-steps that may idle before a stage.

    An idle slot-step costs its share ``decode_base / slots`` of a decode step. The limit costs ``patience``
    times as much as opening a stage; it is infinite if decode steps cost nothing.

    patience: Threshold in stage openings' worth of idle slot-steps (theta); 0 never waits.
    """
    cost = problem.cost
    if patience == 0:
        return 0.0
    if cost.decode_base == 0:
        return math.inf
    return patience * max(cost.prefill_base, cost.prefill_floor) * problem.slots / cost.decode_base


def steps_to_wait(bearable: float, idle: float, joining: int) -> int:
    """Return the decode steps until idle slots reach the limit.

    bearable: Slot-steps that may idle (:func:`bearable_idle`).
    idle: Slot-steps idled so far.
    joining: Requests that would be prefilled, at least one; each idles a slot until then.
    """
    return UNTIL_CHANGE if math.isinf(bearable) else max(0, math.ceil((bearable - idle) / joining))


@dataclass(frozen=True, slots=True)
class Opportunity:
    """Prefill stage that could start now.

    joining: Waiting requests it would prefill; at least one.
    tokens: Tokens it would prefill.
    unstarted: Requests that wait or have not arrived, including those joining.
    idle: Slot-steps idled since the last prefill stage by slots that had a request to take.
    full: True if the stage is as large as the token cap allows.
    decoded: Tokens of all slots since the last prefill stage.
    running: Slots that decode.
    pace: Requests finished per decode step so far.
    """

    joining: int
    tokens: int
    unstarted: int
    idle: int
    full: bool = False
    decoded: int = 0
    running: int = 0
    pace: float = 0.0

    @classmethod
    def of(
        cls, state: State, requests: Sequence[int], idle: int, full: bool, decoded: int = 0
    ) -> Opportunity:
        """Return the stage that would prefill some waiting requests."""
        chosen = np.asarray(requests, dtype=np.int64)
        tokens = int((state.problem.prompt_tokens[chosen] + state.decoded[chosen]).sum())
        unstarted = state.unarrived + int(np.count_nonzero(state.waiting))
        running = len(state.running)
        finished = len(state.problem) - unstarted - running
        pace = finished / state.steps_done if state.steps_done else 0.0
        return cls(len(chosen), tokens, unstarted, idle, full, decoded, running, pace)

    def saving(self, cost: CostModel) -> float:
        """Return the seconds that one more request saves here.

        The alternative is a stage of its own.
        """
        if not cost.prefill_floor and not cost.prefill_bend:
            return cost.prefill_base
        # A floor is saved only as far as the prompts are below it.
        stages = -(-self.tokens // self.joining)
        apart = cost.prefill_seconds(self.tokens) + cost.prefill_seconds(stages)
        return max(0.0, float(apart - cost.prefill_seconds(self.tokens + stages)))


class PrefillRule(Protocol):
    """Choice between prefill and decode, while both are possible."""

    def __call__(self, problem: Problem, opportunity: Opportunity) -> int:
        """Return the decode steps before the stage; 0 starts it."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Rule without waiting, as vLLM's.

    It is the baseline of the hybrid offline-online paper.
    """

    def __call__(self, problem: Problem, opportunity: Opportunity) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True, slots=True)
class SkiRental:
    """Rule that waits until idle slots cost as much as a stage.

    An idle slot-step costs its share ``decode_base / slots`` of a step. The prompts' tokens do not count, as
    they are prefilled anyway. As in ski rental, the rule pays at most twice the better choice. A full stage
    and one of the last requests never wait, as no request could join.

    patience: Threshold in stage openings' worth of idle slot-steps (theta).
    """

    patience: float = 0.5

    def __call__(self, problem: Problem, opportunity: Opportunity) -> int:
        """Return the decode steps until idle slots reach the threshold."""
        if opportunity.full or opportunity.joining == opportunity.unstarted:
            return 0
        price, saving = problem.cost.decode_base, opportunity.saving(problem.cost)
        if self.patience == 0 or not saving:
            return 0
        bearable = self.patience * saving * problem.slots / price if price else math.inf
        return steps_to_wait(bearable, opportunity.idle, opportunity.joining)


@dataclass(frozen=True, slots=True)
class PacedSkiRental:
    """Rule that waits only while requests finish fast enough.

    One more request in a stage saves what a stage of its own would cost more. Until it joins, the free slots
    idle for ``1 / pace`` decode steps. With expensive steps or rare completions the rule never waits, as
    first come, first served. With cheap steps it waits like the ski-rental rule.

    patience: Most idle slot-steps, as a multiple of that saving.
    caution: Share of the saving that counts; smaller waits less often.
    """

    patience: float = 1.0
    caution: float = 0.7

    def __call__(self, problem: Problem, opportunity: Opportunity) -> int:
        """Return the decode steps until idle slots cost the saving."""
        joining = opportunity.joining
        if opportunity.full or joining == opportunity.unstarted or not opportunity.pace:
            return 0
        saved, idle_slot = opportunity.saving(problem.cost), problem.cost.decode_base / problem.slots
        if not saved:
            return 0
        worth = saved / idle_slot if idle_slot else math.inf
        return self.steps(joining, opportunity.idle, opportunity.pace, worth)

    def steps(self, joining: int, idle: float, pace: float, worth: float) -> int:
        """Return the decode steps before the stage; 0 starts it.

        worth: Idle slot-steps that cost as much as opening a stage.
        """
        # Average cost of an opening for each request: least where n (n + 1) = 2 pace worth.
        if joining * (joining + 1) >= 2 * self.caution * pace * worth:
            return 0
        return steps_to_wait(self.patience * worth, idle, joining)


@dataclass(frozen=True, slots=True)
class Lagrangian:
    r"""Rule that waits by the hybrid paper's (41)-(43).

    The paper compares :math:`C_p = \sum_l T^p_l`, the whole stage with its tokens, with "the waited decode
    time" :math:`C_d = T^d \sum N^d_i w_{ijk}`, and decodes while :math:`C_p \ge C_d`. It does not define
    which tokens the sum covers. Here they are the slot-steps idled since the last stage, or in the most
    literal reading all tokens decoded since.

    reading: The meaning of :math:`T^d`. ``"decode_step"`` is a slot's share of a decode step with every slot
        active, as in (8). ``"token"`` is the time per token of Table III, without the base of a decode step.
        ``"literal"`` is ``"token"``, over all tokens decoded since the last stage.
    """

    reading: Literal["decode_step", "token", "literal"] = "decode_step"

    def __call__(self, problem: Problem, opportunity: Opportunity) -> int:
        """Return the decode steps until waiting exceeds the stage's cost."""
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
    """Rule that waits until enough requests have a free slot.

    share: Requests that are enough, as a share of the slots; all remaining ones if these are fewer.
    count: Requests that are enough, if fewer than by ``share``; None for no such number.
    """

    share: float = 1.0
    count: int | None = None

    def __call__(self, problem: Problem, opportunity: Opportunity) -> int:
        """Return 0 for enough requests, else wait for a change."""
        enough = min(math.ceil(self.share * problem.slots), opportunity.unstarted)
        if self.count is not None:
            enough = min(enough, self.count)
        return 0 if opportunity.full or opportunity.joining >= enough else UNTIL_CHANGE
