"""Names in one buffer: each is found again, sorted or not."""

from __future__ import annotations

from batchbound.data.prompts.names import Names


def test_names_are_found_in_the_dictionary_and_among_the_sorted() -> None:
    given = ["a", "", "äö", "\U0001f600", "aa", "b", "c"]
    names = Names(given, unsorted=3)
    assert list(names) == names[:] == given
    assert [names.find(name) for name in given] == list(range(7))
    assert [names.add(name) for name in ("äö", "c", "new", "new")] == [2, 6, 7, 7]
    assert (len(names), names[-1]) == (8, "new")
    assert None not in names
    assert "aaa" not in names
