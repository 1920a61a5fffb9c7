"""Independent check of a bound, by the simplest code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...data.bound import Bound
from ...data.iterations import EngineLimits
from ...data.problem import Problem
from ...data.schedule import Violation
from .beginnings import Beginnings
from .claims import RefutedError, Work, entries, fullest_slot, prices, unreadable, whole, wholes
from .memory_growth import proven_by_growth
from .reads import tokens_read
from .stage_intervals import checked_intervals
from .states import check_no_cheaper

Curve = Callable[[int], int]
"""Least decode steps by the number of prefill stages."""

WHOLE_PROMPTS = ("KV tokens over capacity", "growth")
"""Claims that are false where requests hold shared beginnings once."""

ROUNDING = 1e-9
"""Tolerated relative error of floating-point sums."""


def verify_bound(problem: Problem, bound: Bound) -> Violation | None:
    """Return an error in a bound, or None if it is proven.

    The checker shares no code with the bounds. It derives every count again from the requests, checks prices
    by a knapsack over all loads, and checks the least waste by shortest paths. It refuses a certificate that
    takes more than :data:`~batchbound.models.certificates.claims.MOST_STEPS` steps to check.
    """
    return judged(bound, lambda: proven_seconds(problem, bound))


def judged(bound: Bound, derive: Callable[[], float]) -> Violation | None:
    """Return an error if a bound exceeds what ``derive`` proves."""
    if not bound.valid:
        return Violation(
            "a bound is valid", f"{bound.source!r} is a printed formula that bounds nothing in general"
        )
    for name, seconds in bound.terms.items():
        if not 0 <= seconds < math.inf:
            return Violation("terms are seconds", f"{name!r} is {seconds!r}")
    total = math.fsum(bound.terms.values())
    if not math.isclose(total, bound.seconds, rel_tol=ROUNDING):
        return Violation(
            "terms add up", f"the terms add up to {total!r} s, the bound says {bound.seconds!r} s"
        )
    try:
        proven = derive()
    except RefutedError as refuted:
        return Violation(*refuted.args)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return Violation("a certificate is readable", f"{type(error).__name__}: {error}")
    if bound.seconds > proven * (1 + ROUNDING):
        return Violation(
            "the certificate proves the bound", f"it proves {proven!r} s, the bound says {bound.seconds!r} s"
        )
    if bound.source != source_of(bound.certificate):
        what = f"{bound.source!r}, and its certificate proves {source_of(bound.certificate)!r}"
        return Violation("a bound is called by its argument", what)
    return None


def source_of(certificate: Mapping[str, Any]) -> str:
    """Return the name of the bound that a certificate proves.

    It is empty for an unknown kind.
    """
    kind = certificate["kind"]
    if kind == "trivial" and certificate.get("evictions") is True:
        return "fewest stages and decode steps, evictions allowed"
    first = next((check for check in CHECKS if check.kind == kind), None)
    if first is None:
        return _SOURCES.get(kind, "")
    followers = [check.part for check in CHECKS if check is not first and certificate.get(check.part)]
    return " and ".join([first.source, *followers])


_SOURCES = {
    "trivial": "fewest stages and decode steps",
    "states": "exhaustive search",
    "fleet shares": "shares of the fleet",
    "decode steps and shares": "decode steps of one replica and shares of the fleet",
    "one request": "the longest request",
    "one after another": "replicas one after another",
}


def proven_seconds(problem: Problem, bound: Bound) -> float:
    """Return the seconds that a bound's certificate proves."""
    work, certificate = Work(), bound.certificate
    _check_terms(problem, bound.terms)
    if "evictions" in certificate:
        _check_evictions(problem, certificate)
    if certificate["kind"] == "states":
        if problem.shares_prompts:
            raise RefutedError("states", "prompts that requests share are not tried stage by stage")
        check_no_cheaper(problem, bound.seconds * (1 - ROUNDING), work)
        return bound.seconds
    if certificate["kind"] not in ("trivial", *(check.kind for check in CHECKS)):
        raise RefutedError("a certificate is of a known kind", f"{certificate['kind']!r} is not")
    slots = _checked_slots(problem, whole(certificate, "slots", "slots", least=1))
    stages = _checked_stages(problem, slots, _object(certificate, "stages"), work)
    decode_steps = _checked_steps(problem, slots, _object(certificate, "decode_steps"), work)
    counted = Counted(problem, slots, decode_steps)
    curves = [
        curve
        for check in CHECKS
        if check.part in certificate or certificate["kind"] == check.kind
        for curve in check.curves(counted, certificate, work)
    ]
    return _cheapest(problem, stages, decode_steps, curves, work)


