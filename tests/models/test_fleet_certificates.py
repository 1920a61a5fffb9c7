"""Every claim of a fleet's certificate is judged, and the checker derives just what it proves."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import UNIT, problem_of, workload_of

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet, Replica
from batchbound.models.bounds.fleet import fleet_bound, request_costs
from batchbound.models.bounds.makespan import trivial_bound
from batchbound.models.certificates.checker import ROUNDING
from batchbound.models.certificates.claims import Work
from batchbound.models.certificates.fleet import verify_fleet_bound

SMALL = problem_of([1, 1, 1], [3, 3, 4], 2, UNIT)
SOUND = trivial_bound(SMALL)
QUICK, SLOW = Replica(UNIT, 2, busy=1.0), Replica(replace(UNIT, decode_base=2.0), 4)
PAIR = Fleet(workload_of([1, 1, 1], [4, 4, 2]), (QUICK, SLOW))
SHARES = {"kind": "fleet shares", "weights": [0.5, 0.5], "stage_by": "slots", "step_by": "slots"}
# Half of the second that is busy, and a half of the least share of each: (1 + n) / 2 and (1 + 2 n) / 4.
SHARED = 0.5 * 1.0 + 0.5 * (min(5 / 2, 9 / 4) + min(5 / 2, 9 / 4) + min(3 / 2, 5 / 4))


def shares(seconds: float = SHARED, **changes: object) -> Bound:
    return Bound(seconds, "shares of the fleet", {"requests": seconds}, {**SHARES, **changes})


def alone(seconds: float, request: object = 0) -> Bound:
    certificate = {"kind": "one request", "request": request}
    return Bound(seconds, "the longest request", {"one request": seconds}, certificate)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        (shares(SHARED * 1.01), "the certificate proves the bound"),
        (shares(weights=[0.5]), "weights: 1 weights for 2 replicas"),
        (shares(weights=[0.6, 0.5]), "weights: they add up to 1.1, more than one"),
        (shares(weights=[-0.5, 0.5]), "weights: -0.5 is negative or not finite"),
        (shares(weights=[math.inf, 0.5]), "weights: inf is negative or not finite"),
        (shares(weights=[True, 0]), "a certificate is readable: weights is True, not a number"),
        (shares(weights=["1", 0]), "a certificate is readable: weights is '1', not a number"),
        (shares(weights=1), "a certificate is readable: weights is 1, not a list"),
        (shares(stage_by="luck"), "shares: no argument is called 'luck' or 'slots'"),
        (shares(step_by="luck"), "shares: no argument is called 'slots' or 'luck'"),
        (shares(kind="faith"), "a certificate is of a known kind: 'faith' is not one of a fleet"),
        (replace(shares(), valid=False), "a bound is valid"),
        (replace(shares(), source="luck"), "a bound is called by its argument"),
        (alone(7.0), "the certificate proves the bound: it proves 6.0 s, the bound says 7.0 s"),
        (alone(6.0, 2), "the certificate proves the bound: it proves 4.0 s, the bound says 6.0 s"),
        (alone(6.0, 3), "one request: there is no request 3 of 3"),
        (alone(6.0, -1), "one request: request is -1, less than 0"),
        (alone(6.0, True), "a certificate is readable: request is True, not a whole number"),
    ],
)
def test_a_fleets_claims_are_judged(bound: Bound, message: str) -> None:
    assert verify_fleet_bound(PAIR, shares()) is None
    # One second busy, one of prefill and four decode steps; the slow replica takes nine.
    assert verify_fleet_bound(PAIR, alone(6.0)) is None
    assert str(verify_fleet_bound(PAIR, bound)).startswith(message)


def test_weights_may_exceed_one_by_rounding_and_no_more() -> None:
    fleet = Fleet(workload_of([1], [4]), (replace(QUICK, busy=0.5),))
    for weight, said in ((1 + ROUNDING, "None"), (1 + 2 * ROUNDING, "weights: they add up to 1.000000002")):
        assert str(verify_fleet_bound(fleet, shares(3.0, weights=[weight]))).startswith(said)


def test_a_share_of_a_request_is_counted_for_each_kind_of_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three requests on two kinds of replicas are six shares.
    checked = importlib.import_module("batchbound.models.certificates.fleet")
    monkeypatch.setattr(checked, "Work", lambda: Work(6))
    assert verify_fleet_bound(PAIR, shares()) is None
    monkeypatch.setattr(checked, "Work", lambda: Work(5))
    assert str(verify_fleet_bound(PAIR, shares())).startswith("a certificate is small")


def test_a_fleet_of_one_has_the_bounds_of_its_problem_unless_it_is_busy() -> None:
    fleet = Fleet.of(SMALL, 1)
    assert verify_fleet_bound(fleet, SOUND) is None
    busy = replace(fleet, replicas=(replace(fleet.replicas[0], busy=1.0),))
    assert (
        str(verify_fleet_bound(busy, SOUND))
        == "a certificate is of a known kind: 'trivial' is not one of a fleet"
    )
    assert str(verify_fleet_bound(Fleet.of(SMALL, 2), SOUND)).startswith("a certificate is of a known kind")


def test_a_request_alone_reads_its_keys_and_values() -> None:
    cost = replace(UNIT, decode_per_kv_token=0.5, decode_per_slot=0.25, prefill_per_token=0.125)
    fleet = Fleet(workload_of([4], [3]), (Replica(cost, 1), Replica(cost, 1)), prefill_emits_first_token=True)
    # A prefill of four tokens, then rounds over five and six.
    seconds = 1.5 + 2 * 1.25 + 0.5 * (5 + 6)
    assert verify_fleet_bound(fleet, alone(seconds)) is None
    assert verify_fleet_bound(fleet, alone(seconds + 0.001)) is not None


def test_a_longer_request_alone_reads_more_in_every_step() -> None:
    fleet = Fleet(workload_of([4], [4]), (Replica(replace(UNIT, decode_per_kv_token=0.5), 1),) * 2)
    seconds = 1 + 4 + 0.5 * (4 + 5 + 6 + 7)
    assert verify_fleet_bound(fleet, alone(seconds)) is None
    assert verify_fleet_bound(fleet, alone(seconds + 0.001)) is not None


def test_a_share_has_the_keys_and_values_that_a_request_reads() -> None:
    costs = replace(UNIT, decode_per_kv_token=0.5), replace(UNIT, decode_per_kv_token=1.0)
    fleet = Fleet(workload_of([4], [3]), (Replica(costs[0], 2), Replica(costs[1], 2)))
    # Half a stage, half of three steps, and 4 + 5 + 6 tokens read; the first replica is the cheaper one.
    seconds = 0.5 * ((1 + 3) / 2 + 0.5 * 15)
    assert verify_fleet_bound(fleet, shares(seconds)) is None
    assert verify_fleet_bound(fleet, shares(seconds + 0.001)) is not None


def test_of_replicas_alike_the_one_of_less_weight_counts() -> None:
    fleet = Fleet(workload_of([1], [4]), (Replica(UNIT, 2), Replica(UNIT, 2)))
    seconds = 0.25 * (1 + 4) / 2
    for weights in ([0.25, 0.75], [0.75, 0.25]):
        assert verify_fleet_bound(fleet, shares(seconds, weights=weights)) is None
        assert verify_fleet_bound(fleet, shares(seconds + 0.001, weights=weights)) is not None
    # A replica of no weight serves for nothing.
    assert verify_fleet_bound(PAIR, shares(1.0, weights=[1.0, 0])) is None
    assert verify_fleet_bound(PAIR, shares(1.001, weights=[1.0, 0])) is not None


def sharing_fleet(floor: float, cap: int | None) -> Fleet:
    """Return three requests, two with three shared tokens first, on a quick replica and a dear one."""
    cost = CostModel(1.0, 0.25, 1.0, 0.0, prefill_floor=floor)
    replicas = (
        Replica(cost, 2, prefill_token_cap=cap),
        Replica(replace(cost, prefill_per_token=0.5), 2, prefill_token_cap=cap),
    )
    work = workload_of([3 + 1, 3 + 2, 4], [3] * 3, group=[0, 0, -1])
    return Fleet(work.sharing([3, 3, 0]), replicas)


@pytest.mark.parametrize(
    ("stage_by", "floor", "cap", "prefill"),
    [
        # Half a stage each, the seven tokens that are a request's own, and once the three that are shared.
        ("slots", 3.0, 10, 3 / 2 + 0.25 * (7 + 3)),
        ("tokens", 3.0, 10, (0.25 + 1 / 10) * (7 + 3)),
        ("tokens", 3.0, None, 3 / 2 + 0.25 * (7 + 3)),
        # A full stage of ten tokens takes its floor.
        ("tokens", 4.0, 10, 4.0 / 10 * (7 + 3)),
        # The floor is there whatever the tokens.
        ("floor", 3.0, 10, 3 * 3 / 2),
    ],
)
def test_a_prompt_that_a_group_shares_is_counted_once_and_not_beside_a_floor(
    stage_by: str, floor: float, cap: int | None, prefill: float
) -> None:
    fleet = sharing_fleet(floor, cap)
    seconds = 0.5 * (prefill + 3 * 3 / 2)
    assert verify_fleet_bound(fleet, shares(seconds, stage_by=stage_by)) is None
    assert verify_fleet_bound(fleet, shares(seconds + 0.001, stage_by=stage_by)) is not None


@pytest.mark.parametrize(
    ("stage_by", "floor", "cap", "beyond"),
    [
        # Of prompts of 4, 7 and 12 tokens two are beyond the bend at 5, by 2 and 7 tokens.
        ("slots", 0.0, None, 9),
        ("tokens", 0.0, 20, 9),
        # Stages of at most 20 tokens take their floor whatever they compute.
        ("tokens", 90.0, 20, 0),
        ("floor", 90.0, None, 0),
    ],
)
def test_what_prompts_exceed_the_bend_by_is_counted_but_beside_a_floor(
    stage_by: str, floor: float, cap: int | None, beyond: int
) -> None:
    plain = CostModel(1.0, 0.25, 1.0, 0.0, prefill_floor=floor)
    bent = replace(plain, prefill_bend=5.0, prefill_per_token_beyond=2.0)

    def priced(cost: CostModel) -> float:
        fleet = Fleet.of(problem_of([4, 7, 12], [1, 1, 1], 2, cost, prefill_token_cap=cap), 2)
        replica = fleet.replicas[0]
        return float(request_costs(fleet, replica, stage_by, "slots").sum())  # type: ignore[arg-type]

    fleet = Fleet.of(problem_of([4, 7, 12], [1, 1, 1], 2, bent, prefill_token_cap=cap), 2)
    assert priced(bent) == pytest.approx(priced(plain) + 2.0 * beyond)
    assert verify_fleet_bound(fleet, shares(priced(bent) / 2, stage_by=stage_by)) is None
    assert verify_fleet_bound(fleet, shares(priced(bent) / 2 + 0.001, stage_by=stage_by)) is not None


def test_a_request_alone_may_find_what_its_group_shares_computed() -> None:
    fleet = sharing_fleet(0.0, None)
    # A stage with one token of its own, and three decode steps.
    assert verify_fleet_bound(fleet, alone(1.25 + 3)) is None
    assert verify_fleet_bound(fleet, alone(1.251 + 3)) is not None


@pytest.mark.parametrize("seed", range(60))
def test_the_checker_derives_what_a_fleets_bound_proves_and_no_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    outputs, prompts = rng.integers(1, 9, count), rng.integers(1, 9, count)
    largest = int((prompts + outputs).max())
    kinds = []
    for _ in range(int(rng.integers(1, 4))):
        base, token = rng.choice([0.0, 0.5, 2.0], 2).tolist()
        decode, slot = rng.choice([0.5, 1.0], 2).tolist()
        cost = CostModel(base, token, decode, slot, prefill_floor=float(rng.choice([0.0, 3.0])))
        limits: dict[str, Any] = {
            "kv_capacity": largest + int(rng.integers(0, 9)) if rng.random() < 0.5 else None,
            "prefill_token_cap": int(prompts.max()) + 3 if rng.random() < 0.5 else None,
        }
        kinds.append(Replica(cost, int(rng.integers(1, 4)), busy=float(rng.choice([0.0, 2.0])), **limits))
    replicas = tuple(kinds[k] for k in rng.integers(0, len(kinds), 3))
    fleet = Fleet(workload_of(prompts.tolist(), outputs.tolist()), replicas, bool(rng.random() < 0.5))
    bound = fleet_bound(fleet)
    assert verify_fleet_bound(fleet, bound) is None
    name = next(iter(bound.terms))
    more = {**bound.terms, name: bound.terms[name] + bound.seconds * 1e-6}
    higher = replace(bound, seconds=bound.seconds * (1 + 1e-6), terms=more)
    assert str(verify_fleet_bound(fleet, higher)).startswith("the certificate proves the bound")


BESIDE = CostModel(0.0, 0.0, 1.0, 0.25)
"""A decode step adds a quarter of a second beside a longer request, and half a second more without one."""
TWINS = Fleet(workload_of([1] * 4, [10, 6, 6, 6]), (Replica(BESIDE, 2),) * 2)
# With three quarters on the one that serves the longest, each of 28 steps costs 3/16 on either.
TWINS_SECONDS = 0.75 * 10 + 28 * 3 / 16


def beside(seconds: float = TWINS_SECONDS, **changes: object) -> Bound:
    certificate = {
        "kind": "decode steps and shares",
        "decode_steps": lifted(10),
        "cases": [{"replica": 0, "weights": [0.75, 0.25]}],
        "stage_by": "slots",
        "step_by": "slots",
    }
    name = "decode steps of one replica and shares of the fleet"
    return Bound(seconds, name, {"requests": seconds}, {**certificate, **changes})


def lifted(at_least: int, heaviest: int = 1, machines: int = 1) -> dict[str, object]:
    return {"at_least": at_least, "kind": "lifted", "heaviest": heaviest, "machines": machines}


def case(replica: object = 0, weights: object = (0.75, 0.25)) -> dict[str, object]:
    return {"replica": replica, "weights": list(weights) if isinstance(weights, tuple) else weights}


def test_one_replicas_decode_steps_and_what_is_left_for_the_others_prove_more_than_either() -> None:
    bound = fleet_bound(TWINS)
    # Alone the longest takes 12.5 s, and shares are 10.5 s on each. The best way takes 14: 10 and 6, 6 and 6.
    assert bound.source == "decode steps of one replica and shares of the fleet"
    assert bound.seconds == pytest.approx(TWINS_SECONDS) == 12.75
    assert verify_fleet_bound(TWINS, bound) is None
    assert verify_fleet_bound(TWINS, beside()) is None


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        (beside(TWINS_SECONDS * 1.001), "the certificate proves the bound"),
        (beside(cases=[]), "cases: none of 1 kinds of replicas"),
        (beside(cases=1), "a certificate is readable: cases is 1, not a list"),
        (beside(cases=[7]), "a certificate is readable: cases is 7, not a case"),
        (beside(cases=[case(2)]), "cases: there is no replica 2 of 2"),
        (beside(cases=[case(-1)]), "cases: replica is -1, less than 0"),
        (beside(cases=[case(True)]), "a certificate is readable: replica is True, not a whole number"),
        (beside(cases=[case(1)]), "the certificate proves the bound"),
        (beside(cases=[case(0, (0.75, 0.5))]), "weights: they add up to 1.25, more than one"),
        (beside(cases=[case(0, (0.75,))]), "weights: 1 weights for 2 replicas"),
        (beside(cases=[case(0, (1.25, -0.25))]), "weights: -0.25 is negative or not finite"),
        (beside(cases=[case(0, "all")]), "a certificate is readable: weights is 'all', not a list"),
        (
            beside(decode_steps=None),
            "a certificate is readable: decode_steps is None, not a claim about slots",
        ),
        (
            beside(decode_steps={"kind": "faith"}),
            "a certificate is readable: decode_steps is {'kind': 'faith'}",
        ),
        (beside(decode_steps=lifted(-1)), "decode_steps: at_least is -1, less than 0"),
        (beside(kind=["decode steps and shares"]), "a certificate is of a known kind"),
        (beside(0.001, cases=[case(0, (0.0, 0.0))]), "the certificate proves the bound"),
        (beside(decode_steps=lifted(11)), "decode_steps: 11 claimed, 10 proven"),
        (beside(decode_steps=lifted(10, machines=5)), "decode_steps: 5 of 4 slots cannot be chosen"),
        (beside(decode_steps=lifted(10, machines=0)), "decode_steps: machines is 0, less than 1"),
        (beside(decode_steps=lifted(10, heaviest=4)), "decode_steps: 10 claimed, 6 proven"),
        (beside(stage_by="luck"), "shares: no argument is called 'luck' or 'slots'"),
        (beside(step_by="luck"), "shares: no argument is called 'slots' or 'luck'"),
    ],
)
def test_claims_about_one_replicas_decode_steps_are_judged(bound: Bound, message: str) -> None:
    assert str(verify_fleet_bound(TWINS, bound)).startswith(message)


def test_every_kind_of_replica_may_be_the_one_of_most_decode_steps() -> None:
    unlike = replace(TWINS, replicas=(Replica(BESIDE, 2), Replica(BESIDE, 2, busy=1.0)))
    both = [case(0), case(1, (0.25, 0.75))]
    # The first case proves least: a quarter of the busy second.
    assert verify_fleet_bound(unlike, beside(TWINS_SECONDS + 0.25, cases=both)) is None
    assert verify_fleet_bound(unlike, beside(TWINS_SECONDS + 0.251, cases=both)) is not None
    assert str(verify_fleet_bound(unlike, beside(1.0, cases=both[:1]))).startswith("cases: none of 1 kinds")


def test_a_first_token_that_a_prefill_stage_gives_is_no_decode_step() -> None:
    fleet = replace(TWINS, prefill_emits_first_token=True)
    seconds = 0.75 * 9 + 24 * 3 / 16
    assert verify_fleet_bound(fleet, beside(seconds, decode_steps=lifted(9))) is None
    assert verify_fleet_bound(fleet, beside(seconds * 1.001, decode_steps=lifted(9))) is not None
    assert str(verify_fleet_bound(fleet, beside(seconds))) == "decode_steps: 10 claimed, 9 proven"


def test_a_check_of_many_cases_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = importlib.import_module("batchbound.models.certificates.fleet")
    monkeypatch.setattr(checked, "Work", lambda: Work(8))
    assert verify_fleet_bound(TWINS, beside()) is None
    assert str(verify_fleet_bound(TWINS, beside(cases=[case()] * 3))).startswith("a certificate is small")


def test_two_of_five_requests_share_one_of_four_slots() -> None:
    # Of five requests of 10 steps on the four slots of two replicas, two are on one: 20 steps.
    fleet = replace(TWINS, workload=workload_of([1] * 5, [10] * 5))
    bound = fleet_bound(fleet)
    assert bound.certificate["decode_steps"] == lifted(20, heaviest=5)
    # Three quarters of 20 steps, and 3/16 for each of 50. Three on one and two on the other take 27.5 s.
    assert bound.seconds == pytest.approx(0.75 * 20 + 50 * 3 / 16) == 24.375
    assert verify_fleet_bound(fleet, bound) is None
    fits = {**bound.certificate, "decode_steps": lifted(20, heaviest=4)}
    assert (
        str(verify_fleet_bound(fleet, replace(bound, certificate=fits)))
        == "decode_steps: 20 claimed, 10 proven"
    )


def test_of_several_cases_of_one_kind_of_replica_the_best_counts() -> None:
    weak = case(0, (1.0, 0.0))
    for cases in ([case(), weak], [weak, case()]):
        assert verify_fleet_bound(TWINS, beside(cases=cases)) is None


FIVE = Fleet(workload_of([1] * 5, [1] * 5), (Replica(UNIT, 2, busy=0.5), Replica(UNIT, 2)))
"""One replica takes three stages and three steps for all, so each of two takes three seconds on average."""


def in_turn(seconds: float = 3.25, **changes: object) -> Bound:
    alone = {**trivial_bound(FIVE.problem()).certificate, **changes}
    terms = {"what the replicas are busy with": 0.25, "prefill stages": 1.5, "decode steps": seconds - 1.75}
    return Bound(seconds, "replicas one after another", terms, {"kind": "one after another", "alone": alone})


def test_equal_replicas_take_no_less_than_one_that_does_all_in_their_place() -> None:
    bound = fleet_bound(FIVE)
    assert (bound.source, bound.seconds) == ("replicas one after another", 3.25)
    assert verify_fleet_bound(FIVE, bound) is None
    assert verify_fleet_bound(FIVE, in_turn()) is None
    assert str(verify_fleet_bound(FIVE, in_turn(3.26))).startswith("the certificate proves the bound")
    assert verify_fleet_bound(FIVE, in_turn(slots=1)) is not None
    unlike = Fleet(FIVE.workload, (Replica(UNIT, 2), Replica(UNIT, 3)))
    assert str(verify_fleet_bound(unlike, in_turn())).startswith("one after another: the replicas differ")
    sharing = Fleet(workload_of([2] * 5, [1] * 5, group=[0] * 5).sharing([1] * 5), FIVE.replicas)
    assert fleet_bound(sharing).source != bound.source
    assert str(verify_fleet_bound(sharing, in_turn())).startswith("one after another: requests share prompts")
