"""What devices that share a model tell each other costs what a ring takes, and is in every composed cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchbound.data.costs.communication import exchange_seconds, experts_apart, with_all_reduce
from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.link import LINKS, Link, usual_link
from batchbound.data.costs.model_shape import ModelShape
from batchbound.models.iterations.layer_cost import LayerCost

SHAPE = ModelShape("m", 3, 8, 2, 2, 4, 16, 32, experts=4, active_experts=1, expert_intermediate=8)
LINK = Link("toy", 1000.0, 0.25, "made up")


def profile(degree: int) -> LayerProfile:
    points, seconds = np.array([[1.0], [100.0]]), np.array([1.0, 1.0])
    operations = tuple(Operation(name, "both", ("tokens",), points, seconds) for name in ("dense", "moe"))
    return LayerProfile(SHAPE, "toy", 0.0, degree, operations, "made up", warnings=("no link",))


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_a_ring_sends_each_part_of_the_array_round_twice(devices: int) -> None:
    part = 1200.0 / devices
    steps = sum(part / LINK.bandwidth for _ in range(2 * (devices - 1)))
    assert LINK.all_reduce_seconds(devices, 1200.0) == pytest.approx(LINK.latency + steps)
    assert LINK.gather_seconds(devices, 1200.0) == pytest.approx(LINK.latency + steps / 2)


def test_one_device_tells_nobody_anything() -> None:
    assert LINK.all_reduce_seconds(1, 1e9) == LINK.gather_seconds(1, 1e9) == 0.0
    alone = profile(1)
    assert with_all_reduce(alone, LINK) is alone


def test_an_iteration_adds_up_two_arrays_a_layer_the_embedding_and_the_logits() -> None:
    apart, shared = LayerCost(profile(2)), LayerCost(with_all_reduce(profile(2), LINK))
    more = shared.iteration(5, 10.0, []) - apart.iteration(5, 10.0, [])
    hidden, logits = 5 * 8 * 2, 5 * 32 * 2
    expected = (3 * 2 + 1) * (0.25 + hidden / 1000) + 0.25 + logits / 2 / 1000
    assert more == pytest.approx(expected)
    assert with_all_reduce(profile(2), LINK).warnings == ()


def test_squares_of_queries_and_keys_are_added_up_where_their_norm_is_over_all_heads() -> None:
    across = replace(profile(2), shape=replace(SHAPE, norm_across=True))
    more = LayerCost(with_all_reduce(across, LINK)).iteration(5, 10.0, [])
    more -= LayerCost(with_all_reduce(profile(2), LINK)).iteration(5, 10.0, [])
    assert more == pytest.approx(3 * (0.25 + 5 * 8 / 1000))


def test_gathered_sums_of_experts_are_told_once_instead_of_twice() -> None:
    added, gathered = (LayerCost(with_all_reduce(profile(2), LINK, gathered=how)) for how in (False, True))
    less = added.iteration(5, 10.0, []) - gathered.iteration(5, 10.0, [])
    assert less == pytest.approx(3 * (5 * 8 * 2 / 2 / 1000))


def test_experts_stand_apart_from_the_rest() -> None:
    own, experts = map(LayerCost, experts_apart(profile(1)))
    assert own.iteration(5, 10.0, []) == pytest.approx(3.0)
    assert experts.dense(10, 0, prompts=False) == pytest.approx(3.0)


def test_a_token_and_its_route_are_told_and_its_sum_comes_back() -> None:
    told = 8 * 2 + 8 + 8 * 2
    assert exchange_seconds(SHAPE, LINK, [5, 5]) == pytest.approx(3 * (2 * 0.25 + 5 * told / 1000))
    # The device with a token of its own hears of nine.
    assert exchange_seconds(SHAPE, LINK, [9, 1]) == pytest.approx(3 * (2 * 0.25 + 9 * told / 1000))
    assert exchange_seconds(SHAPE, LINK, [7]) == 0.0


@pytest.mark.parametrize(
    ("device", "link"),
    [
        ("RTXPRO6000", "pcie5-rtxpro6000"),
        ("H100", "nvlink4"),
        ("A100-80GB", "nvlink3"),
        ("RTX 4090", "pcie4"),
        ("H100-80GB-HBM3", "nvlink4"),
        ("RTX PRO 6000 Blackwell", "pcie5-rtxpro6000"),
    ],
)
def test_the_usual_link_of_a_device_is_found_under_its_names(device: str, link: str) -> None:
    assert usual_link(device) == LINKS[link]


@pytest.mark.parametrize("device", ["toy", "", "A10", "A4000", "H20", "RTX", "A100-PCIE-40GB"])
def test_a_device_whose_name_only_begins_alike_has_no_usual_link(device: str) -> None:
    assert usual_link(device) is None


def test_a_link_takes_what_was_measured_for_arrays_of_every_size() -> None:
    # NCCL between two RTX PRO 6000, LLMServingSim's hardware.yaml: bytes, microseconds.
    all_reduce = {4096: 12.7, 65536: 14.8, 2**18: 21.7, 2**20: 41.0, 2**22: 124.9, 20 * 2**20: 587.1}
    link = LINKS["pcie5-rtxpro6000-nccl"]
    for data, measured in all_reduce.items():
        assert link.all_reduce_seconds(2, data) == pytest.approx(measured * 1e-6, rel=0.11)
    # A gather and a scatter of each device's 256 KiB, what 64 tokens of 2,048 values are.
    both = 2 * link.gather_seconds(2, 2 * 2**18)
    assert both == pytest.approx((18.8 + 21.1) * 1e-6, rel=0.05)


def test_the_usual_link_is_one_that_fits_whole_runs() -> None:
    link = usual_link("RTXPRO6000")
    assert link is not None
    assert (link.bandwidth, link.latency) == (16e9, 20e-6)


def test_every_known_link_says_where_its_figures_are_from() -> None:
    assert all(name == link.name and len(link.source) > 20 for name, link in LINKS.items())


def test_a_link_without_bandwidth_is_none() -> None:
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        Link("bad", 0.0, 0.0, "nowhere")
