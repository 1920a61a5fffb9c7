"""What the study of rollouts says of its losses."""

from __future__ import annotations

from rollouts import BASELINE, CLAIRVOYANT, summary, table


def test_a_share_of_no_loss_is_not_said() -> None:
    found = summary([{BASELINE: 0.0, "learned": 0.0, CLAIRVOYANT: 0.0}])
    assert [row["recovered"] for row in found.values()] == [None, None, None]
    assert "| learned | none lost (+0.0%, 0%) |" in table({"one slot each": {"given order": found}})


def test_half_of_the_loss_is_recovered() -> None:
    found = summary([{BASELINE: 0.2, "learned": 0.1, CLAIRVOYANT: 0.0}])
    assert [row["recovered"] for row in found.values()] == [0.0, 0.5, 1.0]
    assert "| learned | 50% (-8.3%, 0%) |" in table({"some": {"given order": found}})