def _check_evictions(problem: Problem, certificate: Mapping[str, Any]) -> None:
    """Refuse arguments that evictions would break."""
    if certificate["evictions"] is not True:
        raise unreadable("evictions", certificate["evictions"], "true")
    kind = certificate["kind"]
    if kind == "trivial":
        claim = _object(certificate, "decode_steps")
        kind = claim["kind"]
        spread = claim.get("heaviest"), claim.get("machines")
        # The mean load of all slots, or the longest request.
        alone = kind == "lifted" and spread in ((len(problem), certificate["slots"]), (1, 1))
        if alone or kind in ("KV tokens over capacity", "tree area"):
            return
    raise RefutedError("evictions", f"{kind!r} does not hold of schedules that evict")


def _cheapest(problem: Problem, stages: int, decode_steps: int, curves: list[Curve], work: Work) -> float:
    """Return the least cost over all stages, with their proven steps."""
    seconds_of, best = _LeastSeconds(problem), math.inf
    for number in seconds_of.from_cheapest(stages):
        if seconds_of(number, decode_steps) >= best:
            break
        work.spend(len(curves))
        best = min(best, seconds_of(number, max([decode_steps, *(curve(number) for curve in curves)])))
    return best


def _check_terms(problem: Problem, terms: Mapping[str, float]) -> None:
    cost = problem.cost
    fixed = {
        "prompt tokens": cost.prefill_per_token * sum(_computed_once(problem)),
        "slot-steps": cost.decode_per_slot * sum(problem.decode_steps.tolist()),
        "KV reads": cost.decode_per_kv_token * _held_over_steps(problem),
    }
    for name, seconds in fixed.items():
        if not math.isclose(terms.get(name, 0.0), seconds, rel_tol=ROUNDING):
            raise RefutedError(
                "terms are those of the costs", f"{name!r} is {terms.get(name)!r}, not {seconds!r}"
            )


def _computed_once(problem: Problem) -> list[int]:
    """Return the tokens of all pieces, each computed in one stage.

    Those are the tokens that each request has for itself, and the shared beginnings. The stage of at least
    one of its requests computes the latter.
    """
    if problem.tree is None:
        return [*problem.workload.input_tokens.tolist()]
    return [*problem.tree.own.tolist(), *problem.tree.tokens.tolist()]


