"""Requests that can be grouped (Figure 2), and what waits between prompt and completion holds (Figure 6)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping

import numpy as np
from setting import FORWARD
from study import Study

from batchbound.heuristics.serving.baselines import SyncCoupled
from batchbound.heuristics.serving.econoserve.paper import EconoServe
from batchbound.heuristics.serving.econoserve.sizes import EconoServeSizes
from batchbound.heuristics.serving.policy import ServingState
from batchbound.heuristics.serving.simulation import simulate_serving

GROUPED: Mapping[str, str] = {
    "alpaca": "20 % of groups have 12, 61 % of requests 4",
    "sharegpt": "23 % of groups have 12, 59 % of requests 4",
    "bookcorpus": "22 % of groups have 2",
}
"""Published in Figure 2's text, at least so many requests in a group."""
KINDS = ("new", "preempted", "chunked")


class WatchedGroups(SyncCoupled):
    """SyncCoupled, noting how many requests each group is admitted with."""

    def __init__(self, forward_size: int) -> None:
        super().__init__(forward_size)
        self.sizes: list[int] = []

    def _fill(self, state: ServingState) -> bool:
        before = set(self._members)
        ran_out = super()._fill(state)
        self.sizes += [size for group, size in self._members.items() if group not in before]
        return ran_out


class WatchedQueue(EconoServe):
    """EconoServe, noting the tokens that a completion holds as it is queued, and a prompt as it is cut."""

    def __init__(self, sizes: EconoServeSizes) -> None:
        super().__init__(sizes, ordered=False, lending=False)
        self.held: dict[str, list[int]] = {kind: [] for kind in KINDS}

    def _queue_answer(self, state: ServingState, request: int, length: int, *, again: bool) -> None:
        self.held["preempted" if again else "new"].append(int(state.held[request]))
        super()._queue_answer(state, request, length, again=again)

    def _chunk(self, state: ServingState, request: int, budget: int, prefill: list[tuple[int, int]]) -> int:
        left = super()._chunk(state, request, budget, prefill)
        if prefill[-1][1] < state.lacks(request):
            self.held["chunked"].append(int(state.held[request]) + prefill[-1][1])
        return left


def waiting(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Print both figures for each trace, at the rate asked for."""
    found: dict[str, object] = {}
    for name in options.traces:
        study = make(name)
        workload = study.workload(study.rate(options), options.minutes or study.trace.minutes)
        until = math.inf if options.drain else float(workload.arrival.max())
        predicted = study.predicted(workload)
        groups, queue = WatchedGroups(FORWARD), WatchedQueue(study.sizes)
        for policy in (groups, queue):
            simulate_serving(workload, policy, study.cost, study.capacity, predicted=predicted, until=until)
        sizes = np.array(groups.sizes)
        shares = {least: float((sizes >= least).mean()) for least in (2, 4, 12)}
        members = {least: float(sizes[sizes >= least].sum() / sizes.sum()) for least in (2, 4, 12)}
        print(f"{name}: {len(sizes)} groups of SyncCoupled | published: {GROUPED[name]}")
        for what, values in (("groups", shares), ("requests", members)):
            cells = ", ".join(f"{least}: {share:.0%}" for least, share in values.items())
            print(f"  {what} of at least {cells}")
        held = {kind: _spread(tokens, study.capacity) for kind, tokens in queue.held.items()}
        for kind, line in held.items():
            print(f"  {kind:9s} {line}", flush=True)
        found[name] = {"groups": shares, "requests": members, "held": queue.held}
    return found


def _spread(tokens: list[int], capacity: int) -> str:
    if not tokens:
        return "none"
    low, middle, high = np.quantile(tokens, (0.05, 0.5, 0.95))
    spread = f"{low:.0f} / {middle:.0f} / {high:.0f} tokens (5, 50, 95 %)"
    return f"{len(tokens)} times, {spread}, the median {middle / capacity:.2%} of the memory"
