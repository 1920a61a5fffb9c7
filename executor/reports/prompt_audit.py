"""Audit of a server's prompt tokens: computed, needed, and computed again after eviction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...data.costs.iteration_rates import IterationRates
from ...data.iterations import EngineLimits, Predicted
from ...data.prefix_tree import PrefixTree
from ...data.readers.server_run import ServerRun
from ...heuristics.prefixes.choice import UNKNOWN_RATES, Forecast, Outlook, Scenario, choose
from ...heuristics.prefixes.engine import CachedRun
from ...heuristics.prefixes.orders import FILE_ORDER, LONGEST_FIRST, baseline_orders, tree_orders
from .cache_picture import CachePicture, SentOrder

SENT = "as sent"

_MOST = 2_000_000
"""Requests over all orders that are simulated for an audit."""

_AGAIN = 0.02
"""Share of the needed prompt tokens above which prompts count as computed again."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptAudit:
    """Prompt tokens of a run, and its simulations on the same prefix cache.

    computed: Prompt tokens that the server computed, by its counter of cached ones; None without one, and
        after a retry. Those computed again after a preemption are not in it.
    needed: Prompt tokens that a cold engine computes at least.
    runs: Simulated runs: ``as sent``, ``file order`` and ``longest first``, which stands for the best order
        found with these lengths; empty if the job is too large or the server's memory unknown.
    limits: Limits of the engine in the simulation.
    """

    computed: int | None
    needed: int
    runs: Mapping[str, CachedRun]
    limits: EngineLimits

    @property
    def again(self) -> int | None:
        """Prompt tokens computed again; None if unknown."""
        return None if self.computed is None else max(0, self.computed - self.needed)

    @property
    def order_recomputes(self) -> bool:
        """True if the order as sent computes more prompt tokens than the best one."""
        if not self.runs:
            return False
        best = self.runs[LONGEST_FIRST].prompt_tokens
        return self.runs[SENT].prompt_tokens > (1 + _AGAIN) * best

    @property
    def predicted(self) -> dict[str, Predicted]:
        """The simulated runs, as other simulations give them."""
        return {
            name: Predicted(run.iterations, run.preemptions, run.prompt_tokens + run.decodes)
            for name, run in self.runs.items()
        }


def audit_prompts(
    run: ServerRun, limits: EngineLimits, rates: IterationRates | None = None
) -> PromptAudit | None:
    """Compare a run's prompt tokens with the tree of its prompts; None if they share nothing.

    rates: Costs by which the best order is chosen; by default usual ones.
    """
    if run.tree is None or not len(run.tree.parent):
        return None
    done = np.flatnonzero(run.failed == 0)
    tree = run.tree if len(done) == len(run) else run.tree.select(done)
    cached = [server.cached_tokens for server in run.servers]
    known = [tokens for tokens in cached if tokens is not None]
    computed = None
    if known and len(known) == len(cached) and not run.retries:
        computed = int(run.prompt_tokens[done].sum()) - sum(known)
    cold, _ = tree.reused(run.completion_tokens[done])
    needed = int((tree.prompt_tokens - cold).sum())
    engine = engine_limits(run, limits)
    runs = {} if engine is None else _simulated(run, done.tolist(), tree, engine, rates)
    return PromptAudit(computed, needed, runs, engine or limits)


def cache_picture(run: ServerRun, limits: EngineLimits) -> CachePicture | None:
    """Return the picture of first come, first served and of the run; None without a tree or its KV cache."""
    engine = engine_limits(run, limits)
    if run.tree is None or not len(run.tree.parent) or engine is None or run.failed.any():
        return None
    file, output = np.argsort(run.position, kind="stable"), np.maximum(run.completion_tokens, 1)
    after = None if run.sent_after is None else run.sent_after.tolist()
    orders: list[SentOrder] = [("first come, first served", file.tolist(), None)]
    if after is not None or not np.array_equal(file, np.arange(len(run))):
        orders.append(("this run's order", range(len(run)), after))
    try:
        return CachePicture.of(run.tree, output.tolist(), engine, orders)
    except ValueError:
        return None


def engine_limits(run: ServerRun, limits: EngineLimits) -> EngineLimits | None:
    """Return the limits of a run's only engine; None for several, or without its KV cache."""
    server = run.servers[0]
    if len(run.servers) > 1 or (server.engines or 1) > 1 or server.kv_tokens is None:
        return None
    return EngineLimits(limits.sequences, limits.batched_tokens, server.kv_tokens, server.block_tokens or 1)


def _simulated(
    run: ServerRun, done: list[int], tree: PrefixTree, limits: EngineLimits, rates: IterationRates | None
) -> dict[str, CachedRun]:
    output, after = np.maximum(run.completion_tokens[done], 1), run.sent_after
    scenario = Scenario(output, UNKNOWN_RATES if rates is None else rates)
    try:
        forecast = Forecast(tree, [scenario], limits)
    except ValueError:
        return {}
    file = np.argsort(run.position[done], kind="stable")
    outlooks: dict[str, Outlook] = {
        FILE_ORDER: forecast.of(FILE_ORDER, file),
        SENT: forecast.of(SENT, np.arange(len(tree)), None if after is None else after[done]),
    }
    orders = baseline_orders(tree, output) | tree_orders(tree, output, limits.kv_tokens)
    for name, order in orders.items():
        if len(outlooks) >= max(3, _MOST // len(tree)):
            break
        if name != FILE_ORDER:
            outlooks[name] = forecast.of(name, order)
    best = choose(outlooks)
    return {
        SENT: outlooks[SENT].runs[0],
        FILE_ORDER: outlooks[FILE_ORDER].runs[0],
        LONGEST_FIRST: best.runs[0],
    }
