"""Keys and values promised in blocks, and lent."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.heuristics.serving.kv_ledger import KvLedger, KvLedgerError


def test_a_request_is_promised_whole_blocks() -> None:
    ledger = KvLedger(100, requests=2, block_tokens=32)
    assert ledger.blocks == 3
    assert ledger.grow(0, 33)
    assert (ledger.free, int(ledger.room[0])) == (1, 64)


def test_too_few_blocks_change_nothing_and_are_counted() -> None:
    ledger = KvLedger(96, requests=2, block_tokens=32)
    ledger.grow(0, 64)
    assert not ledger.grow(1, 33)
    assert (ledger.free, int(ledger.room[1]), ledger.failures) == (1, 0, 1)


def test_a_host_may_write_up_to_what_it_lent_until_the_guest_leaves() -> None:
    ledger = KvLedger(64, requests=3, block_tokens=1)
    ledger.grow(0, 32)
    ledger.grow(1, 4)
    ledger.lend(0, 1, start=16, tokens=16)
    assert ledger.room[:2].tolist() == [16, 20]
    assert ledger.free == 28
    ledger.release(1)
    assert ledger.room[:2].tolist() == [32, 0]


def test_russian_dolls_lend_what_they_borrowed() -> None:
    # Figure 7: a region of 32 tokens lends 16, of which the guest lends 8, and the left half lends 8.
    ledger = KvLedger(64, requests=4, block_tokens=1)
    for request in range(4):
        ledger.grow(request, 32 if request == 0 else 1)
    ledger.lend(0, 1, start=16, tokens=16)
    ledger.lend(1, 2, start=9, tokens=8)
    ledger.lend(0, 3, start=8, tokens=8)
    assert ledger.room.tolist() == [8, 9, 9, 9]
    assert ledger.first_guests(0) == [3]
    assert ledger.guests_of(0) == [2, 1, 3]


def test_blocks_of_a_host_that_is_done_are_kept_for_its_guest() -> None:
    ledger = KvLedger(64, requests=2, block_tokens=1)
    ledger.grow(0, 32)
    ledger.grow(1, 4)
    ledger.lend(0, 1, start=16, tokens=16)
    ledger.release(0)
    assert (ledger.free, int(ledger.room[1])) == (28, 20)
    ledger.release(1)
    assert ledger.free == 64


def test_a_guest_borrows_from_several_hosts() -> None:
    ledger = KvLedger(64, requests=3, block_tokens=1)
    ledger.grow(0, 20)
    ledger.grow(1, 10)
    ledger.lend(0, 2, start=15, tokens=5)
    ledger.lend(1, 2, start=7, tokens=3)
    ledger.lend(0, 2, start=10, tokens=5)
    assert ledger.room.tolist() == [10, 7, 13]
    ledger.release(2)
    assert ledger.room.tolist() == [20, 10, 0]


def test_a_guest_that_is_done_hands_its_own_guests_to_its_host() -> None:
    # The guest's 4 own places and 16 of its host's; its guest lies in both.
    ledger = KvLedger(64, requests=3, block_tokens=1)
    ledger.grow(0, 32)
    ledger.grow(1, 4)
    ledger.lend(0, 1, start=16, tokens=16)
    ledger.lend(1, 2, start=2, tokens=10)
    ledger.release(1)
    assert [(loan.host, loan.start, loan.tokens) for loan in ledger.loans[2]] == [(1, 2, 2), (0, 16, 8)]
    assert int(ledger.room[0]) == 16
    ledger.release(2)
    assert (ledger.free, int(ledger.room[0])) == (32, 32)


@pytest.mark.parametrize(("start", "tokens"), [(24, 9), (16, 16), (31, 0)])
def test_what_is_not_the_hosts_to_lend_is_refused(start: int, tokens: int) -> None:
    ledger = KvLedger(64, requests=3, block_tokens=1)
    ledger.grow(0, 32)
    ledger.lend(0, 1, start=30, tokens=2)
    with pytest.raises(KvLedgerError, match="cannot be lent"):
        ledger.lend(0, 2, start, tokens)


def test_holding_more_than_promised_is_found() -> None:
    ledger = KvLedger(64, requests=1, block_tokens=32)
    ledger.grow(0, 32)
    ledger.check(np.array([0]), np.array([32]))
    with pytest.raises(KvLedgerError, match=r"holds 33 tokens and may hold 32$"):
        ledger.check(np.array([0]), np.array([33]))


def ledger_of_two() -> KvLedger:
    ledger = KvLedger(64, requests=2, block_tokens=16)
    ledger.grow(0, 32)
    ledger.grow(1, 16)
    return ledger


def test_blocks_that_appear_or_vanish_are_found() -> None:
    ledger, nobody = ledger_of_two(), np.zeros(0, dtype=np.int64)
    ledger.check(nobody, np.zeros(2, dtype=np.int64))
    ledger.free += 1
    with pytest.raises(KvLedgerError, match="2 blocks free and 3 given of 4"):
        ledger.check(nobody, np.zeros(2, dtype=np.int64))
    ledger.free = 1
    ledger.own[1] = 0
    with pytest.raises(KvLedgerError, match="1 blocks free and 2 given of 4"):
        ledger.check(nobody, np.zeros(2, dtype=np.int64))
    ledger.own[1], ledger.free = 3, -1
    with pytest.raises(KvLedgerError, match="-1 blocks free and 5 given of 4"):
        ledger.check(nobody, np.zeros(2, dtype=np.int64))


def test_only_what_is_on_the_device_is_judged_and_the_first_that_holds_too_much_is_named() -> None:
    ledger = ledger_of_two()
    held = np.array([33, 17])
    ledger.check(np.array([0, 1]), np.array([32, 16]))
    ledger.check(np.zeros(0, dtype=np.int64), held)
    with pytest.raises(KvLedgerError, match="request 1 holds 17 tokens and may hold 16"):
        ledger.check(np.array([1]), held)
    with pytest.raises(KvLedgerError, match="request 0 holds 33 tokens and may hold 32"):
        ledger.check(np.array([0, 1]), held)


def test_a_host_that_writes_into_what_it_lent_is_found() -> None:
    ledger = ledger_of_two()
    ledger.lend(0, 1, start=20, tokens=12)
    ledger.check(np.array([0, 1]), np.array([20, 28]))
    with pytest.raises(KvLedgerError, match="request 0 holds 21 tokens and may hold 20"):
        ledger.check(np.array([0, 1]), np.array([21, 28]))
    with pytest.raises(KvLedgerError, match="request 1 holds 29 tokens and may hold 28"):
        ledger.check(np.array([0, 1]), np.array([20, 29]))


def test_a_guest_that_lends_may_not_borrow_more() -> None:
    ledger = KvLedger(64, requests=3, block_tokens=1)
    ledger.grow(0, 20)
    ledger.grow(1, 4)
    ledger.lend(0, 1, start=10, tokens=10)
    ledger.lend(1, 2, start=8, tokens=6)
    with pytest.raises(KvLedgerError, match="tokens 0 to 2 of request 0 cannot be lent to 1"):
        ledger.lend(0, 1, start=0, tokens=2)
    assert ledger.room.tolist() == [10, 8, 6]


def test_what_is_lent_may_touch_but_not_overlap() -> None:
    ledger = KvLedger(64, requests=4, block_tokens=1)
    ledger.grow(0, 20)
    ledger.lend(0, 1, start=10, tokens=5)
    ledger.lend(0, 2, start=15, tokens=5)
    ledger.lend(0, 3, start=6, tokens=4)
    assert ledger.room.tolist() == [6, 5, 5, 4]
    assert ledger.lent_tokens == 14
    for start, tokens in ((14, 2), (9, 2), (10, 5), (0, 7)):
        with pytest.raises(KvLedgerError, match="cannot be lent"):
            ledger.lend(0, 3, start, tokens)


def test_a_guest_grows_only_once_it_is_moved_out() -> None:
    ledger = ledger_of_two()
    ledger.lend(0, 1, start=20, tokens=12)
    with pytest.raises(KvLedgerError, match="request 1 lives in another's region"):
        ledger.grow(1, 32)
    ledger.release(1)
    assert ledger.grow(1, 32)
    assert ledger.room.tolist() == [32, 32]


def test_a_ledger_has_a_block_at_least() -> None:
    assert KvLedger(16, requests=1, block_tokens=16).blocks == 1
    for capacity, block in ((15, 16), (16, 0)):
        with pytest.raises(ValueError, match=f"{capacity} tokens make no block of {block}"):
            KvLedger(capacity, requests=1, block_tokens=block)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 40)), max_size=40))
def test_no_place_is_ever_given_to_two(moves: list[tuple[int, int, int]]) -> None:
    ledger = KvLedger(64, requests=6, block_tokens=4)
    for request, other, tokens in moves:
        if other == request:
            ledger.release(request)
        elif tokens % 2 and request not in ledger.loans:
            ledger.grow(request, tokens)
        elif (room := int(ledger.room[other])) and not ledger.guests.get(request):
            ledger.lend(other, request, start=room // 2, tokens=room - room // 2)
        assert ledger.free + sum(ledger.own.values()) == ledger.blocks
        assert int(ledger.room.sum()) <= ledger.blocks * ledger.block_tokens
    for request in range(6):
        ledger.release(request)
    assert ledger.free == ledger.blocks


def parts(ledger: KvLedger, guest: int) -> list[tuple[int, int, int]]:
    return [(loan.host, loan.start, loan.tokens) for loan in ledger.loans[guest]]


def test_a_request_grows_by_the_blocks_it_lacks() -> None:
    ledger = KvLedger(64, requests=2, block_tokens=16)
    assert ledger.grow(0, 17)
    assert (ledger.lacking(0, 33), ledger.lacking(0, 16), ledger.lacking(1, 16)) == (1, 0, 1)
    assert ledger.grow(0, 64)
    assert (ledger.free, int(ledger.room[0])) == (0, 64)
    ledger.check(np.array([0]), np.array([64, 0]))
    assert not ledger.grow(1, 1)
    assert not ledger.grow(1, 1)
    assert ledger.failures == 2


def test_a_guest_of_several_keeps_what_others_lent_it() -> None:
    ledger = KvLedger(64, requests=4, block_tokens=2)
    for request, tokens in ((0, 32), (1, 4), (2, 10)):
        ledger.grow(request, tokens)
    ledger.lend(0, 1, start=16, tokens=16)
    ledger.lend(1, 3, start=2, tokens=10)
    ledger.lend(2, 3, start=7, tokens=3)
    ledger.release(1)
    assert parts(ledger, 3) == [(1, 2, 2), (0, 16, 8), (2, 7, 3)]
    assert ledger.room.tolist() == [16, 0, 7, 13]


@pytest.mark.parametrize(
    ("own", "start", "tokens", "lent"),
    [
        (4, 4, 8, [(0, 16, 8)]),
        (4, 13, 3, [(2, 7, 3)]),
        (4, 11, 3, [(0, 23, 1), (2, 6, 2)]),
        (0, 6, 4, [(0, 22, 2), (2, 6, 2)]),
    ],
)
def test_places_are_traced_to_whom_they_belong(
    own: int, start: int, tokens: int, lent: list[tuple[int, int, int]]
) -> None:
    # Request 1 has places of its own, then 8 of request 0 and 4 of request 2.
    ledger = KvLedger(64, requests=4, block_tokens=2)
    for request, size in ((0, 32), (2, 10), (1, own)):
        if size:
            ledger.grow(request, size)
    ledger.lend(0, 1, start=16, tokens=8)
    ledger.lend(2, 1, start=6, tokens=4)
    ledger.lend(1, 3, start, tokens)
    ledger.release(1)
    assert parts(ledger, 3) == lent


def test_guests_of_the_first_guest_leave_before_it() -> None:
    ledger = KvLedger(64, requests=3, block_tokens=1)
    ledger.grow(0, 32)
    ledger.lend(0, 1, start=16, tokens=16)
    ledger.lend(1, 2, start=8, tokens=8)
    assert ledger.first_guests(0) == [2, 1]
    assert ledger.first_guests(2) == []
    assert ledger.lent(2) == []


def test_a_single_place_is_lent_and_none_behind_the_last() -> None:
    ledger = KvLedger(64, requests=2, block_tokens=1)
    ledger.grow(0, 32)
    with pytest.raises(KvLedgerError, match="tokens 30 to 33 of request 0 cannot be lent to 1"):
        ledger.lend(0, 1, start=30, tokens=3)
    ledger.lend(0, 1, start=31, tokens=1)
    assert ledger.room.tolist() == [31, 1]


def test_a_request_that_left_after_its_guests_may_come_back() -> None:
    ledger = KvLedger(64, requests=2, block_tokens=1)
    ledger.grow(0, 32)
    ledger.lend(0, 1, start=16, tokens=16)
    ledger.release(0)
    ledger.release(1)
    assert ledger.grow(0, 8)
    assert (ledger.free, int(ledger.room[0])) == (56, 8)


def resumable() -> KvLedger:
    """Four blocks of 16, of which request 0 had three, the first two full."""
    ledger = KvLedger(64, requests=2, block_tokens=16, reuse=True)
    ledger.grow(0, 48)
    ledger.release(0, tokens=40)
    return ledger


@pytest.mark.parametrize(("tokens", "cached"), [(64, 32), (41, 32), (33, 32), (32, 16), (17, 16), (16, 0)])
def test_a_request_takes_up_whole_blocks_and_computes_a_token_at_least(tokens: int, cached: int) -> None:
    ledger = resumable()
    assert (ledger.free, ledger.cached_tokens(0, tokens), ledger.cached_tokens(1, tokens)) == (4, cached, 0)
    assert ledger.resume(0, tokens) == cached
    assert (ledger.free, int(ledger.room[0])) == (4 - cached // 16, cached)
    assert ledger.cached_tokens(0, tokens) == 0
    assert ledger.grow(0, 64)
    assert ledger.free == 0


@pytest.mark.parametrize(("given", "cached"), [(32, 32), (33, 16), (64, 0)])
def test_blocks_that_others_were_given_are_not_taken_up_again(given: int, cached: int) -> None:
    # A block that nobody had and the partly filled one go first, then those of request 0.
    ledger = resumable()
    assert ledger.grow(1, given)
    assert ledger.cached_tokens(0, 41) == cached
    assert ledger.resume(0, 41) == cached


def test_nothing_is_taken_up_of_a_request_that_is_done_or_without_reuse_and_nothing_lent_with_it() -> None:
    ledger = resumable()
    ledger.grow(1, 16)
    ledger.release(1)
    assert ledger.resume(1, 16) == 0
    plain = KvLedger(64, requests=2, block_tokens=16)
    plain.grow(0, 48)
    plain.release(0, tokens=40)
    assert (plain.cached_tokens(0, 41), plain.resume(0, 41), plain.free) == (0, 0, 4)
    ledger.grow(0, 32)
    with pytest.raises(KvLedgerError, match="cannot be lent"):
        ledger.lend(0, 1, start=16, tokens=16)


def test_what_was_taken_up_is_not_taken_up_twice() -> None:
    # Of the two blocks in which its content stands request 0 takes up one; the other is nobody's then.
    ledger = resumable()
    assert ledger.resume(0, 17) == 16
    ledger.release(0)
    assert ledger.cached_tokens(0, 64) == 0


def test_nothing_stands_in_the_blocks_of_a_request_that_is_done() -> None:
    ledger = KvLedger(8, requests=1, block_tokens=1, reuse=True)
    ledger.grow(0, 4)
    ledger.release(0)
    assert ledger.cached_tokens(0, 8) == 0


def test_blocks_are_of_32_tokens_unless_said_otherwise() -> None:
    assert KvLedger(64, requests=1).block_tokens == 32
