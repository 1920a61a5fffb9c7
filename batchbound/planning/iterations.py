"""Plans for engines with mixed iterations: dispatch, order and bound."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from ..data.arrays import IntArray
from ..data.claims.assumptions import Assumption, stated_limits
from ..data.costs.cost import CostModel
from ..data.costs.iteration_rates import IterationRates
from ..data.costs.layer_profile import LayerProfile
from ..data.fleet import Fleet, Groups, Replica
from ..data.iteration_plan import IterationPlan, PlannedShare, SecondsBound
from ..data.iterations import UNLIMITED, EngineLimits, Predicted, Sequences
from ..data.objective import Aim, Goal, Objective
from ..data.plan import Maker, Provenance
from ..data.prefix_tree import PrefixTree
from ..heuristics.dispatch import RULES, dispatch
from ..heuristics.iterations.fitted_audit import proven_rates
from ..heuristics.iterations.iteration_fit import PricedDevice
from ..heuristics.iterations.replay import ComposedDevice
from ..heuristics.iterations.seconds_audit import needed_work
from ..heuristics.prefixes.choice import Scenario, possible_rates
from ..heuristics.serving.in_flight import in_flight_of
from ..heuristics.serving.release import fits, predict
from ..models.bounds.completions import completion_bound
from ..models.bounds.iterations import KINDS, iteration_bound, without
from ..models.iterations.iteration_minorant import Minorant, Work, best_minorant
from ..models.iterations.layer_cost import LayerCost
from ..solvers.prefix_search import search_tree_order
from ..solvers.result import Limits, Status, StoppedBy
from ..solvers.solve import DEFAULT_SECONDS
from ..version import __version__
from .mixed_job import UNCOUNTED, MixedJob
from .plan import PlanningError
from .release import Releasable, named_orders
from .release_search import search_release
from .subtrees import share_between, share_out

QUEUED = 3
"""Completions in flight for each slot, where the order decides what a prefix cache keeps."""

ROOMY = "no KV capacity is stated: the engine is taken to hold all requests in progress"


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines of a job: limits, and costs if known.

    Parameters
    ----------
    limits
        Limits of each engine.
    name
        Kind of engine, as in ``--for``.
    budget_stated, blocks_stated
        True if the user stated the tokens of an iteration, or of a block. The bound ignores a guessed one.
    rates, profile
        Cost of an iteration, as either of them; without one the plan counts iterations.

    Raises
    ------
    ValueError
        If there is no engine, if both costs are given, or if a profile comes without a stated budget.
    """

    limits: tuple[EngineLimits, ...]
    name: str = "vllm"
    budget_stated: bool = True
    blocks_stated: bool = True
    rates: IterationRates | None = None
    profile: LayerProfile | None = None

    def __post_init__(self) -> None:
        if not self.limits:
            raise ValueError("there is no engine")
        if self.rates is not None and self.profile is not None:
            raise ValueError("an iteration's seconds are given twice: as rates and as a profile")
        if self.profile is not None and not self.budget_stated:
            raise ValueError("a profile's least seconds depend on the tokens of an iteration: state them")
        if (self.rates or self.profile) and len(set(self.limits)) > 1:
            raise ValueError("seconds are of one kind of engine: these differ in their limits")

    def proven(self, engines: Sequence[EngineLimits]) -> EngineLimits:
        """Return the joint limits that a bound may rely on."""
        held = [limits.kv_tokens for limits in engines]
        sizes = {limits.block_tokens for limits in engines}
        return EngineLimits(
            sum(limits.sequences for limits in engines),
            sum(limits.batched_tokens for limits in engines) if self.budget_stated else UNLIMITED,
            None if None in held else sum(tokens or 0 for tokens in held),
            sizes.pop() if self.blocks_stated and len(sizes) == 1 else 1,
        )

    def prices(self) -> PricedDevice | ComposedDevice | None:
        """Return the device that prices iterations, or None."""
        return iteration_prices(self.rates, self.profile)


def iteration_prices(
    rates: IterationRates | None, profile: LayerProfile | None
) -> PricedDevice | ComposedDevice | None:
    """Return the device that prices iterations by rates or a profile."""
    if rates is not None:
        return PricedDevice(_minorant(rates))
    return None if profile is None else ComposedDevice(LayerCost(profile))


