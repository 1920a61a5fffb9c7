"""Every argument of a bound can be switched off by its name, and what is left is a bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from builders import UNIT, mostly_slow, problem_of, tree_of, workload_of

from batchbound.data.bound import Bound
from batchbound.data.files.disk import InputError
from batchbound.data.problem import Problem
from batchbound.models.bounds import prove
from batchbound.models.bounds.argument import Argument, Curve, Known, Task
from batchbound.models.bounds.least_counts import COUNTED
from batchbound.models.bounds.params import BoundParams
from batchbound.models.bounds.prove import ARGUMENTS, proven_bound
from batchbound.models.certificates import checker
from batchbound.models.certificates.checker import Check, Counted, verify_bound
from batchbound.models.certificates.checker import Curve as CheckedCurve
from batchbound.models.certificates.claims import Work
from batchbound.models.deadline import Deadline

NAMES = [*(row.name for row in COUNTED), *(row.name for row in ARGUMENTS)]
NONE = BoundParams(off=tuple(NAMES))
NONE_OF_MORE = BoundParams(off=(*NAMES, "pigeonhole"))


def dear_stages() -> Problem:
    rng = np.random.default_rng(3)
    outputs = np.clip(rng.lognormal(4.5, 0.45, 100), 20, 300).astype(np.int64).tolist()
    return problem_of([50] * 100, outputs, 16, replace(UNIT, prefill_base=9.0))


PROBLEMS = {
    # Two of three slots' requests share a slot: 6 steps, where the mean load is 5.
    "lifting": problem_of([1, 1, 1], [3, 3, 4], 2, UNIT),
    "kv_tokens": problem_of([1] * 8, [9] * 8, 8, UNIT, kv_capacity=12),
    # Four tokens beside a beginning of ten, held alone: 3 of each request over its two steps.
    "tree_area": Problem(
        workload_of([11] * 6, [2] * 6, tree=tree_of([-1], [10], [0] * 6, [1] * 6)), UNIT, 6, kv_capacity=14
    ),
    "two_requests": problem_of([1, 1, 1], [10, 10, 2], 3, UNIT, kv_capacity=15),
    "stage_packing": problem_of([6, 6, 6, 5], [1] * 4, 4, UNIT, prefill_token_cap=10),
    # With 2 for a ten and 1 for a six, 35 steps hold requests worth 6 at most, and all are worth 13.
    "packing_prices": problem_of([1] * 8, [10] * 5 + [6] * 3, 2, UNIT),
    "difference_set": problem_of([1] * 6, [1, 2, 3, 4, 5, 6], 3, replace(UNIT, prefill_base=100.0)),
    "stage_intervals": dear_stages(),
    "memory_growth": problem_of([1] * 4, [6] * 4, 4, replace(UNIT, prefill_base=0.5), kv_capacity=12),
}


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_that_is_alone_proves_more_than_none(name: str) -> None:
    problem = PROBLEMS[name]
    alone = proven_bound(problem, 5.0, BoundParams(off=tuple(other for other in NAMES if other != name)))
    assert alone.seconds > proven_bound(problem, 5.0, NONE).seconds
    assert verify_bound(problem, alone) is None


def test_an_argument_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="there is no argument 'slot_ends' of a bound; choose from lift"):
        proven_bound(PROBLEMS["lifting"], 5.0, BoundParams(off=("slot_ends",)))


@cache
def _with_all(name: str) -> Bound:
    return proven_bound(PROBLEMS[name], 60.0)


@pytest.mark.parametrize("name", mostly_slow(NAMES, fast=("lifting", "stage_intervals")))
def test_a_bound_without_an_argument_is_no_more_and_is_proven(name: str) -> None:
    off = BoundParams(off=(name,))
    for job, problem in PROBLEMS.items():
        bound = proven_bound(problem, 60.0, off)
        assert bound.seconds <= _with_all(job).seconds * (1 + 1e-9)
        assert verify_bound(problem, bound) is None


def test_parameters_are_read_from_a_table(tmp_path: Path) -> None:
    file = tmp_path / "lean.toml"
    file.write_text("[bounds]\noff = ['stage_intervals']\ngrowth_share = 0.5\n")
    assert BoundParams.from_file(file) == BoundParams(off=("stage_intervals",), growth_share=0.5)
    file.write_text("[search]\nbeam = false\n")
    assert BoundParams.from_file(file) == BoundParams()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[bounds]\nslot_ends = true\n", r"lean.toml, field 'bounds.slot_ends': the field is unknown"),
        ("[bounds]\noff = 3\n", "off"),
        ("[bounds]\ntime_share = 0.0\n", "time_share"),
        ("bounds = 3\n", "bounds"),
        ("[bounds\n", "is not a TOML file"),
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


class Pigeonhole(Argument):
    """One more request than slots: the two shortest of the longest share a slot."""

    name = part = kind = source = "pigeonhole"

    def __init__(self, steps: int) -> None:
        self._steps = steps

    @classmethod
    def of(cls, task: Task) -> Self | None:
        longest = np.sort(task.problem.decode_steps)[::-1][: task.counts.slots + 1]
        return cls(int(longest[-2:].sum())) if len(longest) > task.counts.slots else None

    def prove(self, known: Known, deadline: Deadline) -> Curve | None:
        if self._steps <= known.cheapest[1]:
            return None
        return Curve(self.part, np.full(len(known.prefill), self._steps), self._steps)


def pigeonhole_curves(counted: Counted, certificate: Mapping[str, Any], work: Work) -> list[CheckedCurve]:
    longest = sorted(counted.problem.decode_steps.tolist(), reverse=True)[: counted.slots + 1]
    proven = sum(longest[-2:]) if len(longest) > counted.slots else 0
    return [lambda stages: min(proven, *certificate["pigeonhole"])]


def test_an_argument_is_a_row_of_the_proofs_and_a_row_of_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, params = PROBLEMS["lifting"], BoundParams(off=tuple(NAMES))
    monkeypatch.setattr(prove, "ARGUMENTS", (*ARGUMENTS, Pigeonhole))
    check = Check("pigeonhole", "pigeonhole", "pigeonhole", pigeonhole_curves)
    monkeypatch.setattr(checker, "CHECKS", (*checker.CHECKS, check))
    bound = proven_bound(problem, 5.0, params)
    assert bound.certificate["pigeonhole"] == [6]
    assert bound.source == "pigeonhole"
    assert bound.seconds > proven_bound(problem, 5.0, NONE_OF_MORE).seconds
    assert verify_bound(problem, bound) is None
    terms = {**bound.terms, "decode steps": bound.terms["decode steps"] + 1}
    forged = {**bound.certificate, "pigeonhole": [7]}
    refused = verify_bound(
        problem, replace(bound, seconds=bound.seconds + 1, terms=terms, certificate=forged)
    )
    assert refused is not None
    assert refused.rule == "the certificate proves the bound"
