"""The dispatch of requests as a state machine: events go in, requests to send come out."""

from __future__ import annotations

import random

import numpy as np

from batchbound.data.readers.openai_batch import COMPLETIONS
from batchbound.data.readers.server_batch import ServerRequest
from batchbound.executor.jobs.params import Patience, RunParams
from batchbound.executor.server.dispatch import Dispatch
from batchbound.executor.server.reply import Kind, Reply
from batchbound.heuristics.serving.in_flight import in_flight_of, running_of

DONE = Reply(Kind.ANSWERED, 200, {})


def requests_of(count: int, choices: int = 1) -> list[ServerRequest]:
    body = {"prompt": "x", "max_tokens": 1000, "n": choices}
    return [ServerRequest(f"r{k}", COMPLETIONS, k, body) for k in range(count)]


def dispatch_of(count: int, slots: int, choices: int = 1, patience: Patience | None = None) -> Dispatch:
    requests = requests_of(count, choices)
    params = RunParams(patience=patience or Patience())
    dispatch = Dispatch(
        requests, 1, in_flight_of(slots, running_of(choices)), params, random.Random(0), slots=slots
    )
    dispatch.begin(range(count), 0.0)
    return dispatch


def test_requests_leave_in_order_up_to_the_number_in_flight() -> None:
    dispatch = dispatch_of(100, 16)
    assert dispatch.due(0.0) == [(k, 0) for k in range(20)]
    assert dispatch.due(0.0) == []
    dispatch.replied(3, 0, 0.0, DONE, 1.0)
    assert dispatch.due(1.0) == [(20, 0)]


def test_a_final_order_is_sent_further_ahead_with_the_first_replies() -> None:
    dispatch = dispatch_of(100, 16)
    dispatch.send_ahead()
    assert len(dispatch.due(0.0)) == 20
    for request in range(10):
        dispatch.replied(request, 0, 0.0, DONE, 1.0)
        sent = len(dispatch.due(1.0))
        # Four replies bring one request more each; then 24 are in flight.
        assert sent == (2 if request < 4 else 1)


def test_requests_held_back_wait_for_outcomes_or_for_an_idle_server() -> None:
    dispatch = dispatch_of(6, 16)
    dispatch.begin([1, 0, 2, 3, 4, 5], 0.0)
    dispatch.send_after(np.array([1, 0, 2, 3, 4, 5]), np.array([0, 0, 1, 4, 4, 5]))
    assert dispatch.due(0.0) == [(1, 0), (0, 0)]
    dispatch.replied(0, 0, 0.0, DONE, 1.0)
    assert dispatch.due(1.0) == [(2, 0)]
    dispatch.replied(2, 0, 0.0, DONE, 2.0)
    assert dispatch.due(2.0) == []
    # Two of four awaited outcomes are there, but none is to come.
    dispatch.replied(1, 0, 0.0, DONE, 3.0)
    assert dispatch.due(3.0) == [(3, 0)]
    dispatch.replied(3, 0, 0.0, DONE, 4.0)
    assert dispatch.due(4.0) == [(4, 0)]


def test_a_reading_before_the_requests_have_arrived_changes_nothing() -> None:
    dispatch = dispatch_of(100, 16)
    dispatch.due(0.0)
    dispatch.counters_read(0, 1, 0)
    assert dispatch.in_flight == 20


def test_an_empty_queue_raises_the_number_by_a_few_once_a_completion() -> None:
    dispatch = dispatch_of(200, 16)
    dispatch.due(0.0)
    dispatch.replied(0, 0, 0.0, DONE, 1.0)
    dispatch.due(1.0)
    dispatch.counters_read(0, 15, 0)
    assert dispatch.in_flight == 24
    dispatch.due(1.0)
    dispatch.counters_read(0, 16, 0)
    assert dispatch.in_flight == 24


def test_a_server_that_runs_all_that_was_sent_gets_more_up_to_the_cap() -> None:
    dispatch = dispatch_of(400, 16)
    for _ in range(50):
        dispatch.due(0.0)
        dispatch.counters_read(0, dispatch.in_flight, 0)
    assert dispatch.in_flight == 80


