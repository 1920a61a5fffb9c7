"""A workload is read-only columns of one length, and names the row and the column of what it refuses."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pandas as pd
import pytest
from builders import workload_of

from batchbound.data.workload import COLUMNS, LATEST, LONGEST, Request, Workload, WorkloadError, numbered_ids


def test_columns_that_are_left_out_have_the_defaults_of_a_request() -> None:
    workload = workload_of([3, 4], [5, 6])
    assert workload[1] == Request("1", 4, 6)
    assert [request.id for request in workload] == ["0", "1"]
    assert len(workload) == 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input_tokens": [3, 0]}, "input_tokens of request 1: 0 must be at least one token"),
    ({"output_tokens": [0, 3]}, "output_tokens of request 0: 0 must be at least one token"),
    ({"output_tokens": [1, LONGEST + 1]}, "output_tokens of request 1: 2147483648 is beyond any model"),
    ({"output_tokens": [1, 10**400]}, "output_tokens of request 1: 10+ is beyond any model"),
    ({"input_tokens": [1.5, 1]}, "input_tokens of request 0: 1.5 must be a whole number"),
    ({"input_tokens": ["x", "y"]}, "input_tokens: is not a column of whole numbers"),
    ({"input_tokens": [1, float("nan")]}, "input_tokens of request 1: nan must be a whole number"),
    ({"output_tokens": [1]}, r"output_tokens: has \(1,\) values for 2 requests"),
    ({"output_tokens": [[1, 2]]}, r"output_tokens: has \(1, 2\) values for 2 requests"),
    ({"arrival": [0.0, -1.0]}, "arrival of request 1: -1.0 must be seconds, not negative"),
    ({"arrival": [float("nan"), 0.0]}, "arrival of request 0: nan must be seconds"),
    ({"arrival": [0.0, 2 * LATEST]}, "arrival of request 1: .* is too late"),
    ({"deadline": [-1.0, 1.0]}, "deadline of request 0: -1.0 must be seconds"),
    ({"group": ["x", "y"]}, "group: is not a column of whole numbers"),
    ({"group": [0.5, 1]}, "group of request 0: 0.5 must be a whole number"),
    ({"priority": [1, None]}, "priority"),
    ({"ids": ["a", "a"]}, "id of request 1: 'a' also names request 0"),
    ({"ids": ["a", "b\0"]}, r"id of request 1: 'b\\x00' holds the character NUL"),
    ({"ids": ["a\ud800", "b"]}, "id of request 0: .* holds half of a Unicode surrogate pair"),
    ({"ids": np.array(["ä😀", "\udfff"])}, "id of request 1: .* holds half of a Unicode surrogate pair"),
    ({"ids": ["a", None]}, "id of request 1: None is no name"),
    ({"ids": pd.array(["a", None], dtype="string")}, "id of request 1: <NA> is no name"),
    ({"arrival": np.array([1, 2], dtype="timedelta64[s]")}, r"arrival: .* not timedelta64\[s\]"),
    ({"deadline": ["soon", 2]}, "deadline: is not a column of numbers"),
    ({"input_tokens": np.array([1, 2], dtype="timedelta64[s]")}, "input_tokens: is not a column of whole"),
    ({"ids": ["a"]}, r"ids: has \(1,\) values for 2 requests"),
]


@pytest.mark.parametrize(("columns", "message"), REFUSED)
def test_what_no_request_has_is_refused(columns: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"ids": ["a", "b"], "input_tokens": [1, 2], "output_tokens": [3, 4]}
    Workload(**given)
    with pytest.raises(WorkloadError, match=message):
        Workload(**{**given, **columns})


def test_lengths_alone_are_whole_numbers_too() -> None:
    assert Workload.from_lengths([1.0, 2.0], np.array([3, 4], dtype=np.uint8)).input_tokens.tolist() == [1, 2]
    with pytest.raises(WorkloadError, match=r"output_tokens of request 1: 3.5 must be a whole number"):
        Workload.from_lengths([1, 2], [3, 3.5])
    with pytest.raises(WorkloadError, match=r"input_tokens of request 0: .* is beyond any model"):
        Workload.from_lengths([2**64], [1])
    with pytest.raises(WorkloadError, match="input_tokens: is not a column"):
        Workload.from_lengths(5, [1])


def test_the_largest_values_pass() -> None:
    workload = workload_of([LONGEST], [LONGEST], arrival=[LATEST], deadline=[float("inf")])
    assert workload.input_tokens.tolist() == [LONGEST]


def test_no_requests_are_refused() -> None:
    with pytest.raises(WorkloadError, match="there is no request"):
        workload_of([], [])


def test_columns_cannot_be_changed() -> None:
    lengths = np.array([1, 2])
    workload = Workload(np.array(["a", "b"]), lengths, lengths)
    for name in COLUMNS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(workload, name)[0] = 9


def test_a_part_and_other_lengths_keep_the_other_columns() -> None:
    workload = workload_of([3, 4, 5], [6, 7, 8], arrival=[0.0, 1.0, 2.0], group=[1, 2, 1])
    part = workload.select([2, 0])
    assert (part.ids.tolist(), part.group.tolist(), part.arrival.tolist()) == (["2", "0"], [1, 1], [2.0, 0.0])
    longer = workload.with_output_tokens([9, 9, 9])
    assert (longer.output_tokens.tolist(), longer.group.tolist()) == ([9, 9, 9], [1, 2, 1])
    assert workload.without_arrivals().arrival.tolist() == [0.0] * 3


def test_names_are_numbered() -> None:
    assert numbered_ids(2).tolist() == ["request-0", "request-1"]


def test_a_selection_names_no_request_twice_and_is_not_empty() -> None:
    workload = Workload.from_lengths([3, 4, 5], [1, 2, 3])
    assert workload.select([-1, 0]).input_tokens.tolist() == [5, 3]
    for chosen in ([0, 0], [2, -1], []):
        with pytest.raises(WorkloadError):
            workload.select(chosen)
    for none in ([True, False, True], [0.5, 1.0]):
        with pytest.raises(TypeError, match="indices are positions"):
            workload.select(none)


def test_a_frame_without_a_column_is_told_which() -> None:
    frame = pd.DataFrame({"id": ["a"], "input": [3], "output_tokens": [4]})
    with pytest.raises(WorkloadError, match=r"input_tokens: there is no such column among \['id', 'input'"):
        Workload.from_frame(frame)


def test_a_frame_may_have_names_as_its_index_and_none_of_them_is_missing() -> None:
    frame = pd.DataFrame({"input_tokens": [3, 4], "output_tokens": [5, 6]})
    named = Workload.from_frame(frame.set_index(pd.Index(["ü", "b"], name="id")))
    assert named.ids.tolist() == ["ü", "b"]
    assert Workload.from_frame(frame.set_index(pd.Index([7, 7]))).ids.tolist() == ["request-0", "request-1"]
    with pytest.raises(WorkloadError, match="id of request 1: nan is no name"):
        Workload.from_frame(frame.assign(id=pd.Series(["a", float("nan")])))
    with pytest.raises(WorkloadError, match=r"arrival: .* not timedelta64"):
        Workload.from_frame(frame.assign(arrival=pd.to_timedelta([1, 2], unit="s")))


def test_one_long_name_among_many_takes_no_room_for_the_others() -> None:
    names = [f"r{k}" for k in range(20_000)]
    names[7] = "x" * 40_000
    tracemalloc.start()
    work = Workload(np.array(names, dtype=np.object_), np.ones(20_000, int), np.ones(20_000, int))
    part = work.select(np.arange(10))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.ids[7] == names[7]
    assert most < 50e6, "as texts of fixed width the names take 3 GB"
