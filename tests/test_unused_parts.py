"""What is unused, until when, and who is put there; the reserve for prompts; groups that end together."""

from batchbound.heuristics.guest_queue import GuestQueue
from batchbound.heuristics.kv_allocation import KvLedger
from batchbound.heuristics.prompt_reserve import PromptReserve
from batchbound.heuristics.synced_groups import SyncedGroups
from batchbound.heuristics.unused_parts import UnusedParts


def two_hosts() -> tuple[KvLedger, UnusedParts]:
    """Return regions of 40 and 20 tokens, of which 10 and 15 are held."""
    ledger = KvLedger(64, requests=4, block_tokens=1)
    ledger.grow(0, 40)
    ledger.grow(1, 20)
    parts = UnusedParts(ledger)
    parts.add(0, 10)
    parts.add(1, 15)
    return ledger, parts


def test_a_guest_may_have_what_is_not_needed_while_it_is_there() -> None:
    _, parts = two_hosts()
    # The first needs its last 20 places after 10 iterations, the second its last 2 after 3.
    assert parts.room(100, 0) == 30
    assert parts.room(100, 10) == 20
    assert parts.room(30, 3) == 27 + 2
    assert parts.room(5, 3) == 5


def test_a_part_that_is_a_small_share_of_what_is_needed_is_left_alone() -> None:
    _, parts = two_hosts()
    assert parts.room(29, 3) == 27 + 2
    assert parts.room(33, 3) == 27


def test_what_is_needed_soonest_is_lent_first() -> None:
    ledger, parts = two_hosts()
    parts.take(2, tokens=6, iterations=3)
    assert [(loan.host, loan.start, loan.tokens) for loan in ledger.loans[2]] == [(1, 18, 2), (0, 13, 4)]
    assert ledger.room[:3].tolist() == [13, 18, 6]
    # Left of the first are the 3 tokens before and 23 behind; of the second 3.
    assert (parts.room(100, 0), parts.room(16, 7)) == (23, 16)


def test_the_longest_there_is_room_for() -> None:
    _, parts = two_hosts()
    # 3 tokens of prompt, an iteration a token: 12 + 3 fit into what is left after 12, 13 + 3 do not.
    assert parts.longest(50, lambda length: (3 + length, length)) == 13
    assert parts.longest(4, lambda length: (3 + length, length)) == 4
    assert parts.longest(50, lambda length: (100, length)) == 0


def test_what_someone_has_left_behind_is_never_needed() -> None:
    ledger = KvLedger(64, requests=3, block_tokens=1)
    ledger.grow(0, 40)
    ledger.lend(0, 1, start=30, tokens=10)
    ledger.release(0)
    parts = UnusedParts(ledger)
    parts.add_left_behind(0)
    assert parts.room(100, 1_000_000) == 30
    parts.take(2, 30, 1_000_000)
    assert ledger.room[2] == 30


def test_the_reserve_counts_what_is_in_it() -> None:
    ledger = KvLedger(100, requests=2, block_tokens=1)
    reserve = PromptReserve(0.1)
    assert (reserve.holds(ledger, 10), reserve.holds(ledger, 11)) == (True, False)
    assert reserve.free_beyond(ledger) == 90
    ledger.grow(0, 8)
    reserve.enter(0, 8)
    assert (reserve.holds(ledger, 3), reserve.free_beyond(ledger)) == (False, 90)
    assert reserve.free_beyond(ledger, leaving=0) == 92 - 10
    reserve.leave(0)
    assert reserve.free_beyond(ledger) == 92 - 10


def test_a_group_is_done_when_its_last_has_left() -> None:
    groups = SyncedGroups()
    first, second = groups.new(), groups.new()
    for request, group in enumerate([first, first, second]):
        groups.join(request, group)
    assert [groups.leave(request) for request in (0, 2, 1, 1)] == [False, True, True, False]


def test_the_longest_answer_is_hosted_whose_prompt_fits_as_well() -> None:
    _, parts = two_hosts()
    queue = GuestQueue(buffer=0.0, forward_size=100)
    for request, (prompt, answer) in enumerate([(2, 14), (3, 13), (3, 12)]):
        queue.push(request, prompt, answer)
    # After 14 iterations 16 places are unused, after 13 there are 17; a block of one's own adds to them.
    assert queue.fitting(parts, spare=0, budget=10) == 0
    queue.remove(0)
    assert queue.fitting(parts, spare=0, budget=10) == 1
    # In chunks a prompt takes an iteration more.
    assert queue.stay(13, prompt=3, budget=2) == 13 + 1
    assert queue.fitting(parts, spare=0, budget=2) == 1
    queue.remove(1)
    queue.push(3, 4, 14)
    assert queue.fitting(parts, spare=0, budget=10) == 2
    assert queue.fitting(parts, spare=2, budget=10) == 3


def test_of_those_with_a_deadline_the_one_that_fits_one_part_best_is_hosted() -> None:
    _, parts = two_hosts()
    queue = GuestQueue(buffer=0.0, forward_size=100)
    queue.push(0, 3, 13)
    queue.push(1, 5, 12, due=True)
    queue.push(2, 6, 12, due=True)
    # The largest part has 30 tokens: 6 + 12 of them for 12 iterations.
    assert (parts.largest(), queue.fitting(parts, spare=0, budget=10)) == (30, 2)
    queue.remove(2)
    assert queue.fitting(parts, spare=0, budget=10) == 1
    queue.remove(1)
    assert queue.fitting(parts, spare=0, budget=10) == 0