def test_a_queue_that_is_not_empty_raises_nothing() -> None:
    dispatch = dispatch_of(100, 16)
    dispatch.due(0.0)
    dispatch.replied(0, 0, 0.0, DONE, 1.0)
    dispatch.counters_read(0, 16, 3)
    assert dispatch.in_flight == 20


def test_short_completions_are_sent_a_few_more_with_each_reply() -> None:
    requests = [ServerRequest(f"r{k}", COMPLETIONS, k, {"prompt": "x", "max_tokens": 1}) for k in range(2000)]
    dispatch = Dispatch(requests, 1, in_flight_of(128), RunParams(), random.Random(0), slots=128)
    dispatch.begin(range(2000), 0.0)
    # 144 are usual, and 64 more at once; each reply lets one more be in flight than before.
    assert len(dispatch.due(0.0)) == 208
    for request in range(10):
        dispatch.replied(request, 0, 0.0, DONE, 1.0)
        assert len(dispatch.due(1.0)) == 2


def test_another_order_leaves_out_the_requests_that_were_sent() -> None:
    dispatch = dispatch_of(24, 16)
    sent = [request for request, _ in dispatch.due(0.0)]
    dispatch.replied(sent[2], 0, 0.0, Reply(Kind.TIMED_OUT), 1.0)
    dispatch.reorder(range(23, -1, -1))
    assert [request for request, _ in dispatch.due(1.0)] == [23]
    for request in (0, 1, 3):
        dispatch.replied(request, 0, 0.0, DONE, 2.0)
    # The request that timed out is the last of the new order.
    assert [request for request, _ in dispatch.due(1e9)] == [22, 21, 20]
    dispatch.replied(23, 0, 0.0, DONE, 2.0)
    assert [request for request, _ in dispatch.due(1e9)] == [2]


def test_of_several_completions_a_quarter_is_expected_to_run() -> None:
    dispatch = dispatch_of(20, 16, choices=8)
    # Ten requests of which two completions each are expected to run, for 16 slots and a queue of four.
    assert len(dispatch.due(0.0)) == 10
    # Three requests run, the others may be on their way.
    dispatch.counters_read(0, 24, 0)
    assert dispatch.due(1.0) == []
    dispatch.replied(0, 0, 0.0, DONE, 2.0)
    assert len(dispatch.due(2.0)) == 1
    # Fewer run than is expected: two more requests are sent.
    dispatch.counters_read(0, 14, 0)
    assert len(dispatch.due(3.0)) == 2


def test_a_wait_of_31_years_ends_the_run_after_the_outage() -> None:
    dispatch = dispatch_of(3, 4, patience=Patience(outage_seconds=60.0))
    for request, k in dispatch.due(0.0):
        dispatch.replied(request, k, 0.0, Reply(Kind.BUSY, 429, {}, wait=1e9, message="wait"), 1.0)
    assert dispatch.stopped(1.0) is None
    wake = dispatch.wakes_at(1.0)
    assert wake is not None
    assert wake <= 61.0
    assert "--outage" in str(dispatch.stopped(61.0))


def test_a_shorter_wait_is_respected_and_the_job_goes_on() -> None:
    dispatch = dispatch_of(1, 4, patience=Patience(outage_seconds=60.0))
    assert dispatch.due(0.0) == [(0, 0)]
    dispatch.replied(0, 0, 0.0, Reply(Kind.BUSY, 429, {}, wait=50.0), 1.0)
    assert dispatch.due(50.0) == []
    assert dispatch.due(51.0) == [(0, 0)]
    assert [one.request for one in dispatch.replied(0, 0, 51.0, DONE, 52.0)] == [0]
    assert dispatch.left == 0


def test_a_dead_server_gets_nothing_until_it_is_back_or_the_outage_ends_the_job() -> None:
    dispatch = dispatch_of(2, 1, patience=Patience(outage_seconds=60.0))
    for request, k in dispatch.due(0.0):
        dispatch.replied(request, k, 0.0, Reply(Kind.UNREACHABLE, message="gone"), 1.0)
    assert dispatch.down(0)
    assert dispatch.due(5.0) == []
    assert dispatch.given_up_at == 60.0
    assert "could be reached for 60 s" in str(dispatch.stopped(60.0))
    dispatch.revived(0)
    assert dispatch.stopped(60.0) is None
    assert len(dispatch.due(60.0)) == 2
