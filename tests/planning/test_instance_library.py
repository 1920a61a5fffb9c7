"""The instance library: every schedule is valid, and an independent check derives every bound again."""

from __future__ import annotations

import json

import pytest

from batchbound.cli import main
from batchbound.comparing.instance_library import suite, suites
from batchbound.comparing.result import BEST_KNOWN
from batchbound.comparing.runner import compare
from batchbound.data.files.disk import InputError
from batchbound.judging import verify
from batchbound.solvers.result import Limits

INSTANCES = [
    pytest.param(name, each, marks=() if number == 0 else pytest.mark.slow)
    for name in suites()
    for number, each in enumerate(suite(name))
]
"""The first of each suite is fast."""


@pytest.mark.parametrize(("name", "instance"), INSTANCES)
def test_the_best_known_schedule_and_bound_hold(name: str, instance: str) -> None:
    plan = suite(name)[instance]
    assert plan.problem.decode_steps.size <= 1_400
    assert plan.gap is not None
    assert plan.gap >= 0
    assert verify(plan) is None


def test_a_comparison_on_a_suite_begins_with_the_best_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--suite", "paper", "--solvers", "policy:lpt", "--json", "--quiet"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    known = suite("paper")
    assert [row["instance"] for row in rows[::2]] == [f"paper/{name}" for name in known]
    for best, other in zip(rows[::2], rows[1::2], strict=True):
        plan = known[best["instance"].removeprefix("paper/")]
        assert (best["solver"], best["value"], best["gap"]) == (BEST_KNOWN, plan.makespan, plan.gap)
        assert (other["solver"], other["bound"]) == ("policy:lpt", None)
        assert other["gap"] == pytest.approx(other["value"] / best["bound"] - 1)


def test_gaps_are_to_the_best_bound_known_however_little_time_there_is() -> None:
    known = {"table3-0": suite("paper")["table3-0"]}
    first, ours = compare(known, ["lpt-ski"], Limits(seconds=0.1)).rows
    assert ours.bound is not None
    assert first.bound is not None
    assert ours.bound <= first.bound
    assert ours.gap == pytest.approx(ours.value / first.bound - 1) if ours.value else False


def test_an_unknown_suite_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match="no suite 'papers' of instances") as refused:
        suite("papers")
    assert "paper" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "paper", "--slots", "4"], "--slots has no effect with --suite"),
        (["table3:0:9", "--suite", "paper"], "a file has no effect with --suite"),
        ([], "missing: FILE. Name files, or --suite NAME of"),
    ],
)
def test_what_a_suite_decides_itself_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *options]) == 2
    assert message in capsys.readouterr().err
