"""Configurations that change once lengths drift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...data.arrays import IntArray
from ...data.configuration import PlannedConfiguration
from ...models.exegpt.length_drift import LengthDrift
from ..policy import State, Step
from .dynamic_batch import DynamicBatch
from .round_robin import RoundRobinAllocation
from .workload_aware import WorkloadAwareAllocation

COHORT = 64
"""Requests between two checks for drift; more react later."""

Replanning = Callable[[PlannedConfiguration, IntArray, IntArray], PlannedConfiguration | None]
"""Choice of a new configuration, or None, by prompts and decode iterations."""


class AdaptiveConfiguration:
    """Policy that changes its configuration when lengths drift (ExeGPT, section 7.6).

    A check covers the first requests that joined, once all of them are done. The first to finish would be a
    biased sample: they are the short ones. After a change, only later requests are compared with the new
    lengths.

    cohort: Requests of the first check; each check without drift doubles it.
    """

    def __init__(
        self,
        policy: RoundRobinAllocation | WorkloadAwareAllocation,
        configuration: PlannedConfiguration,
        replanning: Replanning,
        *,
        cohort: int = COHORT,
    ) -> None:
        self.configuration = configuration
        self._policy, self._replanning, self._cohort = policy, replanning, cohort
        self._begin_anew()

    def __call__(self, state: State) -> Step:
        """Return the next step of the present configuration."""
        self._finished.update(state.finished)
        while self._done < len(self._joined) and self._joined[self._done] in self._finished:
            self._done += 1
        if self._done >= self._next:
            self._compare(state, self._joined[: self._next])
        step = self._policy(state)
        self._joined += step.prefill
        return step

    def _begin_anew(self) -> None:
        self._joined: list[int] = []
        self._finished: set[int] = set()
        self._done, self._next = 0, self._cohort

    def _compare(self, state: State, requests: list[int]) -> None:
        # The prefill gives a one-token completion, which plans count as one iteration.
        iterations = np.maximum(1, state.decoded[requests])
        if not LengthDrift.of(self.configuration, iterations).drifted:
            self._next += self._cohort
            return
        tokens = state.problem.prompt_tokens[requests]
        changed = self._replanning(self.configuration, tokens, iterations)
        self._begin_anew()
        if changed is not None:
            self.configuration = changed
            self._policy.change(changed, DynamicBatch.of(changed))
            return
        # The configuration is kept on purpose: only later drift is new.
        self.configuration = replace(
            self.configuration,
            iterations=float(np.mean(iterations)),
            iterations_deviation=float(np.std(iterations)),
        )
