"""What a configuration's iterations cost beside the model, on a profile small enough to add up by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.lengths.pair import LengthPair
from batchbound.data.workload import Workload
from batchbound.models.exegpt.configuration import ExecConfig, Strategy
from batchbound.models.exegpt.run_profile import can_hand_over, profile_of_run, seconds_after_encoding
from batchbound.models.exegpt.whole_model_profile import whole_model_profile
from batchbound.models.iterations.layer_cost import LayerCost
from batchbound.searching import timelines_of

PROMPTS = ("sequences", "length")


def timed(name: str, phase: str, axes: tuple[str, ...], seconds: dict[tuple[int, ...], float]) -> Operation:
    return Operation(name, phase, axes, np.array(list(seconds)), np.array(list(seconds.values())))


@pytest.fixture
def profile() -> LayerProfile:
    """One layer, 1 ms a prompt token and 10 ms a decode step; two workers lose half of what they share."""
    operations = (
        timed("layer", "encode", ("tokens",), {(0,): 0.0, (100,): 0.1}),
        timed("layer", "decode", ("tokens",), {(0,): 0.010, (100,): 0.010}),
        timed("change", "run", ("decodes", "context"), {(2, 10): 0.001, (8, 10): 0.001}),
        timed("leave", "run", ("sequences",), {(0,): 0.0, (100,): 0.2}),
        timed("loop", "run", ("sequences",), {(0,): 0.0005, (100,): 0.0005}),
        timed("send", "run", PROMPTS, {(1, 10): 0.003, (8, 10): 0.003}),
        timed("join", "run", PROMPTS, {(1, 10): 0.002, (8, 10): 0.009}),
        timed("crowding", "run", ("decodes",), {(2,): 0.5, (8,): 0.5}),
    )
    shape = ModelShape("tiny", 1, 8, 1, 1, 8, 8, 8)
    return LayerProfile(shape, "here", 1e9, 1, operations, "made up")


def test_one_worker_pays_for_what_leaves_and_for_changes(profile: LayerProfile) -> None:
    cost = LayerCost(profile_of_run(profile, 4.0))
    # 30 tokens, the loop, and three requests that will leave.
    assert sum(cost.encode(3, 10)) == pytest.approx(0.030 + 0.0005 + 3 * 0.002)
    kept = timed("keep", "run", ("sequences",), {(0,): 0.0, (100,): 0.1})
    keeping = LayerCost(profile_of_run(replace(profile, operations=(*profile.operations, kept)), 4.0))
    assert sum(keeping.encode(3, 10)) == pytest.approx(0.030 + 0.0005 + 3 * 0.003)
    # Of eight requests that stay for four steps, one is done in a decode step with a chance of 1 - exp(-2).
    assert sum(cost.decode(8, 10)) == pytest.approx(0.010 + (0.001 + 0.0005) * (1 - np.exp(-2)))


def test_a_call_after_other_work_takes_longer(profile: LayerProfile) -> None:
    longer = timed("interrupted", "run", ("decodes",), {(2,): 0.001, (6,): 0.003})
    measured = replace(profile, operations=(*profile.operations, longer))
    cost, share = LayerCost(profile_of_run(measured, 4.0)), 1 - np.exp([-8 / 4, -2 / 4])
    # Beyond the batches it was measured at it stays as it is.
    assert sum(cost.decode(8, 10)) == pytest.approx(0.010 + (0.0015 + 0.003) * share[0])
    assert sum(cost.decode(2, 10)) == pytest.approx(0.010 + (0.0015 + 0.001) * share[1])
    start = timed("start", "run", ("decodes", "context"), {(2, 10): 0.004, (8, 10): 0.004})
    warming = timed("warming", "run", ("decodes", "context"), {(2, 10): 0.0, (8, 10): 0.0})
    measured = replace(measured, operations=(*measured.operations, start, warming))
    first = seconds_after_encoding(profile_of_run(measured, 4.0), np.array([8.0]), 10.0, 1)
    assert first == pytest.approx(0.004 + 0.0005 + 0.003 - (0.0015 + 0.003) * share[0])
    # Two workers know what passes between iterations by measuring it themselves.
    pair = [LayerCost(profile_of_run(each, 4.0, handed_over=True)) for each in (profile, measured)]
    assert sum(pair[0].decode(8, 10)) == sum(pair[1].decode(8, 10))


def test_iterations_after_an_encoding_take_longer(profile: LayerProfile) -> None:
    more = (
        timed("start", "run", ("decodes", "context"), {(2, 10): 0.004, (8, 10): 0.004}),
        timed("warming", "run", ("decodes", "context"), {(2, 10): 0.007, (8, 10): 0.007}),
    )
    measured = replace(profile, operations=(*profile.operations, *more))
    ran = profile_of_run(measured, 4.0)
    # Of the change and the loop, a share of 1 - exp(-2) is counted with every iteration already.
    first = 0.004 + 0.0005 - 0.0015 * (1 - np.exp(-2))
    for decode_steps, beyond in {1: 0.0, 4: 0.003, 8: 0.007, 20: 0.007}.items():
        seconds = seconds_after_encoding(ran, np.array([8.0]), 10.0, decode_steps)
        assert seconds == pytest.approx(first + beyond), decode_steps
    assert seconds_after_encoding(profile_of_run(profile, 4.0), np.array([8.0]), 10.0, 8) == 0

    lengths = LengthPair.observed(Workload.from_lengths([10, 10], [3, 5]))
    config = ExecConfig(Strategy.RRA, 8, 20)
    long, short = (timelines_of([each], lengths, 1)[False](config) for each in (measured, profile))
    # All eight are done in their phase. How many run, on average over it, matters to what is counted already.
    added = seconds_after_encoding(profile_of_run(measured, 4.0), np.array([3.5]), 10.0, 20)
    assert 8 / long.throughput - 8 / short.throughput == pytest.approx(float(added[0]), rel=0.05)
    assert long.latency - short.latency == pytest.approx(float(added[0]), rel=0.05)


def test_two_workers_pay_for_handing_over_and_for_what_they_share(profile: LayerProfile) -> None:
    cost = LayerCost(profile_of_run(profile, 4.0, handed_over=True, input_tokens=10.0))
    assert sum(cost.encode(3, 10)) == pytest.approx(0.030 + 0.003)
    # Two of eight join: they leave once (4 ms), pass in 3 ms, and take the other worker 23 ms, half of which
    # would be lost; but no decode step of 11 ms loses more than a worker that is at work all the time takes.
    assert sum(cost.decode(8, 10)) == pytest.approx(0.011 + 0.004 + 0.003 + 0.011)
    # One of two joins in every other round: half of 2 ms, of the loop, of the leaving, and of 13 ms's half.
    assert sum(cost.decode(2, 10)) == pytest.approx(0.011 + 0.001 + 0.001 + 0.00025 + 0.00325)
    kept = timed("keep", "run", ("sequences",), {(0,): 0.0, (100,): 0.1})
    keeping = replace(profile, operations=(*profile.operations, kept))
    cost = LayerCost(profile_of_run(keeping, 4.0, handed_over=True, input_tokens=10.0))
    assert sum(cost.decode(8, 10)) == pytest.approx(0.011 + 0.006 + 0.003 + 0.011)
    # Where batches join, an iteration takes a millisecond longer for each of its requests.
    joined = timed("joined", "run", PROMPTS, {(1, 10): 0.001, (8, 10): 0.001})
    longer = replace(profile, operations=(*profile.operations[:-1], joined, _nothing_shared(profile)))
    cost = LayerCost(profile_of_run(longer, 4.0, handed_over=True, input_tokens=10.0))
    assert sum(cost.decode(8, 10)) == pytest.approx(0.011 + 0.004 + 0.003 + 0.008)
    assert sum(cost.decode(2, 10)) == pytest.approx(0.011 + 0.001 + 0.001 + 0.00025 + 0.001)


def _nothing_shared(profile: LayerProfile) -> Operation:
    return replace(profile.operations[-1], seconds=np.zeros(2))


def test_workers_that_share_nothing_lose_nothing(profile: LayerProfile) -> None:
    apart = replace(
        profile,
        operations=(*profile.operations[:-1], _nothing_shared(profile)),
    )
    cost = LayerCost(profile_of_run(apart, 4.0, handed_over=True, input_tokens=10.0))
    assert sum(cost.decode(8, 10)) == pytest.approx(0.011 + 0.004 + 0.003)


def test_waa_is_left_out_where_two_workers_were_not_measured(profile: LayerProfile) -> None:
    lengths = LengthPair.observed(Workload.from_lengths([10, 10], [3, 5]))
    assert list(timelines_of([profile], lengths, 2)) == [False, True]
    alone = replace(profile, operations=profile.operations[:-1])
    assert not can_hand_over(alone)
    assert list(timelines_of([alone], lengths, 2)) == [False]
    with pytest.raises(ValueError, match="what two workers cost: crowding"):
        profile_of_run(alone, 4.0, handed_over=True)


def test_a_profile_without_such_operations_is_run_as_it_is() -> None:
    profile = whole_model_profile(CostModel.paper(), "test")
    assert can_hand_over(profile)
    assert profile_of_run(profile, 20.0, handed_over=True) is profile