def make_iteration_plan(
    job: MixedJob,
    engines: Engines,
    *,
    groups: Groups = "any",
    rule: str | None = None,
    limits: Limits | None = None,
    provenance: Provenance | None = None,
    objective: Objective | None = None,
) -> IterationPlan:
    """Plan a job for engines that mix prompts with generated tokens.

    The plan states the order of requests, the completions to keep in flight, the predicted iterations (and
    seconds), and a lower bound for any order.

    Parameters
    ----------
    job
        Completions to compute.
    engines
        Engines that compute them, and their limits.
    groups
        Placement of a prompt's completions: "any" engine, "together" on one, or "spread" over as many engines
        as possible. The completions of one request always go to one engine.
    rule
        Dispatching rule, a key of :data:`~batchbound.heuristics.dispatch.RULES`; by default the rule whose
        busiest engine finishes first.
    limits
        Stopping criteria; ``DEFAULT_SECONDS`` by default.
    provenance
        Sources of the numbers, for the plan's record.
    objective
        Objective of one engine without costs; None for the makespan.

    Raises
    ------
    ValueError
        If a request needs more KV cache than its engine has, no affine function lies under the profile's
        costs, or the objective is never reached or of several engines.
    PlanningError
        If the plan contradicts itself.
    """
    limits, begun = Limits(seconds=DEFAULT_SECONDS) if limits is None else limits, time.perf_counter()
    proven = engines.proven(engines.limits)
    for each in set(engines.limits):
        if not fits(job.rows(), each):
            most = int((job.workload.input_tokens + job.workload.output_tokens).max())
            blocks = "" if each.block_tokens == 1 else f" in blocks of {each.block_tokens:,}"
            need = f"needs {most:,} tokens of KV cache{blocks}, an engine has {each.kv_tokens:,}"
            raise ValueError(f"a request {need}")
    least = job.least(proven)
    # One engine may evict although the engines together have room.
    roomy = not any(map(least.may_run_short, set(engines.limits)))
    bound = iteration_bound(least, proven, kinds=KINDS if roomy else without("packing"))
    aim = None if objective is None else _aim(job, engines, objective, proven)
    seconds = _least_seconds(job, engines)
    end = math.inf if limits.seconds is None else begun + _SHARING * limits.seconds
    replica_of = _shared_out(job, engines, groups, rule, seconds, end)
    if rule is None and groups == "any" and _alike(engines) and _by_tree(job, engines):
        assert job.tree is not None
        of = len(engines.limits), engines.limits[0]
        output, requests = job.workload.output_tokens, job.requests()
        replica_of = share_out(job.tree, output, requests, of, engines.rates, replica_of)
    shares, stopped = [], StoppedBy.PROOF
    for k, each in enumerate(engines.limits):
        budget = _part(limits, begun, k, len(engines.limits))
        members = np.flatnonzero(replica_of == k)
        share, stopped_by = _share(job, members, each, engines, (budget, bound.iterations), aim)
        shares.append(share)
        stopped = stopped if stopped_by == StoppedBy.PROOF else stopped_by
    plan = IterationPlan(
        engine=engines.name,
        workload=job.workload.without_arrivals(),
        shares=tuple(shares),
        bound=bound,
        proven=proven,
        maker=Maker(
            "release search",
            __version__,
            Status.FEASIBLE,
            stopped,
            limits.noted(time.perf_counter() - begun),
            limits.seed,
        ),
        counted=job.counted,
        tree=job.tree,
        rates=engines.rates,
        profile=engines.profile,
        least_seconds=seconds,
        provenance=provenance or Provenance(),
        aim=aim,
        assumptions=stated_limits(proven, *job.assumptions, *_about_lengths(provenance)),
        remarks=(*(() if job.counted else (UNCOUNTED,)), *((ROOMY,) if proven.kv_tokens is None else ())),
    )
    if plan.proven_optimal:
        maker = replace(plan.maker, status=Status.OPTIMAL, stopped_by=StoppedBy.PROOF)
        plan = replace(plan, maker=maker)
    violation = plan.check()
    if violation is not None:
        raise PlanningError(f"the plan contradicts itself: {violation}")
    return plan


