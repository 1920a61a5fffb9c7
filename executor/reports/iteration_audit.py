"""Audit of a server's iterations: the bound, and the loss by cause."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...data.arrays import IntArray
from ...data.claims.assumptions import (
    COLD_CACHE,
    COUNTS_ONE,
    DISTINCT,
    ONE_ENGINE,
    ONE_TOKEN,
    REUSE_UNIT,
    SLOTS,
    TOKEN_BUDGET,
    WHOLE_CONTEXT,
    Assumption,
    blame,
    least_label,
    relied_on,
)
from ...data.costs.iteration_rates import IterationRates
from ...data.iterations import UNLIMITED, EngineLimits, IterationBound, Predicted, Sequences
from ...data.prefix_tree import PrefixTree
from ...data.readers.iteration_log import IterationLog
from ...data.readers.server_run import ServerRun
from ...heuristics.serving.release import predict
from ...models.bounds.iterations import iteration_bound
from .prompt_audit import PromptAudit, audit_prompts
from .run_assumptions import claim_of, kinds_under, shares_nothing

WORK = "full iterations of the same work"
BEFORE = "empty slots while prompts were still to come"
TAIL = "empty slots after the last prompt"
DECODE = "decode iterations"
MIXED = "iterations with prompts"
AFTER = "iterations after the last prompt"

ORDER = "order: beyond the best of these"
AGAIN = "order: prompts computed again after eviction"
OTHER = "not explained (client, network, other traffic)"
KV_UNKNOWN = "KV cache, which is not simulated; client, network"
OPEN = "best of these orders above the bound"
TOGETHER = "all causes together"
DRAFTS = "drafts that were not accepted, and all other causes"

_FAR = 0.25
"""Relative difference of simulated and counted iterations beyond which another engine was simulated."""


@dataclass(frozen=True, slots=True)
class IterationAudit:
    """Run's iterations against the least possible of any order.

    counted: Iterations by the server's counter; None without one.
    bound, limits, sequences: Bound at the actual lengths, with its limits and sequences.
    simulated: Simulated iterations by order: ``as sent``, ``file order`` and ``longest first``; empty for a
        job too large to simulate.
    drafts: Most tokens that the servers draft of a sequence in an iteration; None if unknown.
    short_of_kv: True if servers preempted requests under a KV capacity that is not simulated.
    prompts: Prompt tokens against the tree of beginnings; None without a tree.
    """

    counted: int | None
    bound: IterationBound
    limits: EngineLimits
    sequences: Sequences
    simulated: Mapping[str, Predicted]
    assumptions: tuple[Assumption, ...] = ()
    drafts: int | None = 0
    short_of_kv: bool = False
    prompts: PromptAudit | None = None

    @property
    def broken(self) -> str | None:
        """Message for a run below its bound; else None."""
        if self.counted is None or self.counted >= self.bound.iterations:
            return None
        what = f"the run took {self.counted:,} iterations, fewer than its bound of {self.bound.iterations:,}"
        return f"{what}: {self._blame()[0]}"

    @property
    def label(self) -> str:
        """Name of the bound: ``proven`` only without open assumptions."""
        if self.broken:
            return "bound that the run broke"
        return least_label(self.assumptions, self.bound.certificate.get("kind"))

    @property
    def is_defect(self) -> bool:
        """True if the run beats a bound without open assumptions."""
        return self.broken is not None and self._blame()[1]

    @property
    def comparable(self) -> bool:
        """True if simulated orders are of this engine: no assumption about it is broken."""
        wrong = {assumption.name for assumption in self.assumptions if assumption.basis == "broken"}
        return self.broken is None and self.far is None and not wrong & {ONE_TOKEN, SLOTS, ONE_ENGINE}

    @property
    def far(self) -> str | None:
        """Sentence on a simulation far from the server's count; else None."""
        sent = self.simulated.get("as sent")
        if sent is None or self.counted is None or abs(self.counted / sent.iterations - 1) <= _FAR:
            return None
        what = f"this order takes {sent.iterations:,} iterations in the simulation and took {self.counted:,}"
        return f"{what}: orders are not compared; are --slots, --batched-tokens and --kv-tokens the server's?"

    def _blame(self) -> tuple[str, bool]:
        assert self.counted is not None
        rows = self.sequences.drafted(self.drafts or 0).rows(self.limits)
        if self.bound.certificate.get("kind") not in ("tokens", "none") and self.counted < int(rows.max()):
            # One request alone takes more, whatever the slots, engines and evictions.
            alone = [
                assumption for assumption in self.assumptions if assumption.name in (ONE_TOKEN, TOKEN_BUDGET)
            ]
            return blame(
                [replace(assumption, basis="broken") for assumption in alone if assumption.basis != "checked"]
                or alone
            )
        return blame(self.assumptions)

    @property
    def losses(self) -> dict[str, int]:
        """Iterations above the bound by cause, none negative.

        They add up to those counted (or simulated). Causes are not separated if the run took fewer iterations
        than its simulation.
        """
        if self.broken:
            return {}
        cause = DRAFTS if self.drafts else TOGETHER
        together = {} if self.counted is None else {cause: self.counted - self.bound.iterations}
        if not self.simulated:
            return together
        sent, best = self.simulated["as sent"].iterations, self.simulated["longest first"].iterations
        best = min(sent, best)
        order = AGAIN if self.prompts is not None and self.prompts.order_recomputes else ORDER
        parts = {order: sent - best, OPEN: best - self.bound.iterations}
        if self.counted is not None:
            parts = {KV_UNKNOWN if self.short_of_kv else OTHER: self.counted - sent, **parts}
        return parts if min(parts.values()) >= 0 else together


