"""Full levels of longest requests, separated from the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....data.arrays import IntArray
from ....data.problem import Problem
from ....data.schedule import Schedule
from ....models.bounds.least_counts import cheapest_stages, cost_terms


@dataclass(frozen=True, slots=True, eq=False)
class LevelSplit:
    """Head of full levels, and the rest, with far fewer stages.

    A level holds a longest request in every slot.
    """

    problem: Problem
    levels: IntArray
    """Requests of each level, shape (levels, slots)."""
    rest: Problem
    """The problem without them."""
    others: IntArray
    """Requests of the rest, shape (requests of the rest,)."""

    @classmethod
    def of(cls, problem: Problem) -> LevelSplit:
        """Split a problem; the rest keeps a longest request."""
        longest = np.flatnonzero(problem.decode_steps == problem.decode_steps.max())
        levels = (len(longest) - 1) // problem.slots
        if levels < 1 or problem.prefill_token_cap is not None:
            none = np.empty((0, problem.slots), dtype=np.int64)
            return cls(problem, none, problem, np.arange(len(problem)))
        head = longest[: levels * problem.slots]
        others = np.setdiff1d(np.arange(len(problem)), head)
        rest = Problem(
            problem.workload.select(others),
            problem.cost,
            problem.slots,
            prefill_emits_first_token=problem.prefill_emits_first_token,
        )
        return cls(problem, head.reshape(levels, problem.slots), rest, others)

    def least_makespan(self, times: IntArray) -> float:
        """Return the least seconds for some stage times of the rest."""
        levels = len(self.levels)
        stages = cheapest_stages(self.problem, levels + len(times) - 1)
        decode_steps = levels * int(self.problem.decode_steps.max()) + int(times[-1])
        return sum(cost_terms(self.problem, stages, decode_steps).values())

    def schedule(self, bin_of: IntArray, decode_steps: IntArray) -> Schedule:
        """Return the whole problem's schedule for one of the rest."""
        levels = len(self.levels)
        bins = np.empty(len(self.problem), dtype=np.int64)
        bins[self.levels] = np.arange(levels)[:, None]
        bins[self.others] = bin_of + levels
        full = np.full(levels, self.problem.decode_steps.max())
        return Schedule.from_bins(self.problem, bins, np.concatenate((full, decode_steps)))
