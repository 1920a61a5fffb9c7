"""QueuePolicy rules: what each replica gets, checked by hand and by properties."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.arrays import IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet, Replica
from batchbound.data.workload import Workload
from batchbound.heuristics.dispatch import RULES, Units, dispatch

PAPER = Replica(CostModel.paper(), 4)
FAST = Replica(CostModel(0.0125, 0.000065, 0.0145, 0.000105), 4)


def fleet(answers: list[int], replicas: int = 2, prompts: list[int] | None = None) -> Fleet:
    return Fleet(Workload.from_lengths(prompts or [10] * len(answers), answers), (PAPER,) * replicas)


def loads(job: Fleet, replica_of: IntArray) -> list[float]:
    tokens = np.bincount(replica_of, weights=job.workload.output_tokens, minlength=len(job.replicas))
    return [float(total) for total in tokens]


def test_mico_deals_the_longest_groups_first_one_to_each_cloud() -> None:
    job = fleet([100, 100, 50, 50, 9, 9])
    replica_of = dispatch(job, "mico")
    assert loads(job, replica_of) == [159, 159]


def test_mico_gives_the_long_prompt_to_the_cloud_with_fewest_prompt_tokens() -> None:
    job = fleet([90, 90, 90, 90], prompts=[50, 10, 30, 20])
    replica_of = dispatch(job, "mico")
    prompts = np.bincount(replica_of, weights=job.workload.input_tokens)
    assert sorted(prompts.tolist()) == [40, 70]
    assert replica_of[0] != replica_of[2]


def test_mico_lets_the_borrowed_go_round() -> None:
    # Groups of three over two clouds: each group leaves one over, and the next group's first fills the row.
    job = fleet([90, 90, 90, 50, 50, 50, 10, 10, 10, 1])
    counts = np.bincount(dispatch(job, "mico"))
    assert counts.tolist() == [5, 5]


def test_round_robin_counts_and_knows_no_lengths() -> None:
    assert dispatch(fleet([100, 1, 100, 1]), "round-robin").tolist() == [0, 1, 0, 1]


def test_a_hash_sends_a_name_to_the_same_replica_every_time() -> None:
    job = fleet([5] * 200, replicas=4)
    first, again = dispatch(job, "hash"), dispatch(job, "hash")
    assert (first == again).all()
    assert np.bincount(first, minlength=4).min() > 20


def test_lpt_is_the_longest_first_to_the_least_loaded() -> None:
    job = fleet([8, 7, 6, 5, 4])
    assert sorted(loads(job, dispatch(job, "lpt"))) == [13, 17]


def test_differencing_splits_better_than_lpt() -> None:
    job = fleet([8, 7, 6, 5, 4], prompts=[1] * 5)
    assert sorted(loads(job, dispatch(job, "karmarkar-karp"))) == [14, 16]


@pytest.mark.parametrize("rule", ["round-robin", "mico", "lpt"])
def test_a_replica_of_twice_the_speed_takes_twice_the_work(rule: str) -> None:
    rng = np.random.default_rng(0)
    work = Workload.from_lengths(rng.integers(1, 90, 3000), rng.integers(1, 90, 3000))
    slow, fast = loads(job := Fleet(work, (PAPER, FAST)), dispatch(job, rule))
    assert fast / slow == pytest.approx(2, rel=0.06)


def test_a_busy_replica_takes_less() -> None:
    work = Workload.from_lengths([10] * 1000, [50] * 1000)
    later = Replica(PAPER.cost, PAPER.slots, busy=50.0)
    for rule in ("round-robin", "hash", "mico", "lpt"):
        free, busy = np.bincount(dispatch(Fleet(work, (PAPER, later)), rule)).tolist()
        per_request = 0.025 / 4 + 0.0013 + 50 * (0.029 / 4 + 0.00021)
        assert (free - busy) * per_request == pytest.approx(50.0, rel=0.25 if rule == "hash" else 0.02)


def test_differencing_refuses_replicas_that_differ() -> None:
    with pytest.raises(ValueError, match="differ"):
        dispatch(Fleet(Workload.from_lengths([1, 1], [2, 2]), (PAPER, FAST)), "karmarkar-karp")


def grouped(answers: list[int], groups: list[int], replicas: int = 2) -> Fleet:
    plain = Workload.from_lengths([10] * len(answers), answers)
    work = Workload(plain.ids, plain.input_tokens, plain.output_tokens, group=np.array(groups))
    return Fleet(work, (PAPER,) * replicas)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_group_can_be_kept_together(rule: str) -> None:
    job = grouped([9, 8, 7, 6, 5, 4, 3], [0, 0, 0, 1, 1, -1, -1])
    replica_of = dispatch(job, rule, groups="together")
    assert len(set(replica_of[:3].tolist())) == len(set(replica_of[3:5].tolist())) == 1


def test_a_group_can_be_spread() -> None:
    job = grouped([9, 8, 7, 6, 5, 4], [0, 0, 0, 1, 1, 1], replicas=3)
    replica_of = dispatch(job, groups="spread")
    assert sorted(replica_of[:3].tolist()) == sorted(replica_of[3:].tolist()) == [0, 1, 2]


def test_rules_that_cannot_spread_say_so() -> None:
    with pytest.raises(ValueError, match="does not spread"):
        dispatch(fleet([1, 2]), "mico", groups="spread")
    with pytest.raises(ValueError, match="no dispatch rule"):
        dispatch(fleet([1, 2]), "best")


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    replicas=st.integers(1, 5),
    rule=st.sampled_from(sorted(RULES)),
)
def test_every_request_goes_to_one_replica(answers: list[int], replicas: int, rule: str) -> None:
    replica_of = dispatch(fleet(answers, replicas), rule)
    assert replica_of.shape == (len(answers),)
    assert replica_of.min() >= 0
    assert replica_of.max() < replicas
    if rule in ("round-robin", "mico"):
        assert np.ptp(np.bincount(replica_of, minlength=replicas)) <= 1


@settings(max_examples=30, deadline=None)
@given(answers=st.lists(st.integers(1, 20), min_size=1, max_size=7), replicas=st.integers(1, 3))
def test_lpt_keeps_grahams_guarantee(answers: list[int], replicas: int) -> None:
    job = fleet(answers, replicas)
    units = Units.of(job, np.arange(len(job)))
    seconds = units.costs[0]

    def makespan(replica_of: IntArray) -> float:
        return float(np.bincount(replica_of, weights=seconds).max())

    best = min(makespan(np.array(way)) for way in product(range(replicas), repeat=len(answers)))
    assert makespan(dispatch(job, "lpt")) <= best * (4 / 3 - 1 / (3 * replicas)) + 1e-9