def sequences_of(run: ServerRun) -> Sequences:
    """Return a run's work, a row per completion, in sending order.

    Failed requests are left out. If prompts may have shared KV cache, all of a prompt but one token counts as
    cached.
    """
    done = np.flatnonzero(run.failed == 0)
    choices, total = run.choices[done], run.completion_tokens[done]
    if not done.size:
        raise ValueError("no request has a completion")
    if (total < choices).any() or (run.prompt_tokens[done] < 1).any():
        raise ValueError("the servers did not say how many tokens each request had")
    of = np.repeat(np.arange(len(done)), choices)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(choices) - choices, choices)
    output = total[of] // choices[of] + (nth < total[of] % choices[of])
    prompt = run.prompt_tokens[done][of]
    tree = _tree_of(run, done)
    if tree is not None and np.array_equal(tree.prompt_tokens, prompt):
        return Sequences(prompt, output, tree=tree)
    cached = np.where(nth > 0, prompt - 1, 0) if shares_nothing(run) else prompt - 1
    return Sequences(prompt, output, cached, exact=bool((choices == 1).all()))


def _tree_of(run: ServerRun, done: IntArray) -> PrefixTree | None:
    """Return the tree of the completed requests, if the engine reuses beginnings by no less than its unit."""
    if run.tree is None:
        return None
    whole = next(
        (assumption.basis for assumption in run.assumptions if assumption.name == WHOLE_CONTEXT), "assumed"
    )
    # The block of a model with windows or state-space layers is larger than what it reuses.
    if run.tree.unit > 1 and whole not in ("checked", "stated"):
        return None
    return run.tree if len(done) == len(run) else run.tree.select(done)


def audit_iterations(
    run: ServerRun,
    limits: EngineLimits,
    *,
    budget_known: bool,
    kv_stated: bool = False,
    rates: IterationRates | None = None,
) -> IterationAudit:
    """Audit a run's iterations.

    The bound uses a KV capacity that is stated or checked.

    rates: Costs by which the best order on a prefix cache is chosen.
    """
    sequences = sequences_of(run)
    observed = sum(server.most_running or 0 for server in run.servers)
    # A server that ran more requests than planned has more slots.
    proven = replace(
        limits,
        sequences=max(limits.sequences, observed),
        batched_tokens=limits.batched_tokens if budget_known else UNLIMITED,
    )
    counts = [server.iterations for server in run.servers]
    known = [count for count in counts if count is not None]
    claim = claim_of(run, sequences, proven, budget_known=budget_known, kv_stated=kv_stated)
    bounded, assumptions, bound = _bounded(
        sequences, proven, claim.assumptions, claim.kinds, claim.drafts or 0
    )
    prompts = None if run.abandoned else audit_prompts(run, limits, rates)
    if prompts is not None:
        simulated = prompts.predicted
    elif run.abandoned:
        simulated = {}
    else:
        simulated = _simulated_run(run, sequences, replace(limits, sequences=proven.sequences))
    return IterationAudit(
        counted=max(known) if len(known) == len(counts) else None,
        bound=bound,
        limits=proven,
        sequences=bounded,
        assumptions=_shown(assumptions, bound),
        drafts=claim.drafts,
        short_of_kv=limits.kv_tokens is None and any(server.preemptions for server in run.servers),
        simulated=simulated,
        prompts=prompts,
    )


