"""A bound states a gap to itself, and proves a makespan only up to rounding."""

from __future__ import annotations

import pytest

from batchbound.data.bound import PROVEN_WITHIN, Bound


def test_a_gap_is_a_share_of_the_bound() -> None:
    assert Bound(8.0, "some argument").gap(10.0) == 0.25
    assert Bound(8.0, "some argument").gap(8.0 * (1 + 1e-13)) == 0.0


@pytest.mark.parametrize(
    "bound", [Bound(0.0, "nothing"), Bound(1e-320, "next to nothing"), Bound(8.0, "printed", valid=False)]
)
def test_there_is_no_gap_to_what_is_no_positive_bound(bound: Bound) -> None:
    with pytest.raises(ValueError, match="so it has no gap"):
        bound.gap(10.0)


def test_a_makespan_is_proven_where_it_is_the_bound_up_to_rounding() -> None:
    bound = Bound(8.0, "some argument")
    assert bound.proves(8.0)
    assert bound.proves(8.0 * (1 + 0.9 * PROVEN_WITHIN))
    assert not bound.proves(8.0 * (1 + 1.1 * PROVEN_WITHIN))
    assert not Bound(8.0, "printed", valid=False).proves(8.0)
    assert Bound(0.0, "nothing").proves(0.0)
