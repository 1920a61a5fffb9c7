"""Layer profiles: their file, their readers, the traps in published data, and what is composed from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.files.disk import InputError
from batchbound.data.files.record import plain
from batchbound.data.readers.profile_readers import read_layer_profiles
from batchbound.models.iterations.layer_cost import Curve, LayerCost, Surface

SHAPE = ModelShape("m", 2, 8, 2, 2, 4, 16, 32)


def _operation(
    name: str, axes: tuple[str, ...], points: list[list[float]], seconds: list[float]
) -> Operation:
    return Operation(name, "both", axes, np.array(points), np.array(seconds))


def test_a_curve_is_linear_between_its_points_and_after_the_last() -> None:
    curve = Curve([1.0, 2.0, 4.0], [10.0, 20.0, 40.0])
    assert [curve(x) for x in (0.5, 1.5, 3.0, 8.0)] == [10.0, 15.0, 30.0, 80.0]
    assert curve.many(np.array([0.5, 1.5, 3.0, 8.0])).tolist() == [10.0, 15.0, 30.0, 80.0]


def test_a_surface_needs_no_full_grid() -> None:
    surface = Surface(np.array([[1, 0], [1, 10], [3, 0], [3, 4], [3, 10]]), np.array([0.0, 10, 0, 12, 30]))
    assert surface(1, 5) == 5
    assert surface(3, 5) == 15
    assert surface(2, 5) == 10
    assert surface(5, 5) == 25  # a line beyond the last


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=8))
def test_many_points_at_once_are_the_same_as_one_by_one(at: list[tuple[float, float]]) -> None:
    grid = np.array([[a, b] for a in (1.0, 4.0, 9.0) for b in (1.0, 3.0, 10.0)])
    surface = Surface(grid, grid[:, 0] * grid[:, 1] + grid[:, 0])
    first, second = np.array(at).T
    assert surface.many(first, second).tolist() == pytest.approx([surface(a, b) for a, b in at])


def test_an_iteration_is_the_sum_of_its_operations() -> None:
    dense = _operation("dense", ("tokens",), [[0.0], [100.0]], [1.0, 101.0])
    norm = Operation("norm", "both", ("tokens",), np.array([[1.0]]), np.array([0.5]), times=2)
    head = Operation("head", "both", ("sequences",), np.array([[1.0]]), np.array([7.0]), per_layer=False)
    cost = LayerCost(LayerProfile(SHAPE, "toy", 0.0, 1, (dense, norm, head), "made up"))
    assert cost.iteration(3, 50.0, []) == 2 * (1 + 3 + 2 * 0.5) + 7
    assert cost.iteration(3, 50.0, [(10, 0)]) == 2 * (1 + 13 + 2 * 0.5) + 7
    # A captured graph of 16 tokens computes for all of them.
    assert cost.iteration(3, 50.0, [(10, 0)], padded_tokens=16) == 2 * (1 + 16 + 2 * 0.5) + 7


def test_a_batch_of_prompts_pays_the_launch_of_its_attention_once() -> None:
    attention = Operation(
        "attention", "encode", ("length", "past"), np.array([[0.0, 0], [10, 0]]), np.array([1.0, 3])
    )
    cost = LayerCost(LayerProfile(SHAPE, "toy", 0.0, 1, (attention,), "made up"))
    assert cost.encode(4, 10)[0] == 1 + 4 * 2
    assert cost.encode_many([(10, 0), (5, 0)])[0] == 1 + 2 + 1


def test_a_profile_is_read_back_as_written(tmp_path: Path) -> None:
    dense = _operation("dense", ("tokens",), [[1.0], [2.0]], [0.1, 0.2])
    profile = LayerProfile(SHAPE, "toy", 5.0, 2, (dense,), "made up", False, {"torch": "2"}, ("careful",))
    profile.save(tmp_path / "p.json")
    read = LayerProfile.load(tmp_path / "p.json")
    assert plain(read) == plain(profile)


def test_a_damaged_profile_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"batchbound_layer_profile": 1, "shape": {}}')
    with pytest.raises(InputError, match=r"p\.json, field "):
        LayerProfile.load(path)
    path.write_text("{}")
    with pytest.raises(InputError, match="not a batchbound layer profile"):
        LayerProfile.load(path)


def test_an_operation_with_a_negative_time_is_refused() -> None:
    with pytest.raises(ValueError, match="negative or not finite"):
        _operation("dense", ("tokens",), [[1.0]], [-1.0])


def test_a_shape_counts_its_weights() -> None:
    shape = ModelShape.from_config(
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
        | {"intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16"}
    )
    assert shape.weight_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert shape.layers * shape.kv_bytes_per_layer_token == 131072


def test_a_folder_that_names_no_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="DEVICE-MODEL-tpN"):
        read_layer_profiles(tmp_path / "nonsense")


@pytest.mark.parametrize("degree", [1, 2])
def test_the_measured_layer_profiles_make_plausible_iterations(degree: int, public_data: Path) -> None:
    profile = read_layer_profiles(public_data / "layer_profiles" / f"RTXPRO6000-Llama-3.1-8B-tp{degree}")
    assert profile.shape.layers == 32
    seconds = LayerCost(profile).iteration(1, 100, [])
    # Reading 16 GB of weights takes most of it.
    assert 0.007 / degree < seconds < 0.014 / degree
    assert bool(profile.warnings) == (degree > 1)
