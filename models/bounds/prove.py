"""Loop over the arguments of the bound."""

from __future__ import annotations

from dataclasses import replace

from ...data.bound import Bound
from ...data.files.disk import InputError
from ...data.problem import Problem
from ..deadline import LEAST_LEFT, Deadline, Work
from .argument import Argument, Curve, Known, Task
from .difference_set import DifferenceBound
from .least_counts import ALL_ON, COUNTED, COUNTS, COUNTS_SOURCE, cost_terms, least_counts
from .memory_growth.programmes import GrowthBound
from .packing_prices import PackingBound
from .params import BoundParams
from .stage_intervals import IntervalBound

ARGUMENTS: tuple[type[Argument], ...] = (DifferenceBound, GrowthBound, IntervalBound, PackingBound)
"""Arguments in the order in which they are asked, the quickest first."""

EVICTING_SOURCE = f"{COUNTS_SOURCE}, evictions allowed"

DEFAULT_SECONDS = 5.0
"""Seconds for proofs that need a search; most need fewer."""

WASTE_SECONDS = 1e-4
"""Seconds per distinct length; a shorter limit allows only counts."""


def proven_bound(
    problem: Problem,
    seconds: float = DEFAULT_SECONDS,
    params: BoundParams = ALL_ON,
    *,
    repeatable: bool = False,
) -> Bound:
    """Return the strongest valid bound found within a time limit.

    Every argument proves, for each number of prefill stages, a least number of decode steps. For each number
    of stages the largest of them holds, and the bound is the least cost over all. So the arguments are asked
    in turn for a curve that raises the steps where they cost least, until none does. A longer limit begins as
    a shorter one does, so the bound does not fall with more time.

    problem: Problem to bound; arrival times are left out, which only lowers the bound.
    seconds: Time limit of the arguments that need a search.
    params: Arguments to use, and their shares of the time.
    repeatable: True to count work in place of time, so that the bound is the same each time. Other linear
        algebra kernels, as of another processor, may find another proof.
    """
    deadline = Deadline(seconds, Work() if repeatable else None)
    known = Known.of(problem, least_counts(problem, params))
    arguments = _arguments(Task(problem, known.counts, seconds, params))
    while (curve := _next(arguments, known, deadline)) is not None:
        known = known.with_curves((*known.curves, curve))
    return certified(known.pruned())


def bound_within(
    problem: Problem, seconds: float | None, least: float = 0.0, params: BoundParams = ALL_ON
) -> tuple[Bound, float | None]:
    """Bound a problem within a share of the time; return the time left.

    It may take ``least`` seconds in any case. None means no limit: then work counts, so that it repeats.
    """
    if seconds is None:
        return proven_bound(problem, params=params, repeatable=True), None
    whole, share = Deadline(seconds), max(least, params.time_share * seconds)
    bound = proven_bound(problem, share, params)
    return bound, max(LEAST_LEFT, whole.left)


def certified(known: Known) -> Bound:
    """Return the bound of some proofs with its certificate."""
    terms = cost_terms(known.problem, *known.cheapest)
    proofs = [
        (argument, [curve.claim for curve in known.curves if curve.part == argument.part])
        for argument in ARGUMENTS
    ]
    claims = {
        argument.part: listed if argument.lists_claims else listed[0] for argument, listed in proofs if listed
    }
    proving = [argument for argument, listed in proofs if listed and argument.kind != COUNTS]
    certificate: dict[str, object] = {"kind": COUNTS, "slots": known.counts.slots, **known.counts.claims}
    source = COUNTS_SOURCE
    if proving:
        certificate["kind"] = proving[0].kind
        first = next(argument for argument in ARGUMENTS if argument.kind == proving[0].kind)
        claims = {first.part: [], **claims}
        followers = [argument.part for argument in proving if argument is not first]
        source = " and ".join([first.source, *followers])
    return Bound(sum(terms.values()), source, terms, certificate | claims)


def evicting_bound(problem: Problem) -> Bound:
    """Bound every schedule, with or without evictions.

    An evicted request keeps its completion, and its later prefill computes prompt and completion again. So
    these hold as without evictions:

    - **slots by memory**: a running request holds its prompt at least;
    - **stages**: each request has a first prefill, and those of a stage are as many as slots at most, and fit
      the token cap and the KV capacity;
    - **decode steps**: those of one request follow one another, and a step serves each slot once and reads no
      more tokens than the KV capacity. A request reads the same tokens in its n-th step, evicted or not;
    - **seconds**: those of a stage do not fall with the tokens that it computes again.

    Two requests, lifting and all curves over the number of stages need one interval a request, so none of
    them is used. Arrival times are left out, which only lowers the bound.
    """
    params = BoundParams(off=tuple(row.name for row in COUNTED if not row.holds_under_evictions))
    bound = certified(Known.of(problem, least_counts(problem, params)))
    return replace(bound, source=EVICTING_SOURCE, certificate={**bound.certificate, "evictions": True})


def _next(arguments: list[Argument], known: Known, deadline: Deadline) -> Curve | None:
    """Return the first curve found, by the quickest argument first."""
    curves = (argument.prove(known, deadline) for argument in arguments)
    return next((curve for curve in curves if curve is not None), None)


def _arguments(task: Task) -> list[Argument]:
    """Return the arguments that apply and are worth the time."""
    names = [*(row.name for row in COUNTED), *(row.name for row in ARGUMENTS)]
    for name in task.params.off:
        if name not in names:
            raise InputError(f"there is no argument {name!r} of a bound; choose from {', '.join(names)}")
    if task.seconds < WASTE_SECONDS * len(task.lengths[0]):
        return []
    searches = [
        argument.of(task)
        for argument in ARGUMENTS
        if argument.name not in task.params.off
        and (task.problem.holds_whole_prompts or not argument.counts_whole_prompts)
    ]
    return [search for search in searches if search is not None]