def _bounded(
    sequences: Sequences,
    limits: EngineLimits,
    assumptions: tuple[Assumption, ...],
    kinds: Collection[str],
    drafts: int = 0,
) -> tuple[Sequences, tuple[Assumption, ...], IterationBound]:
    """Return a bound, the sequences that it counts and their assumptions, for a cache that may be warm."""
    bound = iteration_bound(sequences, limits, drafts=drafts, kinds=kinds)
    bases = {assumption.name: assumption.basis for assumption in assumptions}
    broken = "broken" in (bases.get(COLD_CACHE), bases.get(REUSE_UNIT))
    if not broken and bases.get(COLD_CACHE) == "checked" and COUNTS_ONE not in assumptions:
        return sequences, assumptions, bound
    warmed = sequences.warmed()
    warm = iteration_bound(warmed, limits, drafts=drafts, kinds=kinds)
    if broken:
        return warmed, assumptions, warm
    if warm.iterations < bound.iterations and COUNTS_ONE not in assumptions:
        return sequences, assumptions, bound
    others = (one for one in assumptions if one.name not in (COLD_CACHE, DISTINCT, REUSE_UNIT))
    return warmed, (*others, COUNTS_ONE), warm


def _shown(assumptions: tuple[Assumption, ...], bound: IterationBound) -> tuple[Assumption, ...]:
    """Return the assumptions of the bound and of a withheld one."""
    relied = relied_on(assumptions, bound.certificate.get("kind"))
    return tuple(
        assumption for assumption in assumptions if assumption in relied or assumption.basis == "broken"
    )


def order_audit(
    sequences: Sequences, limits: EngineLimits, proven: EngineLimits, assumptions: tuple[Assumption, ...]
) -> IterationAudit:
    """Simulate orders without a count of iterations."""
    kinds = kinds_under(assumptions, proven)
    bounded, assumptions, bound = _bounded(sequences, proven, assumptions, kinds)
    return IterationAudit(
        counted=None,
        bound=bound,
        limits=proven,
        sequences=bounded,
        assumptions=relied_on(assumptions, bound.certificate.get("kind")),
        simulated=_simulated(sequences, limits, orders_of(sequences)),
    )


def orders_of(sequences: Sequences) -> dict[str, IntArray]:
    """Return the orders to compare, the run's own first."""
    return {
        "as sent": np.arange(len(sequences)),
        "longest first": np.argsort(-sequences.output, kind="stable"),
        "shortest first": np.argsort(sequences.output, kind="stable"),
    }


def _simulated_run(run: ServerRun, sequences: Sequences, limits: EngineLimits) -> dict[str, Predicted]:
    done = np.flatnonzero(run.failed == 0).tolist()
    choices = run.choices[done]
    ends = np.cumsum(choices).tolist()
    output = sequences.output.copy()
    for request, count, end in zip(done, choices.tolist(), ends, strict=True):
        if len(known := run.lengths.get(request, ())) == count:
            output[end - count : end] = known
    sequences = replace(sequences, output=np.maximum(output, 1))
    orders = {
        "as sent": np.arange(len(sequences)),
        "file order": np.argsort(np.repeat(run.position[done], choices), kind="stable"),
        "longest first": np.argsort(-output, kind="stable"),
    }
    return _simulated(sequences, limits, orders)


def _simulated(
    sequences: Sequences, limits: EngineLimits, orders: Mapping[str, IntArray]
) -> dict[str, Predicted]:
    lengths, predicted = np.stack([sequences.prompt, sequences.output]), dict[str, Predicted | None]()
    for name, order in orders.items():
        # Orders that differ only among equal lengths take as many iterations.
        same = next(
            (alike for alike in predicted if (lengths[:, orders[alike]] == lengths[:, order]).all()), None
        )
        predicted[name] = predict(sequences, limits, order) if same is None else predicted[same]
    known = {name: run for name, run in predicted.items() if run is not None}
    return known if len(known) == len(predicted) else {}


@dataclass(frozen=True, slots=True)
class LogAudit:
    """Iterations of a log by the use of their slots.

    sequences: Slots of the engine.
    parts: Iterations by cause, with an empty slot as a share of one; they add up to ``counted``.
    seconds: Seconds of the iterations by kind, which add up to the engine's busy seconds.
    """

    counted: int
    sequences: int
    parts: Mapping[str, float]
    seconds: Mapping[str, float]


def audit_log(log: IterationLog, sequences: int) -> LogAudit:
    """Split the empty slots of an engine by cause."""
    rows = log.chunks + log.decodes
    if int(rows.max()) > sequences:
        raise ValueError(f"{int(rows.max())} requests ran in an iteration, more than {sequences}")
    with_prompts = np.flatnonzero(log.chunks)
    last = int(with_prompts[-1]) if with_prompts.size else -1
    after = np.arange(len(log)) > last
    empty = (sequences - rows) / sequences
    mixed = ~after & (log.chunks > 0)
    return LogAudit(
        counted=len(log),
        sequences=sequences,
        parts={
            WORK: float(rows.sum()) / sequences,
            BEFORE: float(empty[~after].sum()),
            TAIL: float(empty[after].sum()),
        },
        seconds={
            MIXED: float(log.seconds[mixed].sum()),
            DECODE: float(log.seconds[~after & ~mixed].sum()),
            AFTER: float(log.seconds[after].sum()),
        },
    )
