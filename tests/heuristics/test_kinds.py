"""Order by kinds of requests: only where simulation says that it beats the given order."""

from __future__ import annotations

import numpy as np
import pytest

from batchbound.data.arrays import IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.openai_batch import CHAT, PromptRecord
from batchbound.data.workload import Workload
from batchbound.executor.jobs.kinds import kinds_of
from batchbound.heuristics.queues.admission import Admission
from batchbound.heuristics.queues.ordered import Ordered
from batchbound.heuristics.queues.prefill_rules import PrefillFirst
from batchbound.heuristics.queues.queue_policy import QueuePolicy
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.unknown_lengths.kinds import KindOrder, LearntKinds, decode_steps_of


def steps(kind: IntArray, true: IntArray, cap: int, order: IntArray | None = None) -> int:
    """Return the decode steps of a job on four slots, by kinds or in an order."""
    count = len(true)
    workload = Workload.from_lengths(input_tokens=[5] * count, output_tokens=[cap] * count)
    problem = Problem(workload, CostModel(0.0, 0.1, 1.0, 0.1), slots=4)
    queue = (
        KindOrder(problem, np.arange(count), kind, np.full(count, cap)) if order is None else Ordered(order)
    )
    return simulate(problem, QueuePolicy(queue, PrefillFirst(), Admission(problem)), true).decode_steps


def test_most_of_what_long_kinds_first_would_save_is_saved_when_short_ones_stand_first() -> None:
    rng = np.random.default_rng(3)
    kind = np.repeat([0, 1], 30)
    true = np.concatenate((rng.integers(2, 8, 30), rng.integers(20, 100, 30)))
    given, best = (
        steps(kind, true, 100, np.arange(60)),
        steps(kind, true, 100, np.argsort(-kind, kind="stable")),
    )
    assert best < given
    assert given - steps(kind, true, 100) >= 0.5 * (given - best)


@pytest.mark.slow
def test_kinds_that_do_not_differ_leave_the_mean_as_it_was() -> None:
    rng, ratios = np.random.default_rng(5), []
    for _ in range(6):
        true = rng.integers(1, 100, 60)
        ratios.append(steps(rng.integers(0, 3, 60), true, 100) / steps(true, true, 100, np.arange(60)))
    assert abs(np.mean(ratios) - 1) < 0.03


def test_kinds_in_blocks_start_in_turn_and_a_mixed_order_stays() -> None:
    caps, file = np.full(40, 9), np.arange(40)
    blocks, mixed = np.repeat([0, 1], 20), np.arange(40) % 2
    assert LearntKinds(file, blocks, caps, 4).given[8:].tolist() == [
        one for k in range(4, 20) for one in (k, 20 + k)
    ]
    assert LearntKinds(file, mixed, caps, 4).given.tolist() == file.tolist()


def test_each_waiting_request_takes_the_first_free_slot() -> None:
    assert decode_steps_of([2.0, 0.0], [3.0, 1.0]) == 3.0
    assert decode_steps_of([2.0, 0.0], [1.0, 3.0]) == 4.0


def record(name: str, prompt: str, cap: int | None = None) -> PromptRecord:
    return PromptRecord(name, CHAT, 1, prompt=prompt, max_tokens=cap)


def test_kinds_share_cap_and_prefix_of_the_id_else_the_first_words() -> None:
    named = [record(f"word-{i}", "Name it.") for i in range(8)] + [
        record(f"essay-{i}", "Name it.") for i in range(8)
    ]
    assert kinds_of(named).tolist() == [0] * 8 + [1] * 8
    worded = [record(f"r{i}", "Write an essay.") for i in range(8)] + [
        record(f"r{i}", f"Q{i}") for i in range(3)
    ]
    assert kinds_of(worded).tolist() == [0] * 8 + [1] * 3
    assert np.ptp(kinds_of([record(f"r{i}", f"Q{i}") for i in range(20)])) == 0
