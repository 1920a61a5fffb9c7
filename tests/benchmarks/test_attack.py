"""The standing attack finds nothing in what is sound, and finds what is not."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attack import forked_ray, journal_damage, mutators
from attack.tally import Book, Tally, table

from batchbound.executor.jobs import journal


@pytest.fixture(autouse=True)
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchbound.executor.jobs.journal.os.fsync", lambda _: None)


def test_every_bit_of_a_journal_is_flipped_and_loses_only_its_own_record(tmp_path: Path) -> None:
    tally = journal_damage.flip_bits(tmp_path, 5, random.Random(1), Tally("bits", ""))
    assert tally.violations == []
    journal_damage.write_journal(tmp_path / "again", 5, random.Random(1))
    assert tally.trials == 8 * (tmp_path / "again").stat().st_size


def test_a_journal_cut_anywhere_keeps_its_whole_records(tmp_path: Path) -> None:
    tally = journal_damage.cut(tmp_path, 8, random.Random(2), Tally("cuts", ""))
    assert tally.violations == []
    assert tally.trials > 1000


@pytest.mark.slow
def test_a_journal_without_checksums_would_be_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unchecked(line: bytes) -> dict[str, object] | None:
        try:
            value = json.loads(line)
        except ValueError:
            return None
        return {name: entry for name, entry in value.items() if name != "crc32"} if value else None

    monkeypatch.setattr(journal, "_checked", unchecked)
    assert journal_damage.flip_bits(tmp_path, 6, random.Random(3), Tally("bits", "")).violations


@pytest.mark.parametrize("form", [*mutators.FORMS, "binary"])
def test_the_same_seed_damages_alike_and_another_otherwise(form: str) -> None:
    sound = b'{"a": [1, 2.5, "x"], "b": {"c": null}}\n' * (1 if form == "json" else 4)
    damaged = [mutators.mutated(sound, form, random.Random(seed)) for seed in range(40)]
    assert damaged == [mutators.mutated(sound, form, random.Random(seed)) for seed in range(40)]
    assert len(set(damaged)) > 20
    assert sum(one != sound for one in damaged) > 30


def test_what_did_not_hold_is_counted_and_named() -> None:
    tally = Tally("kills", "all holds")
    tally.count("killed", 2)
    assert not tally.check(False, "one is two")
    assert tally.check(True, "never")
    assert table([tally]).splitlines()[-1] == "| kills | 2 | 2 killed | all holds | 1 |"


def test_counts_that_were_cut_off_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attack.tally.KEPT_EVERY", 0.0)
    book = Book(tmp_path / "counts.json", {"seed": 1})
    tally = book.open("kills", "all holds")
    for number in tally.numbers(100):
        tally.count("killed")
        tally.check(number != 3, "the third")
        if number == 6:
            break
    again = Book(tmp_path / "counts.json", {"seed": 1}).open("kills", "all holds")
    assert (again.trials, again.seen["killed"], again.violations) == (6, 6, ["the third"])
    # The trial that was under way is made again.
    assert list(again.numbers(9)) == [6, 7, 8]
    with pytest.raises(SystemExit, match="has other counts"):
        Book(tmp_path / "counts.json", {"seed": 2})


class Counter:
    """Counts in a process of its own."""

    def __init__(self, start: int) -> None:
        self._at = start

    def up(self, to: int) -> Iterator[int]:
        yield from range(self._at, to)

    def fail(self) -> None:
        raise ValueError("not this")

    def sleep(self) -> None:
        time.sleep(60)


def test_the_stand_in_for_ray_tells_values_errors_deaths_and_silence() -> None:
    actor = forked_ray.remote()(Counter).remote(2)
    stream = actor.up.remote(5)
    assert [forked_ray.get(one) for one in stream] == [2, 3, 4]
    with pytest.raises(forked_ray.RayTaskError, match="not this"):
        forked_ray.get(actor.fail.remote())
    silent = actor.sleep.remote()
    with pytest.raises(forked_ray.GetTimeoutError):
        forked_ray.get(silent, timeout=0.05)
    os.kill(actor.process, signal.SIGKILL)
    assert forked_ray.wait([silent], timeout=30)[0] == [silent]
    for reply in (silent, actor.up.remote(3)):
        with pytest.raises(forked_ray.RayActorError):
            forked_ray.get(reply)
    forked_ray.shutdown()
