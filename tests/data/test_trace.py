"""Traces on disk: every stage and request comes back, and a line that is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.files.disk import InputError
from batchbound.data.trace import Stage, Trace, TraceHeader

COLUMNS = ("stage_of", "slot_of", "queued", "prefilled", "first_token", "finished", "tokens")
STAGES = (
    Stage("prefill", 0.0, 1.5, decode_steps=0, active=2, tokens=7, kv_tokens=0, padded_kv_tokens=0),
    Stage("decode", 1.5, 4.0, decode_steps=3, active=2, tokens=6, kv_tokens=27, padded_kv_tokens=30),
    Stage("prefill", 4.0, 4.25, decode_steps=0, active=1, tokens=2, kv_tokens=0, padded_kv_tokens=0),
    Stage("decode", 4.25, 5.0, decode_steps=1, active=1, tokens=1, kv_tokens=2, padded_kv_tokens=2),
)


def served() -> Trace:
    """Three requests on two slots, of which the last has not finished, and a fourth that never ran."""
    return Trace(
        ids=("a", "b", "c", "d"),
        slots=2,
        stages=STAGES,
        stage_of=np.array([0, 0, 2, -1]),
        slot_of=np.array([0, 1, 0, -1]),
        queued=np.array([0.0, 0.0, 0.5, 1.0]),
        prefilled=np.array([0.0, 0.0, 4.0, np.nan]),
        first_token=np.array([2.25, 2.25, 5.0, np.nan]),
        finished=np.array([4.0, 4.0, np.nan, np.nan]),
        tokens=np.array([3, 3, 1, 0]),
        evictions=5,
        engine={"name": "simulated", "versions": {"python": "3"}},
        readings=np.array([0.25, 0.125]),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    served().save(tmp_path / "trace.jsonl")
    return tmp_path / "trace.jsonl"


def changed(path: Path, line: int, **fields: Any) -> Path:
    """Change fields of one line of a file, counted from one."""
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | fields)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_comes_back_as_it_was_saved(path: Path) -> None:
    trace, back = served(), Trace.load(path)
    for name in ("ids", "slots", "stages", "evictions", "engine"):
        assert getattr(back, name) == getattr(trace, name), name
    for name in (*COLUMNS, "readings"):
        column = getattr(back, name)
        assert column.dtype == getattr(trace, name).dtype, name
        np.testing.assert_array_equal(column, getattr(trace, name), err_msg=name)


def test_a_file_is_a_header_and_a_line_for_each_stage_and_each_request(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {
        "batchbound_trace": 2,
        "slots": 2,
        "stages": 4,
        "requests": 4,
        "evictions": 5,
        "engine": {"name": "simulated", "versions": {"python": "3"}},
        "readings": [0.25, 0.125],
    }
    assert [line["kind"] for line in lines[1:5]] == ["prefill", "decode", "prefill", "decode"]
    assert [line["id"] for line in lines[5:]] == ["a", "b", "c", "d"]
    assert lines[8]["finished"] is None
    assert lines[8]["stage_of"] == -1


def test_sizes_of_a_trace_are_those_of_its_stages() -> None:
    trace = served()
    assert len(trace) == 4
    assert trace.makespan == 5.0
    assert trace.prefill_stages == 2
    assert trace.decode_steps == 4
    assert [stage.seconds for stage in trace.stages] == [1.5, 2.5, 0.25, 0.75]


def test_an_engine_with_nothing_to_do_has_a_trace_of_nothing(tmp_path: Path) -> None:
    Trace.empty(3).save(tmp_path / "trace.jsonl")
    trace = Trace.load(tmp_path / "trace.jsonl")
    assert (len(trace), trace.slots, trace.stages, trace.evictions) == (0, 3, (), 0)
    assert (trace.makespan, trace.prefill_stages, trace.decode_steps) == (0.0, 0, 0)
    assert [getattr(trace, name).dtype.kind for name in COLUMNS] == list("iiffffi")


def test_a_stage_costs_what_the_model_says_of_its_tokens_steps_and_reads() -> None:
    cost = CostModel(10.0, 2.0, 3.0, 0.5, decode_per_kv_token=0.25, decode_per_change=100.0)
    prefill, decode = STAGES[:2]
    assert prefill.model_seconds(cost) == prefill.model_seconds(cost, overheads=False) == 10 + 2 * 7
    # Three decode steps of two slots; then 27 tokens read, or 30 with the padding, and a change of the batch.
    assert decode.model_seconds(cost, overheads=False) == 3 * (3 + 0.5 * 2) + 0.25 * 27
    assert decode.model_seconds(cost) == 3 * (3 + 0.5 * 2) + 0.25 * 30 + 100


def test_a_decode_stage_has_steps_and_a_prefill_stage_need_not() -> None:
    with pytest.raises(ValueError, match="a decode stage has no decode steps"):
        Stage("decode", 0.0, 1.0, 0, 1, 1, 1, 1)
    assert Stage("decode", 0.0, 1.0, 1, 1, 1, 1, 1).decode_steps == 1


def test_a_stage_that_ends_before_it_begins_is_refused_with_its_line(path: Path) -> None:
    with pytest.raises(InputError, match=r"trace.jsonl, line 3.*a stage ends before it begins"):
        Trace.load(changed(path, 3, start=1e9))


@pytest.mark.parametrize("readings", [[0.0], [-1.0], [np.inf], [np.nan], [1.0, 0.0], [[1.0]]])
def test_a_reading_of_the_machines_speed_is_a_positive_number_of_seconds(readings: list[Any]) -> None:
    with pytest.raises(ValueError, match="a reading of the machine's speed is not a number of seconds"):
        TraceHeader(1, 0, 0, 0, {}, np.array(readings))
    assert TraceHeader(1, 0, 0, 0, {}).readings.tolist() == []


@pytest.mark.parametrize(
    ("line", "field", "value", "said"),
    [
        (1, "slots", 0, "0 is not at least 1"),
        (1, "stages", -1, "-1 is not at least 0"),
        (1, "evictions", 0.5, "0.5 is not a whole number"),
        (1, "engine", "x", "'x' is not an object"),
        (1, "readings", ["x"], "is not a list of numbers"),
        (3, "kind", "idle", "'idle' is none of prefill, decode"),
        (3, "decode_steps", -1, "-1 is not at least 0"),
        (3, "start", "x", "'x' is not a number"),
        (3, "kv_tokens", None, "None is not a whole number"),
        (7, "id", 7, "7 is not a text"),
        (7, "stage_of", -2, "-2 is not at least -1"),
        (7, "stage_of", 4, "4 is not below 4"),
        (9, "stage_of", 9, "9 is not below 4"),
        (6, "slot_of", 2, "2 is not below 2"),
        (7, "slot_of", -2, "-2 is not at least -1"),
        (7, "queued", None, "None is not a number"),
        (7, "finished", "x", "'x' is not a number"),
        (7, "tokens", -1, "-1 is not at least 0"),
        (7, "tokens", 0, "0 tokens of a request that finished"),
    ],
)
def test_a_wrong_field_is_named_with_its_line_and_its_value(
    line: int, field: str, value: object, said: str, path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        Trace.load(changed(path, line, **{field: value}))
    assert str(caught.value).startswith(f"{path}, line {line}, field '{field}': ")
    assert said in str(caught.value)
    assert str(caught.value).endswith("Give the trace.jsonl that `batchbound run` wrote, or run again.")


def test_a_decode_stage_without_steps_is_refused_with_its_line(path: Path) -> None:
    with pytest.raises(InputError, match=r"trace.jsonl, line 3.*a decode stage has no decode steps"):
        Trace.load(changed(path, 3, decode_steps=0))


@pytest.mark.parametrize("more", [-4, -1, 1])
def test_a_file_of_other_lines_than_its_header_tells_of_is_refused(more: int, path: Path) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:more] if more < 0 else [*lines, lines[-1]]) + "\n")
    with pytest.raises(InputError, match=rf"{9 + more} lines, and its header tells of 9"):
        Trace.load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1"),
        ("[]\n", "is not an object"),
        ("{}\n", "not a batchbound trace"),
        ('{"batchbound_trace": 3}\n', "a batchbound trace of version 3, not 2"),
        (
            '{"batchbound_server_run": 1}\n',
            "not of a plan. `batchbound audit TRACE` reads it, and draws it with --html FILE",
        ),
        ('{"batchbound_trace": 1}\n{"kind"\n', "line 2: not valid JSON"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        Trace.load(tmp_path / "trace.jsonl")
    assert "\n" not in str(caught.value)
