"""EconoServe's queue, its parts, the two-device split and the figures of a run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.costs.iteration_cost import MixedCost
from batchbound.data.workload import Workload, numbered_ids
from batchbound.heuristics.serving.disaggregated import simulate_disaggregated
from batchbound.heuristics.serving.econoserve.paper import EconoServe
from batchbound.heuristics.serving.econoserve.queue import TaskQueue
from batchbound.heuristics.serving.econoserve.sizes import EconoServeSizes
from batchbound.heuristics.serving.metrics import serving_metrics
from batchbound.heuristics.serving.pipelined import Pipelined
from batchbound.heuristics.serving.policy import ServingPolicy
from batchbound.heuristics.serving.simulation import ServingError, ServingRun, simulate_serving

UNIT = MixedCost(1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, swap_per_token=0.5, transfer_per_token=0.25)
"""Every iteration takes a second."""
EXACT = EconoServeSizes(padding=0.0, reserved=0.0, buffer=0.0, forward_size=100)


def workload(prompts: list[int], answers: list[int], arrival: list[float] | None = None) -> Workload:
    count = len(prompts)
    times = np.zeros(count) if arrival is None else np.array(arrival)
    return Workload(numbered_ids(count), np.array(prompts), np.array(answers), times, deadline=times + 10)


def serve(
    requests: Workload, policy: ServingPolicy, capacity: int, predicted: list[int] | None = None
) -> ServingRun:
    seen = None if predicted is None else np.array(predicted)
    return simulate_serving(requests, policy, UNIT, capacity, block_tokens=1, predicted=seen)


def test_a_queue_without_order_gives_the_first_that_came() -> None:
    queue = TaskQueue(ordered=False)
    for task, length in enumerate([5, 9, 5]):
        queue.push(task, length, deadline=0.0, memory=0)
    assert (queue.head(), queue.fitting(4), queue.equal(5), queue.closest(8)) == (0, None, 0, 0)
    queue.push(7, 1, deadline=0.0, memory=0, again=True)
    assert queue.head() == 7


def test_the_order_is_deadline_then_memory_then_length() -> None:
    queue = TaskQueue(ordered=True)
    tasks = {"late": (900, 5.0, 999), "short": (3, 1.0, 0), "long": (8, 1.9, 5), "holder": (1, 0.1, 300)}
    for task, (name, (length, deadline, memory)) in enumerate(tasks.items()):
        queue.push(task, length, deadline, memory)
        assert name in tasks
    found = []
    while (task_found := queue.head()) is not None:
        found.append(list(tasks)[task_found])
        queue.remove(task_found)
    assert found == ["holder", "long", "short", "late"]


def test_the_longest_that_fits_is_taken_from_the_first_range_that_has_one() -> None:
    queue = TaskQueue(ordered=True)
    for task, (length, deadline) in enumerate([(9, 1.0), (6, 1.0), (4, 1.0), (7, 3.0)]):
        queue.push(task, length, deadline, memory=0)
    assert [queue.fitting(most) for most in (9, 8, 5, 3)] == [0, 1, 2, None]
    assert queue.closest(8) == 3


@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0, 20), st.integers(0, 400)), max_size=30), st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_a_queue_agrees_with_sorting(tasks: list[tuple[int, float, int]], ordered: bool) -> None:
    queue = TaskQueue(ordered=ordered)
    for task, (length, deadline, memory) in enumerate(tasks):
        queue.push(task, length, deadline, memory)

    def key(task: int) -> tuple[int, ...]:
        length, deadline, memory = tasks[task]
        return (int(deadline / 2), -(memory // 128), -length, task) if ordered else (task,)

    for task in sorted(range(len(tasks)), key=key):
        assert queue.head() == task
        longest = max(length for other, (length, *_) in enumerate(tasks) if other in queue)
        closest = queue.closest(longest)
        assert closest is not None
        assert tasks[closest][0] == longest
        queue.remove(task)
    assert len(queue) == 0
    assert queue.head() is None


def test_prompts_join_while_answers_are_under_way() -> None:
    run = serve(workload([4, 4], [6, 3], [0.0, 2.5]), Pipelined(EXACT), 100)
    assert run.prompt_tokens.tolist()[3] == 4
    assert run.decodes.tolist()[3] == 1


def test_unused_memory_is_lent_to_an_answer_half_as_long() -> None:
    # 22 places: a prompt of 1 with an answer of 16 leaves 5, too few for 1 + 8; half of the 16 is lent.
    requests = workload([1, 1], [16, 8])
    sizes = replace(EXACT, reserved=0.1)
    alone = serve(requests, EconoServe(sizes, lending=False), 22)
    lent = serve(requests, EconoServe(sizes), 22)
    assert (alone.lent_tokens, lent.lent_tokens > 0) == (0, True)
    assert lent.finished.max() < alone.finished.max()
    assert lent.held.mean() > alone.held.mean()
    assert lent.preempted.sum() == 0


@pytest.mark.parametrize(("guest", "inner", "lent"), [(12, 4, 16 + 8), (12, 5, 16), (13, 13, 0)])
def test_guests_are_shorter_than_halves_and_quarters_by_the_same_buffer(
    guest: int, inner: int, lent: int
) -> None:
    # An eighth of the host's 32 is 4: its guest has at most 16 - 4, the one in its first half 8 - 4, each
    # beyond the token that comes with the prompt.
    requests = workload([1, 1, 1], [1 + 32, 1 + guest, 1 + inner])
    sizes = replace(EXACT, reserved=0.1, buffer=0.125)
    assert serve(requests, EconoServe(sizes), 39).lent_tokens == lent


def test_a_whole_request_is_hosted_in_what_a_running_one_has_not_used() -> None:
    # 42 places, of which the first will take 1 + 40; the second needs 4 + 8 of them, for 8 iterations.
    requests = workload([1, 4], [40, 8], [0.0, 0.5])
    run = serve(requests, Pipelined(EXACT), 42)
    assert (run.lent_tokens, run.preempted.tolist()) == (40 + 12 - 42, [0, 0])
    assert run.finished.tolist() == [40.0, 9.0]
    # When the second's prompt is done it is the first's 2 tokens and its own 4.
    assert run.held.tolist()[:3] == [1, 2 + 4, 3 + 5]
    alone = serve(requests, EconoServe(EXACT), 42)
    assert (alone.lent_tokens, alone.finished.tolist()) == (0, [40.0, 48.0])


def test_nothing_is_lent_to_whom_would_be_there_when_it_is_needed() -> None:
    # When the second ends the first holds 1 + 18 tokens, and the second 5 + 18 or 4 + 18.
    assert serve(workload([1, 5], [40, 18], [0.0, 0.5]), Pipelined(EXACT), 41).lent_tokens == 0
    assert serve(workload([1, 4], [40, 18], [0.0, 0.5]), Pipelined(EXACT), 41).lent_tokens == 40 + 22 - 41
    assert serve(workload([1, 5], [40, 18], [0.0, 0.5]), Pipelined(EXACT), 42).lent_tokens == 40 + 23 - 42
    # With a buffer it may still be there when the first holds 1 + 27.
    buffered = replace(EXACT, buffer=0.5)
    assert serve(workload([1, 4], [40, 18], [0.0, 0.5]), Pipelined(buffered), 41).lent_tokens == 0


def test_a_prompt_that_ends_in_this_iteration_is_counted() -> None:
    # The first's prompt takes 4 and 2 of the 4 tokens an iteration has; beside its end no other fits.
    requests = workload([6, 2], [20, 20])
    run = serve(requests, Pipelined(replace(EXACT, forward_size=4)), 30)
    assert run.prompt_tokens.tolist()[:3] == [4, 2, 0]
    assert run.preempted.tolist() == [0, 0]


def test_of_those_that_are_due_the_one_that_needs_least_is_hosted_of_others_the_largest() -> None:
    # One fits beside the first, which takes 41 of 44 places; the third in order never does.
    requests = workload([1, 2, 2, 30], [40, 4, 12, 9], [0.0, 0.5, 0.5, 0.5])
    due = serve(requests, Pipelined(EXACT), 44)
    assert due.spent[:, 0].tolist()[1] < 1
    never = replace(requests, deadline=np.full(4, np.inf))
    assert serve(never, Pipelined(EXACT), 26 + 15).spent[2, 0] < 1


def test_the_largest_that_fits_is_hosted_whether_or_not_a_smaller_one_does() -> None:
    # Of 44 places the first takes 41. The second would hold 1 + 22 when the first holds 23; the third, of
    # nearly as many tokens, is gone when it holds 6; the fourth fits as well.
    requests = workload([1, 1, 17, 16], [40, 22, 4, 4], [0.0, 0.5, 0.5, 0.5])
    run = serve(replace(requests, deadline=np.full(4, np.inf)), Pipelined(EXACT), 44)
    waited = run.spent[:, 0]
    assert waited[2] == 0.5
    assert (waited[[1, 3]] > 0.5).all()


def test_a_guest_that_overstays_is_moved_out_and_completes() -> None:
    # At 20 places the second has 7 of its 14 when it was to be gone; it goes on till none is left.
    run = serve(workload([1, 1], [16, 14]), Pipelined(EXACT), 20, predicted=[16, 7])
    assert run.lent_tokens == 17 + 8 - 20
    assert run.tokens.tolist() == [16, 14]
    # Then its 10 tokens move to the host, half a second each.
    assert (run.finished[0], run.preempted.tolist()) == (16.0 + 5.0, [0, 1])


def test_an_answer_longer_than_predicted_takes_free_memory_first() -> None:
    run = serve(workload([2], [20]), Pipelined(EXACT), 40, predicted=[5])
    assert run.preempted.tolist() == [0]
    assert run.finished[0] == 20.0


def test_as_printed_a_longer_answer_takes_the_reserve_and_then_waits_in_place() -> None:
    # Of 30 places the first has 2 + 5, the second 2 + 18, and 3 are the reserve.
    requests = workload([2, 2], [12, 18])
    run = serve(requests, EconoServe(replace(EXACT, reserved=0.1)), 30, predicted=[5, 18])
    # Its 6 tokens, 3 in the reserve; when the second is gone, the last 3.
    assert run.finished.tolist() == [18.0 + 3.0, 18.0]
    assert run.preempted.tolist() == [1, 0]


def test_as_printed_a_guest_that_overstays_goes_to_the_host() -> None:
    # Of 32 places the first has 17, the second's prompt 1, and 9 are the reserve: too few are left for its 7,
    # so they lie in the first's second half.
    requests = workload([1, 1], [16, 14])
    run = serve(requests, EconoServe(replace(EXACT, reserved=0.3)), 32, predicted=[16, 7])
    assert (run.lent_tokens, run.preempted.tolist()) == (7, [0, 1])


def test_as_printed_a_prompt_begins_in_what_answers_left() -> None:
    requests = workload([4, 4], [6, 6], [0.0, 0.5])
    # The second needs 10 of 15 places, but 4 for its prompt.
    assert serve(requests, EconoServe(EXACT, lending=False), 15).finished.tolist() == [6.0, 6.0 + 5.0]


def test_a_request_that_can_never_fit_is_named() -> None:
    with pytest.raises(ServingError, match=r"request-1.*13 tokens.*of 12"):
        serve(workload([2, 2], [5, 12]), Pipelined(EXACT), 12)


def test_equal_predictions_start_together() -> None:
    policy = EconoServe(replace(EXACT, reserved=0.2), ordered=False, lending=False)
    run = serve(workload([2] * 6, [5] * 6), policy, 60)
    assert run.decodes.max() == 6
    assert len(set(run.finished.tolist())) == 1


@pytest.mark.parametrize("wrong", [{"padding": -0.1}, {"reserved": 1.0}, {"buffer": float("nan")}])
def test_a_share_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="it must be a share"):
        EconoServeSizes(**wrong)  # type: ignore[arg-type]  # one field of several, all floats here


def test_two_devices_send_keys_and_values_between_them() -> None:
    both = simulate_disaggregated(workload([4, 4], [3, 1]), UNIT, 100, block_tokens=1)
    # The first prompt is sent in a second, moved in from the host in two, and decoded in two more.
    assert both.run.first_token.tolist() == [1.0, 1.0]
    assert both.transfer_seconds.tolist() == [1.0, 0.0]
    assert both.run.finished.tolist() == [1 + 1 + 2 + 2, 1.0]
    assert both.run.spent.sum(1) == pytest.approx(both.run.finished)


def test_a_full_prompt_device_waits_for_the_link() -> None:
    both = simulate_disaggregated(workload([8, 8, 8], [2, 2, 2]), UNIT, 20, block_tokens=1)
    # Two fit at first; the third's prompt starts when the first has left, two seconds after its end.
    assert both.run.first_token.tolist() == [1.0, 1.0, 4.0]


def test_the_figures_of_a_run_add_up() -> None:
    requests = workload([2, 2, 2], [5, 12, 1], [0.0, 1.0, 1.5])
    metrics = serving_metrics(serve(requests, Pipelined(EXACT), 14))
    parts = metrics.waiting + metrics.execution + metrics.queueing + metrics.preemption
    assert parts == pytest.approx(metrics.completion)
    assert metrics.requests_per_s == pytest.approx(3 / metrics.makespan)
    assert 0 < metrics.kv_held <= metrics.kv_promised <= 1
    assert metrics.slo_satisfaction is not None
    assert 0 <= metrics.slo_satisfaction <= 1
    assert metrics.to_json()["completion"] == metrics.completion


def test_a_run_that_is_stopped_counts_what_is_still_there_with_what_it_has_spent() -> None:
    requests = workload([2, 2, 2], [5, 50, 4], [0.0, 0.0, 9.5])
    policy = EconoServe(EXACT, lending=False)
    run = simulate_serving(requests, policy, UNIT, 100, block_tokens=1, until=10.0)
    assert run.finished[0] == 5.0
    assert np.isnan(run.finished[1:]).all()
    assert run.tokens.tolist() == [5, 10, 0]
    assert run.spent.sum(1).tolist() == [5.0, 10.0, 0.5]
    metrics = serving_metrics(run)
    assert metrics.completion == pytest.approx((5 + 10 + 0.5) / 3)
    assert (metrics.requests_per_s, metrics.tokens_per_s) == (0.1, 1.5)
    # Due by then are the first two.
    assert metrics.slo_satisfaction == 0.5


def test_two_devices_stop_as_well() -> None:
    both = simulate_disaggregated(workload([4, 4], [3, 30]), UNIT, 100, block_tokens=1, until=12.0)
    assert both.run.finished[0] < 12.0
    assert np.isnan(both.run.finished[1])
    assert both.run.tokens[0] == 3
    assert 1 < both.run.tokens[1] < 30


def test_seconds_on_two_devices_are_counted_until_they_stop() -> None:
    # The link sends the first till 3, when the third's prompt starts, and the second till 5.
    requests = workload([8, 8, 8, 8], [2, 2, 2, 2])
    both = simulate_disaggregated(requests, UNIT, 20, block_tokens=1, until=4.5)
    waiting, executing, queued, _ = both.run.spent.T.tolist()
    assert (waiting, queued) == ([0.0, 0.0, 3.0, 4.5], [2.0, 3.5, 0.5, 0.0])
    assert executing[1:] == [1.0, 1.0, 0.0]
    assert both.prompt_seconds == 2.0
