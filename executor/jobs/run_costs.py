"""Costs of a run's own stages, for its prefill rule."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...data.arrays import FloatArray
from ...data.costs.cost import CostModel
from ...data.trace import Stage


@dataclass(slots=True)
class RunCosts:
    """Cost model of a run, fitted to its stages as it runs.

    stated: Costs to use before enough stages ran. With None opening a stage is free, so no prefill waits.
    least_stages: Prefill stages before the first fit; larger waits for a better fit.
    most_stages: Number of latest prefill stages in a fit; larger smooths noise and reacts later.
    growth: Share of new prefill stages that triggers a fit; larger saves time.
    least_base: Least fixed share of the longest decode step; larger waits less for prefill.
    """

    stated: CostModel | None
    least_stages: int = 6
    most_stages: int = 48
    growth: float = 0.25
    least_base: float = 0.25
    _prefills: list[tuple[float, float]] = field(default_factory=list)
    _steps: dict[int, list[float]] = field(default_factory=dict)
    _now: CostModel = field(default_factory=lambda: CostModel(0.0, 0.0, 1.0, 0.0))
    _due: int = 0

    def __post_init__(self) -> None:
        self._due, self._now = self.least_stages, self.stated or self._now

    def ran(self, stage: Stage) -> None:
        """Note a stage."""
        if stage.kind == "prefill":
            self._prefills.append((float(stage.tokens), stage.seconds))
        elif stage.decode_steps:
            self._steps.setdefault(stage.active, []).append(stage.seconds / stage.decode_steps)

    @property
    def cost(self) -> CostModel:
        """Best costs known now."""
        if len(self._prefills) >= self._due and self._steps:
            self._due = int(len(self._prefills) * (1 + self.growth)) + 1
            self._now = self._fit()
        return self._now

    def _fit(self) -> CostModel:
        # The first stage is the largest, so it separates the cost of a token from that of a stage. It also
        # warms the engine up; a stage then seems cheaper to open than it is, and prefill waits less.
        tokens, seconds = np.array([self._prefills[0], *self._prefills[1:][-self.most_stages :]]).T
        base, per_token = _line(tokens, seconds)
        active = np.array(sorted(self._steps), dtype=np.float64)
        step = np.array([float(np.median(self._steps[int(rows)])) for rows in active])
        decode_base, per_slot = _line(active, step) if len(active) > 1 else (float(step[-1]), 0.0)
        return CostModel(base, per_token, max(decode_base, self.least_base * float(step.max())), per_slot)


def _line(sizes: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """Fit a non-negative line by the weighted median of slopes."""
    first, second = np.triu_indices(len(sizes), 1)
    apart = sizes[first] != sizes[second]
    if not apart.any():
        return 0.0, float(np.median(seconds / sizes))
    first, second = first[apart], second[apart]
    distance = sizes[second] - sizes[first]
    slopes = (seconds[second] - seconds[first]) / distance
    order = np.argsort(slopes)
    below = np.cumsum(np.abs(distance)[order])
    slope = max(0.0, float(slopes[order[np.searchsorted(below, below[-1] / 2)]]))
    return max(0.0, float(np.median(seconds - slope * sizes))), slope
