"""A configuration changed while it runs, once completions drift from the lengths it was chosen for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...data.arrays import IntArray
from ...data.configuration import PlannedConfiguration
from ...models.exegpt.length_drift import LengthDrift
from ..policy import State, Step
from .configured import dynamic_batch
from .round_robin import RoundRobinAllocation
from .workload_aware import WorkloadAwareAllocation

COHORT = 64
"""Requests after which lengths are looked at, in the order in which they joined."""

Replanning = Callable[[PlannedConfiguration, IntArray, IntArray], PlannedConfiguration | None]
"""Returns the configuration to change to, or None to keep it, from prompt tokens and decode iterations."""


class AdaptiveConfiguration:
    """
    Carries a configuration out, and changes it where completions drift (ExeGPT, section 7.6).

    The completions looked at are those of the first requests that joined, once all of these are done: the
    first to finish are the short ones, and would seem to drift whenever lengths vary. After a change, those
    that join from then on are compared with what it was chosen for.

    policy: Of the configuration.
    configuration: The one it begins with.
    replanning: Finds the next one.
    cohort: Requests looked at first; as many more each time they are as planned.
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
        """Return the policy's next step, of the configuration as it is now."""
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
        # A completion of one token, which its prefill gives, counts as one iteration: so do plans.
        iterations = np.maximum(1, state.decoded[requests])
        if not LengthDrift.of(self.configuration, iterations).drifted:
            self._next += self._cohort
            return
        tokens = state.problem.prompt_tokens[requests]
        changed = self._replanning(self.configuration, tokens, iterations)
        self._begin_anew()
        if changed is not None:
            self.configuration = changed
            self._policy.change(changed, dynamic_batch(changed))
            return
        # Kept, knowingly: what drifts from here on is new.
        self.configuration = replace(
            self.configuration,
            iterations=float(np.mean(iterations)),
            iterations_deviation=float(np.std(iterations)),
        )