def _aim(job: MixedJob, engines: Engines, objective: Objective, proven: EngineLimits) -> Aim:
    if len(engines.limits) > 1:
        raise ValueError(f"the objective {objective} is of one engine, and there are {len(engines.limits)}")
    if engines.rates is not None or engines.profile is not None:
        raise ValueError(f"the objective {objective} counts iterations, and there is a cost in seconds")
    goal = Goal.of(objective, job.requests(), job.workload.group)
    return Aim(goal, completion_bound(job.least(proven), proven, goal))


def _part(limits: Limits, begun: float, engine: int, engines: int) -> Limits:
    seconds = None
    if limits.seconds is not None:
        left = limits.seconds - (time.perf_counter() - begun)
        # The simple rules are simulated in any case.
        seconds = max(1e-9, left / (engines - engine))
    return replace(limits, seconds=seconds, work=None if limits.work is None else -(-limits.work // engines))


def _share(
    job: MixedJob,
    members: IntArray,
    limits: EngineLimits,
    engines: Engines,
    until: tuple[Limits, int],
    aim: Aim | None,
) -> tuple[PlannedShare, StoppedBy]:
    if not members.size:
        nothing = Predicted(0, seconds=None if engines.prices() is None else 0.0)
        return PlannedShare(limits, members, "nothing to do", in_flight_of(limits.sequences), nothing), (
            StoppedBy.PROOF
        )
    rows, requests = job.rows(members), job.requests()[members]
    goal = None
    if aim is not None:
        goal, until = aim.goal, (until[0], aim.bound.value)
    elif rows.tree is not None and engines.profile is None and share_between(rows.tree, requests):
        by = engines.rates, job.exact, *until
        return _share_by_tree((members, requests), rows, rows.tree, limits, by)
    work = Releasable.of_rows(rows, requests, exact=job.exact)
    found = search_release(work, limits, engines.prices(), *until, goal)
    flying = in_flight_of(limits.sequences) if found.held_back is None else found.held_back
    order = members[work.expanded(found.release.order)]
    share = PlannedShare(limits, order, found.release.name, flying, found.release.predicted)
    return share, found.stopped_by


def _alike(engines: Engines) -> bool:
    """Return whether there are several engines of equal limits."""
    return len(engines.limits) > 1 and len(set(engines.limits)) == 1


def _by_tree(job: MixedJob, engines: Engines) -> bool:
    """Return whether shared beginnings decide the order of a job."""
    return job.tree is not None and engines.profile is None and share_between(job.tree, job.requests())


def _share_by_tree(
    of: tuple[IntArray, IntArray],
    rows: Sequences,
    tree: PrefixTree,
    limits: EngineLimits,
    by: tuple[IterationRates | None, bool, Limits, int],
) -> tuple[PlannedShare, StoppedBy]:
    """Return the share in the order of fewest predicted seconds on a prefix cache.

    of: The completions of the share, and the request of each.
    by: Costs, True if lengths are known, the limits of the search, and the iterations of the bound.
    """
    (members, requests), (rates, exact, budget, least) = of, by
    together = None if len(np.unique(requests)) == len(requests) else requests
    known = None if rates is None else replace(rates, error=0.0)
    scenarios = [Scenario(rows.output, one) for one in possible_rates(known)]
    found = search_tree_order(
        tree, scenarios, limits, budget if exact else None, lengths_known=True, together=together
    )
    run = found.outlook.runs[0]
    seconds = None if rates is None else found.outlook.seconds[0]
    predicted = Predicted(run.iterations, run.preemptions, run.prompt_tokens + run.decodes, seconds)
    # Requests wait at the engine, which then admits them in this order.
    flying = max(in_flight_of(limits.sequences), QUEUED * limits.sequences)
    share = PlannedShare(limits, members[found.outlook.order], found.outlook.name, flying, predicted)
    proven = rates is None and run.iterations <= least
    return share, StoppedBy.PROOF if proven else found.stopped_by


def _shared_out(
    job: MixedJob,
    engines: Engines,
    groups: Groups,
    rule: str | None,
    proven: SecondsBound | None,
    end: float,
) -> IntArray:
    """Choose the engine of each completion, shape (completions,), until ``end``."""
    count, work = len(engines.limits), job.workload
    if count == 1:
        return np.zeros(len(work), dtype=np.int64)
    together = job.request is not None and len(np.unique(job.request)) < len(work)
    if together and groups == "spread":
        raise ValueError("the completions of one request go to one engine: they cannot be spread")
    if together and groups == "any":
        # One request has one body: its completions stay together.
        work, groups = (
            replace(work, group=job.requests()),
            "together",
        )
    replicas = tuple(
        # A decoded token holds a slot for an iteration; a prompt takes a share of its token budget.
        Replica(CostModel(0.0, 1 / limits.batched_tokens, 1.0, 0.0), limits.sequences)
        for limits in engines.limits
    )
    fleet = Fleet(work, replicas)
    # Only Graham's rule handles differing replicas and spread groups.
    even = groups != "spread" and len(set(engines.limits)) == 1 and len(work) <= _FEW
    rules = [rule] if rule else RULES if even else ["lpt"]
    found = [dispatch(fleet, name, groups) for name in rules]
    if len(found) == 1:
        return found[0]
    least = [_least(job, engines, replica_of, proven) for replica_of in found]
    best, fewest = found[int(np.argmin(least))], math.inf
    if len(work) > _SIMULATED:
        return best
    for k in np.argsort(least, kind="stable").tolist():
        if least[k] >= fewest or (fewest < math.inf and time.perf_counter() > end):
            break  # no order is better, or time is up
        most = _most(job, engines, found[k])
        if most < fewest:
            best, fewest = found[k], most
    return best


def _least(job: MixedJob, engines: Engines, replica_of: IntArray, proven: SecondsBound | None) -> float:
    """Bound the busiest engine's iterations, or seconds if proven."""
    return max(
        _least_of(job.rows(members), limits, proven) for members, limits in _members(engines, replica_of)
    )


def _least_of(rows: Sequences, limits: EngineLimits, proven: SecondsBound | None) -> float:
    iterations = iteration_bound(rows, limits, summed=True).iterations
    if proven is None:
        return iterations
    work = replace(needed_work(rows, limits), iterations=iterations)
    return Minorant(**proven.rates, points=0).seconds(work)


def _most(job: MixedJob, engines: Engines, replica_of: IntArray) -> float:
    each, prices = list[float](), engines.prices()
    for members, limits in _members(engines, replica_of):
        work = Releasable.of_rows(job.rows(members), job.requests()[members], exact=job.exact)
        sequences, orders = work.sequences(), named_orders(work, None).values()
        runs = [predict(sequences, limits, work.expanded(order), lag=1, prices=prices) for order in orders]
        known = [run.iterations if run.seconds is None else run.seconds for run in runs if run is not None]
        # Jobs too large to simulate are compared by their bounds.
        unknown = iteration_bound(sequences, limits, summed=True).iterations if prices is None else math.inf
        each.append(min(known, default=unknown))
    return max(each)


def _members(engines: Engines, replica_of: IntArray) -> Iterator[tuple[IntArray, EngineLimits]]:
    for k, limits in enumerate(engines.limits):
        members = np.flatnonzero(replica_of == k)
        if members.size:
            yield members, limits


def _about_lengths(provenance: Provenance | None) -> list[Assumption]:
    """Return the assumption about lengths that are not known."""
    condition = "" if provenance is None else provenance.condition
    return [Assumption(condition, "assumed")] if condition else []


def _least_seconds(job: MixedJob, engines: Engines) -> SecondsBound | None:
    if engines.rates is None and engines.profile is None:
        return None
    count, limits = len(engines.limits), engines.proven(engines.limits[:1])
    rows = job.least(limits)
    iterations = iteration_bound(rows, limits, summed=count > 1)
    work = replace(needed_work(rows, limits), iterations=iterations.iterations)
    put_back = rows.may_run_short(limits)
    if engines.rates is not None:
        least = proven_rates(_minorant(engines.rates), put_back=put_back)
    else:
        assert engines.profile is not None
        longest = int((rows.prompt + rows.output).max())
        least = best_minorant(LayerCost(engines.profile), limits, longest, work, put_back=put_back)
    seconds = least.seconds(work) / count * (1 - _ROUNDING)
    return SecondsBound(seconds, least.rates, iterations, limits)


_FEW = 50_000
"""Most completions for which all dispatching rules are tried."""

_SIMULATED = 2000
"""Most completions for which dispatching rules are simulated."""

_SHARING = 0.4
"""Fraction of the time limit for simulating dispatching rules."""

_ROUNDING = 1e-12
"""Fraction subtracted from proven seconds, against rounding."""


def _minorant(rates: IterationRates) -> Minorant:
    return Minorant(**{each.name: getattr(rates, each.name) for each in fields(Work)})
