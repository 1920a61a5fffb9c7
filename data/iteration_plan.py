"""Plans for engines that mix prefill and decode."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from .arrays import IntArray
from .bound import PROVEN_WITHIN, gap_above
from .claims.assumptions import Assumption, relied_on
from .costs.iteration_rates import IterationRates
from .costs.layer_profile import LayerProfile
from .files.disk import InputError, read_json_object, write_json
from .files.kinds import is_of_kind, refuse_other_kinds
from .files.record import Positive, plain, record, refuse_unknown
from .iterations import EngineLimits, IterationBound, Predicted, Sequences
from .objective import Aim
from .plan import Maker, Plan, Provenance, drop_defaults
from .prefix_tree import PrefixTree
from .schedule import Violation
from .workload import Workload

KIND = "batchbound_iteration_plan"


@dataclass(frozen=True, slots=True, eq=False)
class PlannedShare:
    """Share of a job for one engine.

    limits: Limits of the simulated engine.
    requests: Positions of its requests in sending order, shape (requests of the share,).
    in_flight: Completions to keep in flight; fewer than usual if this uses the KV cache better.
    predicted: Simulated run of the engine; None for a job too large to simulate.
    """

    limits: EngineLimits
    requests: IntArray
    order: str
    in_flight: Positive
    predicted: Predicted | None = None

    @property
    def held_back(self) -> int | None:
        """Completions in flight if fewer than the slots, else None."""
        return self.in_flight if self.in_flight < self.limits.sequences else None


@dataclass(frozen=True, slots=True)
class SecondsBound:
    """Least seconds of any order, by the plan's costs.

    rates: Least seconds of an iteration and of each unit of its work, by the names of
        :class:`~.costs.iteration_rates.IterationRates`.
    iterations: Bound on the iterations of all engines together.
    limits: Limits of each engine that the bound assumes.
    """

    seconds: float
    rates: Mapping[str, float]
    iterations: IterationBound
    limits: EngineLimits


@dataclass(frozen=True, slots=True, eq=False)
class IterationPlan:
    """Plan of a job on engines that mix prefill and decode.

    Parameters
    ----------
    engine
        Engine that the plan is for.
    workload
        Completions, each with its prompt.
    shares
        Share of each engine.
    bound
        Iterations that every order and every division of the requests takes at least.
    proven
        Limits that the bound assumes: the stated ones of all engines together.
    maker
        Origin of the order.
    counted
        True if the engine's tokenizer counted the prompts; else the bound counts one token of each.
    tree
        Beginnings that the prompts share, in units that the engine reuses; None if it keeps none, or unknown.
    rates, profile
        Cost of an iteration, in one of two forms; None for a plan in iterations alone.
    least_seconds
        Bound in seconds; None without a cost.
    provenance
        Origin of lengths, costs and prompts.
    aim
        Objective other than the makespan, with its bound; None for the makespan.
    assumptions
        Assumptions of the bounds, each with its basis, unused ones included.
    remarks
        Further facts about the plan, in sentences.
    """

    JSON_HEADER: ClassVar = (KIND, 2)
    JSON_HINT: ClassVar = "Plan again."

    engine: str
    workload: Workload
    shares: tuple[PlannedShare, ...]
    bound: IterationBound
    proven: EngineLimits
    maker: Maker
    counted: bool = True
    tree: PrefixTree | None = None
    rates: IterationRates | None = None
    profile: LayerProfile | None = None
    least_seconds: SecondsBound | None = None
    provenance: Provenance = field(default_factory=Provenance)
    aim: Aim | None = None
    assumptions: tuple[Assumption, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def relied_on(self) -> tuple[Assumption, ...]:
        """Assumptions that the bounds rely on."""
        return relied_on(self.assumptions, *self.kinds)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the bounds' certificates."""
        bound = self.least_seconds
        kinds: tuple[object, ...] = (self.bound.certificate.get("kind"),)
        kinds += () if bound is None else (bound.iterations.certificate.get("kind"), "seconds")
        kinds += () if self.aim is None else self.aim.kinds
        return tuple(map(str, kinds))

    def sequences(self) -> Sequences:
        """Return the least work of the engines, a row per completion."""
        work = self.workload
        if self.counted:
            return Sequences(work.input_tokens, work.output_tokens, tree=self.tree)
        return least_known(work.output_tokens, self.proven)

    @property
    def ranks(self) -> IntArray:
        """Place of each completion in its share's order, shape (completions,)."""
        rank = np.empty(len(self.workload), dtype=np.int64)
        for share in self.shares:
            rank[share.requests] = np.arange(len(share.requests))
        return rank

    @property
    def order(self) -> IntArray:
        """All completions in sending order, with the shares in turn."""
        return np.argsort(self.ranks, kind="stable")

    @property
    def replica_of(self) -> IntArray:
        """Share of each completion, shape (completions,)."""
        column = np.zeros(len(self.workload), dtype=np.int64)
        for k, share in enumerate(self.shares):
            column[share.requests] = k
        return column

    @property
    def iterations(self) -> int | None:
        """Predicted iterations of the last engine; None without a simulation."""
        known = [share.predicted for share in self.shares if share.predicted is not None]
        return max(prediction.iterations for prediction in known) if len(known) == len(self.shares) else None

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of the last engine; None if unknown."""
        predictions = [None if share.predicted is None else share.predicted.seconds for share in self.shares]
        known = [seconds for seconds in predictions if seconds is not None]
        return max(known) if len(known) == len(predictions) else None

    @property
    def stated_budget(self) -> int | None:
        """Token budget that the bound assumes for every engine, or None."""
        budgets = [share.limits.batched_tokens for share in self.shares]
        return min(budgets) if self.proven.batched_tokens == sum(budgets) else None

    @property
    def gap(self) -> float | None:
        """Gap of the predicted iterations to the bound, as a fraction."""
        return gap_above(self.iterations, self.bound.iterations)

    @property
    def seconds_gap(self) -> float | None:
        """Gap of the predicted seconds to their bound, as a fraction."""
        return gap_above(self.seconds, None if self.least_seconds is None else self.least_seconds.seconds)

    @property
    def value(self) -> int | None:
        """Predicted value of the aim in iterations; None without an aim or a simulation."""
        predicted = self.shares[0].predicted
        return None if self.aim is None or predicted is None else predicted.value

    @property
    def aim_gap(self) -> float | None:
        """Gap of that value to its bound, as a fraction."""
        return None if self.aim is None else gap_above(self.value, self.aim.bound.value)

    @property
    def proven_optimal(self) -> bool:
        """True if the order is proven optimal.

        It is optimal for its aim if there is one, in seconds if there is a cost, else in iterations.
        """
        if self.aim is not None:
            return self.value is not None and self.value <= self.aim.bound.value
        if self.least_seconds is not None:
            return self.seconds is not None and self.seconds <= self.least_seconds.seconds * (
                1 + PROVEN_WITHIN
            )
        return self.iterations is not None and self.iterations <= self.bound.iterations

    def check(self) -> Violation | None:
        """Return an inconsistency within the plan, or None.

        Each completion must be in one share once and fit its engine. The bound must assume no tighter limits
        than the engines', and no prediction may be below it.
        """
        whole = np.concatenate([np.zeros(0, dtype=np.int64), *(share.requests for share in self.shares)])
        if not np.array_equal(np.sort(whole), np.arange(len(self.workload))):
            return Violation("order", "the shares do not hold each completion once")
        for share in self.shares:
            # A request alone on its engine holds all its tokens except the last one drawn.
            capacities = (
                self.workload.input_tokens[share.requests] + self.workload.output_tokens[share.requests] - 1
            )
            size, blocks = share.limits.block_tokens, share.limits.blocks
            if blocks is not None and capacities.size and -(-int(capacities.max()) // size) > blocks:
                return Violation("keys and values", "a request needs more of them than its engine has")
        try:
            self.sequences()
        except ValueError as error:
            return Violation("prompts", str(error))
        tighter = _tighter(self.proven, [share.limits for share in self.shares])
        if tighter is not None:
            return Violation("limits", f"the bound is for fewer {tighter} than the engines have")
        if self.iterations is not None and self.iterations < self.bound.iterations:
            what = f"{self.iterations} are predicted, below the bound of {self.bound.iterations}"
            return Violation("iterations", what)
        return self._check_aim() or self._check_seconds()

    def _check_aim(self) -> Violation | None:
        if self.aim is None:
            return None
        goal, value, bound = self.aim.goal, self.value, self.aim.bound.value
        if len(self.shares) > 1:
            return Violation("objective", f"{goal.objective} is of one engine, and there are several")
        items = len(self.workload) if goal.item is None else len(np.unique(goal.item))
        if goal.item is not None and len(goal.item) != len(self.workload):
            return Violation("objective", "it does not say the request of each completion")
        if (goal.objective.count or 1) > items:
            return Violation("objective", f"there are {items} {goal.objective.items} in all")
        if value is not None and value < bound:
            return Violation("objective", f"{value} is predicted, below the bound of {bound}")
        return None

    def _check_seconds(self) -> Violation | None:
        if self.rates is not None and self.profile is not None:
            return Violation("cost", "there are rates and a profile: leave one out")
        if self.least_seconds is None:
            return None
        if self.rates is None and self.profile is None:
            return Violation("cost", "seconds are proven without a cost")
        seconds, bound = self.seconds, self.least_seconds.seconds
        if not math.isfinite(bound) or bound < 0:
            return Violation("seconds", f"{bound} is not a valid bound in seconds")
        if seconds is not None and seconds < bound * (1 - PROVEN_WITHIN):
            return Violation("seconds", f"{seconds} are predicted, below the bound of {bound}")
        for share in self.shares:
            tighter = _tighter(self.least_seconds.limits, [share.limits])
            if tighter is not None:
                return Violation(
                    "limits", f"the seconds are of an engine with fewer {tighter} than there are"
                )
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` atomically."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, without columns of defaults."""
        value: dict[str, Any] = plain(self)
        drop_defaults(value["workload"], value["maker"])
        return {name: entry for name, entry in value.items() if entry is not None}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> IterationPlan:
        """Load a plan that :meth:`save` wrote, and check it.

        Raises
        ------
        InputError
            If the file is not a plan of this kind, or is inconsistent.
        """
        refuse_other_kinds(path, "no plan for servers", {KIND})
        value = read_json_object(path)
        plan = record(cls, value, file=path)
        # Such as the columns of shared tokens that came before the tree: without them a bound says more.
        fields = {name: entry for name, entry in value.items() if name != KIND}
        refuse_unknown(cls, fields, file=path, hint=cls.JSON_HINT)
        violation = plan.check()
        if violation is not None:
            raise InputError(f"the plan contradicts itself: {violation}", file=path, hint=cls.JSON_HINT)
        return plan


def least_known(output: IntArray, limits: EngineLimits) -> Sequences:
    """Return the least work of completions with one token a prompt."""
    return Sequences(np.ones_like(output), output, exact=limits.kv_tokens is None)


def _tighter(proven: EngineLimits, each: Sequence[EngineLimits]) -> str | None:
    """Return a limit of the bound that is below the engines'."""
    if proven.sequences < sum(limits.sequences for limits in each):
        return "sequences"
    if proven.batched_tokens < sum(limits.batched_tokens for limits in each):
        return "tokens of an iteration"
    if proven.kv_tokens is None:
        return None
    capacities = [limits.kv_tokens for limits in each]
    if None in capacities or proven.kv_tokens < sum(tokens or 0 for tokens in capacities):
        return "tokens of KV cache"
    # Blocks of one token hold everything that larger ones hold.
    if proven.block_tokens > 1 and any(limits.block_tokens != proven.block_tokens for limits in each):
        return "blocks of KV cache"
    return None


def load_plan(path: str | os.PathLike[str]) -> Plan | IterationPlan:
    """Load a plan of either kind."""
    return IterationPlan.load(path) if is_of_kind(path, KIND) else Plan.load(path)
