"""Result of an exact search, with its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...data.bound import Bound
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...models.bounds.least_counts import cost_terms
from ..result import StoppedBy

Argument = Literal["states", "orders"]
"""States: every stage from every state. Orders: every order from the end."""

REPEATABLE_STEPS = {"states": 400_000, "orders": 0}
"""Most steps of a proof that a checker can repeat in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class ExactOutcome:
    """Result of an exact search."""

    schedule: Schedule
    stopped_by: StoppedBy
    """``PROOF`` if optimal, ``FINISHED`` if too large, else the limit."""
    steps: int
    """Steps of the search, the unit of ``Limits.work``."""
    argument: Argument
    """Argument with which a checker repeats the search."""

    def bound(self, problem: Problem) -> Bound | None:
        """Return the optimum as a bound, or None without a proof.

        Its certificate is of kind ``solver`` where a check by plain code would take too long.
        """
        if self.stopped_by is not StoppedBy.PROOF:
            return None
        terms = _terms(problem, self.schedule)
        repeatable = self.steps <= REPEATABLE_STEPS[self.argument]
        certificate: dict[str, object] = {"kind": "states"}
        if not repeatable:
            certificate = {"kind": "solver", "solver": "exact"}
        return Bound(sum(terms.values()), "exhaustive search", terms, certificate)


def _terms(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """Return a schedule's seconds by the names of :func:`cost_terms`."""
    cost, tokens = problem.cost, schedule.stage_tokens(problem)
    tokens = tokens[np.bincount(schedule.bin_of, minlength=schedule.bins) > 0]
    terms = cost_terms(problem, len(tokens), int(schedule.decode_steps.sum()))
    beyond = cost.prefill_per_token_beyond * np.maximum(0.0, tokens - cost.prefill_bend)
    inside = cost.prefill_base + cost.prefill_per_token * tokens + beyond
    prefill = {
        "stages beyond the bend": float(beyond.sum()),
        "prefill floor": float(np.maximum(0.0, cost.prefill_floor - inside).sum()),
    }
    return {**{name: term for name, term in terms.items() if name != "prompts beyond the bend"}, **prefill}
