"""The standing attack finds nothing in what is sound, and finds what is not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from attack import journal_damage, mutators
from attack.tally import Tally, as_json, table

from batchbound.executor.runs import journal


@pytest.fixture(autouse=True)
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchbound.executor.runs.journal.os.fsync", lambda _: None)


def test_every_bit_of_a_journal_is_flipped_and_loses_only_its_own_record(tmp_path: Path) -> None:
    tally = journal_damage.flip_bits(tmp_path, 10, random.Random(1))
    assert tally.violations == []
    journal_damage.write_journal(tmp_path / "again", 10, random.Random(1))
    assert tally.trials == 8 * (tmp_path / "again").stat().st_size


def test_a_journal_cut_anywhere_keeps_its_whole_records(tmp_path: Path) -> None:
    tally = journal_damage.cut(tmp_path, 8, random.Random(2))
    assert tally.violations == []
    assert tally.trials > 1000


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
    assert journal_damage.flip_bits(tmp_path, 6, random.Random(3)).violations


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
    (row,) = json.loads(as_json([tally], 7))["attacks"]
    assert row["violations"] == ["one is two"]
