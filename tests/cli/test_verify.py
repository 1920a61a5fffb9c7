"""A plan file that anybody has edited is refused in one line; no edit makes verify run on or fall over."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import PAPER, mostly_slow, problem_of, workload_of

from batchbound.cli import main
from batchbound.data.fleet import Fleet, Replica
from batchbound.data.plan import Plan
from batchbound.models.certificates.claims import MOST_STEPS, Work
from batchbound.planning.fleet import make_fleet_plan
from batchbound.planning.plan import make_plan
from batchbound.solvers.result import Limits

Value = dict[str, Any]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Value:
    """A plan of one machine with a gap, its bound one of differences."""
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(5, 60, 40).tolist(), rng.integers(1, 90, 40).tolist()
    problem = problem_of(prompts, outputs, 8, kv_capacity=900, prefill_token_cap=200)
    path = tmp_path_factory.mktemp("one") / "plan.json"
    make_plan(problem, limits=Limits(work=20)).save(path)
    plan: Value = json.loads(path.read_text())
    assert Plan.load(path).gap
    return plan


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Value:
    """A plan of two replicas that keep the requests of a group together."""
    workload = workload_of([9] * 12, list(range(4, 16)), group=[i // 3 for i in range(12)])
    fleet = Fleet(workload, (Replica(PAPER, 2), Replica(PAPER, 3)))
    path = tmp_path_factory.mktemp("several") / "plan.json"
    make_fleet_plan(fleet, groups="together", limits=Limits(work=1)).save(path)
    plan: Value = json.loads(path.read_text())
    return plan


def verified(plan: Value, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    (folder / "plan.json").write_text(json.dumps(plan))
    capsys.readouterr()
    status = main(["verify", str(folder / "plan.json")])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_plans_as_they_are_written_pass(
    one: Value, several: Value, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for plan in (one, several):
        status, out, err = verified(plan, tmp_path, capsys)
        assert (status, err) == (0, "")
        assert "the schedule breaks no rule" in out
        assert plan["bound"]["source"] in out


def put(place: str, value: object) -> Callable[[Value], None]:
    """Return the edit that puts a value, or what a function makes of the old one, in a place."""

    def edit(plan: Value) -> None:
        *steps, last = (int(step) if step.isdigit() else step for step in place.split("/"))
        inside: Any = plan
        for step in steps:
            inside = inside[step]
        inside[last] = value(inside[last]) if callable(value) else value

    return edit


def both(*edits: Callable[[Value], None]) -> Callable[[Value], None]:
    def edit(plan: Value) -> None:
        for each in edits:
            each(plan)

    return edit


def swapped(values: list[Any]) -> list[Any]:
    first, *others = values
    return [*others, first]


MORE_BOUND = both(put("bound/seconds", lambda s: s + 1), put("bound/terms/decode steps", lambda s: s + 1))
A_LITTLE_MORE = both(
    put("bound/seconds", lambda s: s + 0.01), put("bound/terms/decode steps", lambda s: s + 0.01)
)
"""Raises a bound that stays below its plan."""
SCHEDULE = "schedule/schedules/0"
REPLICA = "fleet/replicas/0"
WORKLOAD = "fleet/workload"

EDITS: dict[str, tuple[Callable[[Value], None], str]] = {
    "a bound raised": (put("bound/seconds", lambda s: s * 1.001), "terms add up"),
    "a bound raised with its terms": (A_LITTLE_MORE, "the certificate proves the bound"),
    "a bound raised above the plan": (MORE_BOUND, "above the plan's"),
    "a bound of no number": (put("bound/seconds", math.nan), "JSON"),
    "an endless bound": (put("bound/seconds", math.inf), "JSON"),
    "a bound in words": (put("bound/seconds", "9"), "field 'bound.seconds'"),
    "seconds moved between terms": (
        both(
            put("bound/terms/slot-steps", lambda s: s + 1), put("bound/terms/decode steps", lambda s: s - 1)
        ),
        "terms are those of the costs: 'slot-steps'",
    ),
    "a negative term": (
        both(put("bound/terms/decode steps", lambda s: -s), put("bound/seconds", lambda s: s)),
        "terms are seconds: 'decode steps'",
    ),
    "a bound called by another name": (put("bound/source", "divine insight"), "'divine insight'"),
    "a bound that is no bound": (put("bound/valid", False), "a bound is valid"),
    "a certificate of another kind": (put("bound/certificate/kind", "faith"), "'faith' is not"),
    "no certificate": (put("bound/certificate", {}), "a certificate"),
    "a certificate that is a list": (put("bound/certificate", [1]), "field 'bound.certificate'"),
    "a certificate of more stages": (put("bound/certificate/stages/at_least", 10**6), "1000000 claimed"),
    "a certificate of more decode steps": (
        put("bound/certificate/decode_steps/at_least", 10**6),
        "1000000 claimed",
    ),
    "a certificate of no slots": (put("bound/certificate/slots", -2), "slots is -2, less than 1"),
    "a certificate of parts": (put("bound/certificate/slots", 7.5), "slots is 7.5, not a whole number"),
    "a certificate nested deep": (put("bound/certificate/stages", [[[[1]]]]), "not a claim"),
    "no bound": (put("bound", None), "there is no bound to verify"),
    "a makespan made shorter": (put("makespan_s", lambda s: s * (1 - 1e-8)), "its schedule takes"),
    "a negative makespan": (put("makespan_s", lambda s: -s), "its schedule takes"),
    "a makespan in words": (put("makespan_s", "9"), "field 'makespan_s'"),
    "a makespan beyond numbers": (put("makespan_s", 10**400), "makespan_s|64 bits|JSON"),
    "cheaper decode steps": (put(f"{REPLICA}/cost/decode_base", lambda s: s / 2), "its schedule takes"),
    "negative costs": (put(f"{REPLICA}/cost/decode_base", -1.0), "decode_base"),
    "a cost of another name": (put(f"{REPLICA}/cost/decode_bass", 1.0), "decode_bass"),
    "fewer slots": (put(f"{REPLICA}/slots", 3), "slot"),
    "no slots": (put(f"{REPLICA}/slots", 0), "0 is not at least 1"),
    "endless slots": (put(f"{REPLICA}/slots", 10**12), "1,000,000"),
    "less memory": (put(f"{REPLICA}/kv_capacity", lambda c: c - 500), "KV capacity"),
    "memory for no request": (put(f"{REPLICA}/kv_capacity", 20), "kv_capacity"),
    "a smaller cap": (put(f"{REPLICA}/prefill_token_cap", 70), "token cap of a prefill stage"),
    "no replica": (put("fleet/replicas", []), "at least one replica"),
    "a replica more": (put("fleet/replicas", lambda r: r * 2), "1 schedules for 2 replicas"),
    "the first token at prefill": (put("fleet/prefill_emits_first_token", True), "takes|rule"),
    "the first token in words": (put("fleet/prefill_emits_first_token", "false"), "neither true nor false"),
    "a longer completion": (put(f"{WORKLOAD}/output_tokens/3", 500), "rule|takes"),
    "a completion of nothing": (put(f"{WORKLOAD}/output_tokens/3", 0), "output_tokens of request 3"),
    "an endless completion": (put(f"{WORKLOAD}/output_tokens/3", 2**62), "output_tokens of request 3"),
    "a completion of true": (put(f"{WORKLOAD}/output_tokens/3", True), "output_tokens"),
    "completions in another order": (put(f"{WORKLOAD}/output_tokens", swapped), "rule|takes"),
    "a longer prompt": (put(f"{WORKLOAD}/input_tokens/3", lambda n: n + 1), "rule|takes|terms"),
    "a request less": (put(f"{WORKLOAD}/output_tokens", lambda c: c[1:]), "output_tokens"),
    "no requests": (put(WORKLOAD, {"ids": [], "input_tokens": [], "output_tokens": []}), "no request"),
    "two requests of one name": (put(f"{WORKLOAD}/ids/1", "0"), "'0' also names request 0"),
    "a request that comes late": (put(f"{WORKLOAD}/arrival", [0.0] * 39 + [1e6]), "its schedule takes"),
    "a request of a group of words": (put(f"{WORKLOAD}/group", ["x"] * 40), "group"),
    "a bin less": (put(f"{SCHEDULE}/bin_of", lambda c: c[1:]), "every request is scheduled"),
    "a bin that is not there": (put(f"{SCHEDULE}/bin_of/0", 10**9), "prefilled in bin 1000000000"),
    "a bin before the first": (put(f"{SCHEDULE}/bin_of/0", -1), "prefilled in bin -1"),
    "a slot that is not there": (put(f"{SCHEDULE}/slot_of/0", 8), "prefilled in slot 8"),
    "a slot that is taken": (put(f"{SCHEDULE}/slot_of", [0] * 40), "one request per slot"),
    "endless decode steps": (put(f"{SCHEDULE}/decode_steps/0", 10**9), "decode steps are of use"),
    "decode steps beyond numbers": (put(f"{SCHEDULE}/decode_steps/0", 2**63 - 1), "decode steps are of use"),
    "negative decode steps": (put(f"{SCHEDULE}/decode_steps/0", -1), "-1 decode steps"),
    "decode steps in parts": (put(f"{SCHEDULE}/decode_steps/0", 0.5), "whole number"),
    "too few decode steps": (
        put(f"{SCHEDULE}/decode_steps", lambda c: [*c[:-1], 0]),
        "every request finishes",
    ),
    "no decode steps": (put(f"{SCHEDULE}/decode_steps", []), "prefilled in bin"),
    "requests of another replica": (put("schedule/replica_of/0", 1), "on replica 1 of 1"),
    "no schedule": (put(SCHEDULE, None), "replica 0 has requests and no schedule"),
    "optimal with a gap": (put("maker/status", "optimal"), "'optimal' is not proven"),
    "optimal in capitals": (put("maker/status", "OPTIMAL"), "'OPTIMAL' is not proven"),
    "optimal without a bound": (
        both(put("maker/status", "optimal"), put("bound", None)),
        "'optimal' is not proven.*there is no bound",
    ),
    "a status of our own": (put("maker/status", "blessed"), "neither optimal nor feasible"),
    "no maker": (put("maker", None), "field 'maker'"),
    "a later version": (put("batchbound_plan", 99), "version 99"),
    "a plan of something else": (put("batchbound_plan", None), "batchbound"),
}

FLEET_EDITS: dict[str, tuple[Callable[[Value], None], str]] = {
    "a group torn apart": (
        lambda plan: plan["fleet"]["workload"].update(group=[0] * 12),
        "a group stays together: replica",
    ),
    "groups that are spread": (put("groups", "spread"), "a group is spread: replica"),
    "groups of words": (put("groups", "apart"), "field 'groups'"),
    "a busier replica": (put(f"{REPLICA}/busy", 5.0), "its schedule takes"),
    "a replica faster": (put(f"{REPLICA}/cost/decode_base", 0.001), "takes|proves"),
    "a schedule less": (put("schedule/schedules", lambda s: s[:1]), "1 schedules for 2 replicas"),
    "a request on no replica": (put("schedule/replica_of/0", 7), "on replica 7 of 2"),
    "a request on both": (put("schedule/replica_of/0", lambda k: 1 - k), "rule"),
    "a fleet's bound raised": (
        both(put("bound/seconds", lambda s: s + 0.01), put("bound/terms/requests", lambda s: s + 0.01)),
        "proves the bound",
    ),
    "a fleet's bound raised above the plan": (
        both(put("bound/seconds", lambda s: s + 1), put("bound/terms/requests", lambda s: s + 1)),
        "above the plan's",
    ),
}


def refused(plan: Value, said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = verified(plan, folder, capsys)
    assert status in (1, 2), (out, err)
    assert out == ""
    assert err.count("\n") == 1, "one line"
    assert len(err) < 400
    assert re.search(said, err), err


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_plan_is_refused_in_one_line(
    name: str,
    one: Value,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "an enumeration of many":
        # It is refused after all the work that a check may take.
        monkeypatch.setattr(Work.__init__, "__defaults__", (MOST_STEPS // 50,))
    plan = copy.deepcopy(one)
    edit, said = EDITS[name]
    edit(plan)
    refused(plan, said, tmp_path, capsys)


@pytest.mark.parametrize("name", FLEET_EDITS)
def test_an_edited_plan_of_a_fleet_is_refused_in_one_line(
    name: str, several: Value, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = copy.deepcopy(several)
    edit, said = FLEET_EDITS[name]
    edit(plan)
    refused(plan, said, tmp_path, capsys)


VALUES: tuple[Any, ...] = (None, True, -1, 2**62, 1e300, "x", [], {}, [[None]])


def places(value: object, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where each part of a JSON value stands, of a list its first two entries."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value[:2])  # type: ignore[assignment]
    for name, entry in items:
        found += places(entry, (*at, name))
    return found


@pytest.mark.parametrize("part", mostly_slow(range(10), fast=[0]))
def test_whatever_stands_anywhere_verify_ends_and_says_one_thing(
    part: int, one: Value, several: Value, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = 0
    for plan in (one, several):
        for place in places(plan)[part::10]:
            for value in (*VALUES, "gone"):
                edited = copy.deepcopy(plan)
                inside: Any = edited
                for step in place[:-1]:
                    inside = inside[step]
                inside[place[-1]] = value
                if value == "gone":
                    del inside[place[-1]]
                status, out, err = verified(edited, tmp_path, capsys)
                tried += 1
                assert status in (0, 1, 2), (place, value)
                assert (status == 0) == (err == "") == (out != ""), (place, value)
                assert err.count("\n") <= 1, (place, value, err)
    assert tried > 80


@pytest.mark.parametrize(
    ("kind", "condition"),
    [
        ("cap", "if each completion is as long as its cap"),
        ("constant", "if completions are as long as expected"),
    ],
)
def test_a_bound_of_lengths_that_are_not_known_names_its_condition(
    one: Value, kind: str, condition: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = copy.deepcopy(one)
    plan["provenance"]["lengths"] = {"kind": kind}
    assert condition in verified(plan, tmp_path, capsys)[1]
    assert " if " not in verified(one, tmp_path, capsys)[1]
