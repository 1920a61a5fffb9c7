"""The reserve for prompts, and groups that end together."""

from batchbound.heuristics.serving.econoserve.paper import PromptReserve, SyncedGroups
from batchbound.heuristics.serving.kv_ledger import KvLedger


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
