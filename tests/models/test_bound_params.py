"""Every argument of a bound can be switched off by its name, and what is left is a bound."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from builders import UNIT, mostly_slow, problem_of

from batchbound.data.bound import Bound
from batchbound.data.files.disk import InputError
from batchbound.data.problem import Problem
from batchbound.models.bounds.least_counts import least_counts
from batchbound.models.bounds.params import BoundParams
from batchbound.models.bounds.prove import proven_bound
from batchbound.models.certificates.checker import verify_bound

SWITCHES = [field.name for field in fields(BoundParams) if field.type == "bool"]
NONE = replace(BoundParams(), **dict.fromkeys(SWITCHES, False))


def dear_stages() -> Problem:
    rng = np.random.default_rng(3)
    outputs = np.clip(rng.lognormal(4.5, 0.45, 100), 20, 300).astype(np.int64).tolist()
    return problem_of([50] * 100, outputs, 16, replace(UNIT, prefill_base=9.0))


PROBLEMS = {
    # Two of three slots' requests share a slot: 6 steps, where the mean load is 5.
    "lifting": problem_of([1, 1, 1], [3, 3, 4], 2, UNIT),
    # Prices of 6 and 10 refute numbers of steps that no average does.
    "dual_feasible_functions": problem_of([1] * 4, [5, 5, 5, 9], 2, UNIT),
    "kv_tokens": problem_of([1] * 8, [9] * 8, 8, UNIT, kv_capacity=12),
    "two_requests": problem_of([1, 1, 1], [10, 10, 2], 3, UNIT, kv_capacity=15),
    "stage_packing": problem_of([6, 6, 6, 5], [1] * 4, 4, UNIT, prefill_token_cap=10),
    # With 2 for a ten and 1 for a six, 35 steps hold requests worth 6 at most, and all are worth 13.
    "packing_prices": problem_of([1] * 8, [10] * 5 + [6] * 3, 2, UNIT),
    "difference_set": problem_of([1] * 6, [1, 2, 3, 4, 5, 6], 3, replace(UNIT, prefill_base=100.0)),
    "stage_intervals": dear_stages(),
    "memory_growth": problem_of([1] * 4, [6] * 4, 4, replace(UNIT, prefill_base=0.5), kv_capacity=12),
}


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "dual_feasible_functions"])
def test_an_argument_that_is_alone_proves_more_than_none(name: str) -> None:
    problem = PROBLEMS[name]
    alone = proven_bound(problem, 5.0, replace(NONE, growth_programmes=True, **{name: True}))
    assert alone.seconds > proven_bound(problem, 5.0, NONE).seconds
    assert verify_bound(problem, alone) is None


def test_dual_feasible_functions_prove_more_than_lifting() -> None:
    problem = problem_of([1] * 5, [7, 7, 7, 4, 4], 3, UNIT)
    without = replace(BoundParams(), dual_feasible_functions=False)
    assert least_counts(problem).decode_steps >= least_counts(problem, without).decode_steps


@cache
def _with_all(name: str) -> Bound:
    return proven_bound(PROBLEMS[name], 60.0)


@pytest.mark.parametrize("name", mostly_slow(SWITCHES, fast=("lifting", "stage_intervals")))
def test_a_bound_without_an_argument_is_no_more_and_is_proven(name: str) -> None:
    off = replace(BoundParams(), **{name: False})
    for job, problem in PROBLEMS.items():
        bound = proven_bound(problem, 60.0, off)
        assert bound.seconds <= _with_all(job).seconds * (1 + 1e-9)
        assert verify_bound(problem, bound) is None


def test_parameters_are_read_from_a_table(tmp_path: Path) -> None:
    file = tmp_path / "lean.toml"
    file.write_text("[bounds]\nstage_intervals = false\ngrowth_share = 0.5\n")
    assert BoundParams.from_file(file) == BoundParams(stage_intervals=False, growth_share=0.5)
    file.write_text("[search]\nbeam = false\n")
    assert BoundParams.from_file(file) == BoundParams()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[bounds]\nslot_ends = true\n", r"lean.toml: \[bounds\] has no parameter 'slot_ends'"),
        ("[bounds]\nlifting = 3\n", "lifting"),
        ("[bounds]\ntime_share = 0.0\n", "time_share"),
        ("bounds = 3\n", "bounds"),
        ("[bounds\n", "is no TOML file"),
    ],
)
def test_a_table_that_is_wrong_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lean.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        BoundParams.from_file(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.toml"):
        BoundParams.from_file(tmp_path / "absent.toml")