def _object(certificate: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    claim = certificate.get(name)
    if not isinstance(claim, Mapping):
        raise unreadable(name, claim, "a claim")
    return claim


def _checked_slots(problem: Problem, claimed: int) -> int:
    """Return the claimed slots, if memory allows no more requests."""
    prompts = sorted(_held_alone(problem))
    if claimed > problem.slots:
        raise RefutedError("slots", f"{claimed} claimed, there are {problem.slots}")
    if claimed >= min(problem.slots, len(prompts)):
        return claimed
    if problem.kv_capacity is None or sum(prompts[: claimed + 1]) <= problem.kv_capacity:
        raise RefutedError("slots", f"more than {claimed} requests can be in progress together")
    return claimed


def _checked_stages(problem: Problem, slots: int, claim: Mapping[str, Any], work: Work) -> int:
    """Return the claimed prefill stages, if no schedule has fewer."""
    claimed = whole(claim, "at_least", "stages")
    prompts = _held_alone(problem)
    pieces = _computed_once(problem)
    # Both the tokens that a stage computes and those that it holds are capped: two packings.
    computed, room = problem.prefill_token_cap or sum(pieces), problem.kv_capacity or sum(prompts)
    if claim["kind"] == "requests over slots":
        proven = math.ceil(len(prompts) / slots)
    elif claim["kind"] == "tokens over cap":
        proven = max(-(-sum(pieces) // computed), -(-sum(prompts) // room))
    elif claim["kind"] == "prices":
        packed, cap = (prompts, room) if claim.get("held") is True else (pieces, computed)
        cap = min(computed, room) if pieces == prompts else cap
        worth, capacity, limit = _checked_prices(packed, claim, work)
        if capacity < cap:
            raise RefutedError("prices", f"made for a capacity of {capacity}, not {cap}")
        proven = -(-worth // limit)
    else:
        raise RefutedError("stages", f"no argument is called {claim['kind']!r}")
    if claimed > proven:
        raise RefutedError("stages", f"{claimed} claimed, {proven} proven")
    return claimed


def _checked_steps(problem: Problem, slots: int, claim: Mapping[str, Any], work: Work) -> int:
    """Return the claimed decode steps, if no schedule has fewer."""
    claimed = whole(claim, "at_least", "decode_steps")
    _refuse_whole_prompts(problem, str(claim["kind"]))
    if claim["kind"] not in STEP_CHECKS:
        raise RefutedError("decode_steps", f"no argument is called {claim['kind']!r}")
    proven = STEP_CHECKS[claim["kind"]](problem, slots, claim, work)
    if claimed > proven:
        raise RefutedError("decode_steps", f"{claimed} claimed, {proven} proven")
    return claimed


def _held_alone(problem: Problem) -> list[int]:
    """Return the prompt tokens that a running request holds and shares with none."""
    prompts: list[int] = (
        problem.workload.input_tokens if problem.tree is None else problem.tree.own
    ).tolist()
    return prompts


def _refuse_whole_prompts(problem: Problem, argument: str) -> None:
    """Refuse an argument that counts shared beginnings once for each request."""
    if problem.tree is not None and argument in WHOLE_PROMPTS:
        raise RefutedError("memory", f"{argument!r} counts whole prompts, of which requests hold parts once")


def _steps_by_area(problem: Problem, slots: int, claim: Mapping[str, Any], work: Work) -> int:
    """Return the steps in which the KV capacity lets requests hold shared beginnings once."""
    if problem.tree is None or problem.kv_capacity is None:
        raise RefutedError("decode_steps", "there is no tree of shared beginnings under a KV capacity")
    limits = EngineLimits(slots, kv_tokens=problem.kv_capacity, block_tokens=1)
    first = int(problem.prefill_emits_first_token)
    work.spend(len(problem) + len(problem.tree.parent))
    return Beginnings.of_tree(problem.tree).least_iterations(problem.decode_steps.tolist(), limits, first)


def _lifted_steps(problem: Problem, slots: int, claim: Mapping[str, Any], work: Work) -> int:
    """Return the decode steps of the fullest slots."""
    return fullest_slot(problem.decode_steps.tolist(), slots, claim)


def _priced_steps(problem: Problem, slots: int, claim: Mapping[str, Any], work: Work) -> int:
    """Return the steps after those that prices refute."""
    worth, capacity, limit = _checked_prices(problem.decode_steps.tolist(), claim, work)
    if worth <= slots * limit:
        raise RefutedError("decode_steps", f"prices of {worth} fit {slots} slots of {limit}")
    return capacity + 1


def _steps_by_memory(problem: Problem, slots: int, claim: Mapping[str, Any], work: Work) -> int:
    """Return the steps in which the KV capacity lets all tokens be read."""
    kv_token_steps = _held_over_steps(problem)
    return -(-kv_token_steps // (problem.kv_capacity or kv_token_steps or 1))


def _steps_of_two(problem: Problem, slots: int, claim: Mapping[str, Any], work: Work) -> int:
    """Return the steps that two requests need under the capacity."""
    pair = wholes(claim, "requests", "decode_steps")
    if problem.kv_capacity is None or len(set(pair)) != 2 or max(pair) >= len(problem):
        raise RefutedError("decode_steps", f"{pair} are not two requests under a KV capacity")
    needed = []
    for ends_first, ends_last in (pair, pair[::-1]):
        decode_steps, last_steps = int(problem.decode_steps[ends_first]), int(problem.decode_steps[ends_last])
        prompts = [int(problem.prompt_tokens[request]) for request in (ends_first, ends_last)]
        if not decode_steps or not last_steps:
            return 0
        emitted = int(problem.prefill_emits_first_token)
        # The first to end holds this in its last step, and the other its first tokens and one more a step.
        peak = prompts[0] + emitted + decode_steps - 1
        room = problem.kv_capacity + _held_by_both(problem, pair) - peak - (prompts[1] + emitted)
        needed.append(decode_steps + last_steps - max(0, room + 1))
    return max(0, min(needed))


def _held_by_both(problem: Problem, pair: Sequence[int]) -> int:
    """Return the tokens of beginnings that two requests hold once."""
    if problem.tree is None:
        return 0
    paths = list[set[int]]()
    for request in pair:
        node, path = int(problem.tree.leaf[request]), set[int]()
        while node >= 0:
            path.add(node)
            node = int(problem.tree.parent[node])
        paths.append(path)
    return sum(int(problem.tree.tokens[node]) for node in paths[0] & paths[1])


def _checked_prices(weights: list[int], claim: Mapping[str, Any], work: Work) -> tuple[int, int, int]:
    """Return all items' price, a capacity, and its price limit."""
    price, capacity = prices(claim, "prices"), whole(claim, "capacity", "prices")
    limit = whole(claim, "limit", "prices", least=1)
    have = Counter(weights)
    if price.get(0, 0) > 0:
        raise RefutedError("prices", "an item of no weight fits any number of times, so it has no price")
    # A load takes a quarter of what other steps do.
    work.spend(capacity // 4)
    dearest = [0] * (capacity + 1)
    for weight, worth in price.items():
        if worth == 0:
            continue
        copies = min(have[weight], capacity // weight)
        if copies == capacity // weight:
            work.spend(capacity // 4)
            for load in range(weight, capacity + 1):
                dearest[load] = max(dearest[load], dearest[load - weight] + worth)
        else:
            work.spend(copies * capacity // 4)
            for _ in range(copies):
                for load in range(capacity, weight - 1, -1):
                    dearest[load] = max(dearest[load], dearest[load - weight] + worth)
    if dearest[capacity] > limit:
        raise RefutedError(
            "prices", f"items that fit in {capacity} have a price of {dearest[capacity]}, above {limit}"
        )
    return sum(price.get(weight, 0) * count for weight, count in have.items()), capacity, limit


def _held_over_steps(problem: Problem) -> int:
    first = int(problem.prefill_emits_first_token)
    rows = np.stack([problem.decode_steps, problem.prompt_tokens]).T.tolist()
    return sum(tokens_read(decode_steps, prompt + first) for decode_steps, prompt in rows)


class _LeastSeconds:
    """Least cost of a schedule by its stages and steps."""

    def __init__(self, problem: Problem) -> None:
        self.cost = problem.cost
        prompts, lengths = _computed_once(problem), problem.decode_steps.tolist()
        self.requests, self.tokens = len(lengths), sum(prompts)
        held_tokens = _held_over_steps(problem)
        self.work: float = (
            self.cost.decode_per_slot * sum(lengths) + self.cost.decode_per_kv_token * held_tokens
        )
        # A prompt exceeds the bend by the same tokens in any stage; the rest of it fills a stage up.
        bend = self.cost.prefill_bend
        self.beyond = math.fsum(p - bend for p in prompts if p > bend)
        self.within = math.fsum(min(p, bend) for p in prompts)

    def prefill(self, stages: int) -> float:
        beyond = self.beyond + max(0.0, self.within - stages * self.cost.prefill_bend)
        seconds: float = self.cost.prefill_base * stages + self.cost.prefill_per_token * self.tokens
        return max(seconds + self.cost.prefill_per_token_beyond * beyond, self.cost.prefill_floor * stages)

    def __call__(self, stages: int, decode_steps: int) -> float:
        return self.prefill(stages) + self.cost.decode_base * decode_steps + self.work

    def from_cheapest(self, stages: int) -> Sequence[int]:
        numbers = range(stages, self.requests + 1)
        return sorted(numbers, key=self.prefill) if self.cost.prefill_per_token_beyond > 0 else numbers


@dataclass(frozen=True)
class Counted:
    """Checked counts of a problem: most slots that requests hold, fewest decode steps."""

    problem: Problem
    slots: int
    decode_steps: int

    @cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """Positive decode steps, ascending, and the number of requests of each."""
        return sorted(Counter(n for n in self.problem.decode_steps.tolist() if n > 0).items())


def _difference_curves(counted: Counted, certificate: Mapping[str, Any], work: Work) -> list[Curve]:
    """Return the decode steps that stage differences need, by stages."""
    charges, have, slots = wholes(certificate, "charges", "charges"), counted.lengths, counted.slots
    if not have:
        return []
    relaxed = {charge: _relaxed_waste(have, charge, work) for charge in charges}
    longest, slot_steps = have[-1][0], sum(length * count for length, count in have)

    def needed(stages: int) -> int:
        work.spend(len(relaxed))
        near = _near_in_chain(stages, longest, counted.decode_steps)
        waste = max([0, *(value - charge * near for charge, value in relaxed.items())])
        return -(-(slot_steps + waste) // slots)

    return [needed]


def _near_in_chain(stages: int, distance: int, decode_steps: int) -> int:
    """Return how many pairs of points can be near.

    Step from the first point as far as less than the distance reaches, and on, to the end. Points of this
    chain two steps apart are too far apart to matter; any other point is too far from all of the chain but
    the point before it and the two after.
    """
    chain = decode_steps // distance + 1
    far = chain * (chain - 1) // 2 + max(0, stages - chain) * max(0, chain - 2)
    return max(0, (stages + 1) * stages // 2 - far)


def _relaxed_waste(have: list[tuple[int, int]], charge: int, work: Work) -> int:
    """Return the least waste plus charges of rounding lengths up."""
    cheapest = [0]
    for i in range(len(have)):
        last, waste, best = have[i][0], 0, math.inf
        for j in range(i, -1, -1):
            waste += have[j][1] * (last - have[j][0])
            if waste >= best:
                break
            best = min(best, waste + cheapest[j])
        work.spend(i - j + 1)
        cheapest.append(int(best) + (charge if i + 1 < len(have) else 0))
    return cheapest[-1]


def _interval_curves(counted: Counted, certificate: Mapping[str, Any], work: Work) -> list[Curve]:
    """Return the decode steps that prices of intervals prove, by stages."""
    return [
        checked_intervals(counted.lengths, counted.slots, claim, work).decode_steps
        for claim in entries({"intervals": [], **certificate}, "intervals")
    ]


def _growth_curves(counted: Counted, certificate: Mapping[str, Any], work: Work) -> list[Curve]:
    """Return the decode steps that values of memory states prove, by stages."""
    _refuse_whole_prompts(counted.problem, "growth")
    claim = _object(certificate, "growth")
    return [proven_by_growth(counted.problem, counted.slots, claim, work).steps]


class Check(NamedTuple):
    """Check of the claims of an argument.

    part: Field of a certificate with its claims.
    kind: Kind of a certificate that it leads.
    source: Name of a bound whose certificate it leads.
    curves: Function that returns the least decode steps by stages, or raises RefutedError.
    """

    part: str
    kind: str
    source: str
    curves: Callable[[Counted, Mapping[str, Any], Work], list[Curve]]


CHECKS = (
    Check("charges", "difference set", "difference set", _difference_curves),
    Check("growth", "growth", "growth", _growth_curves),
    Check("intervals", "difference set", "difference set", _interval_curves),
)
"""Checks of arguments by the number of stages; a certificate is called by the first of its kind."""

STEP_CHECKS: Mapping[str, Callable[[Problem, int, Mapping[str, Any], Work], int]] = {
    "lifted": _lifted_steps,
    "prices": _priced_steps,
    "KV tokens over capacity": _steps_by_memory,
    "tree area": _steps_by_area,
    "two requests": _steps_of_two,
}
"""Checks of decode steps that hold for any number of stages, by the kind of claim."""
