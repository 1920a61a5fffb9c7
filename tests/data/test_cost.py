"""What stages cost, by hand; scalars and arrays agree."""

from __future__ import annotations

import math
from dataclasses import fields
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchbound.data.costs.cost import CostModel

MODEL = CostModel(
    prefill_base=2.0,
    prefill_per_token=0.5,
    decode_base=1.0,
    decode_per_slot=0.25,
    prefill_floor=4.0,
    decode_per_kv_token=0.125,
    prefill_bend=10.0,
    prefill_per_token_beyond=0.75,
)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(0, 4.0), (3, 4.0), (4, 4.0), (6, 5.0), (10, 7.0), (12, 2.0 + 6.0 + 1.5)],
)
def test_a_prefill_stage_has_a_floor_and_a_bend(tokens: int, seconds: float) -> None:
    assert MODEL.prefill_seconds(tokens) == seconds
    assert MODEL.prefill_seconds(np.array([tokens])).tolist() == [seconds]


def test_a_decode_step_pays_for_slots_and_for_what_they_hold() -> None:
    assert MODEL.decode_seconds(4) == 2.0
    assert MODEL.decode_seconds(4, 16) == 4.0
    assert MODEL.decode_seconds(np.array([4, 0]), np.array([16, 0])).tolist() == [4.0, 1.0]


def test_the_papers_costs() -> None:
    paper = CostModel.paper()
    assert paper.prefill_seconds(100) == pytest.approx(0.025 + 0.013)
    assert paper.decode_seconds(200) == pytest.approx(0.029 + 0.042)


def test_free_prefill_leaves_decode_steps_as_they_are() -> None:
    free = MODEL.with_free_prefill()
    assert free.prefill_seconds(1000) == 0.0
    assert free.decode_seconds(4, 16) == MODEL.decode_seconds(4, 16)


@pytest.mark.parametrize("name", [entry.name for entry in fields(CostModel)])
@pytest.mark.parametrize("value", [-0.001, math.nan, math.inf, 1e13, True, "1", Decimal(1)])
def test_a_coefficient_that_no_cost_has_is_refused(name: str, value: Any) -> None:
    coefficients: dict[str, Any] = {
        "prefill_base": 0.0,
        "prefill_per_token": 0.0,
        "decode_base": 0.0,
        "decode_per_slot": 0.0,
    }
    CostModel(**{**coefficients, name: 0.0})
    with pytest.raises(ValueError, match=rf"CostModel\.{name} is .*; it must be finite and not negative"):
        CostModel(**{**coefficients, name: value})


@given(st.integers(0, 50), st.integers(0, 50))
def test_more_tokens_never_cost_less(tokens: int, more: int) -> None:
    assert MODEL.prefill_seconds(tokens) <= MODEL.prefill_seconds(tokens + more)
    assert MODEL.decode_seconds(tokens, more) <= MODEL.decode_seconds(tokens + 1, more + 1)
