"""Orders that others have published, checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from builders import tree_of

from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.data.workload import Workload
from batchbound.heuristics.serving.device import DeviceBatch
from batchbound.heuristics.serving.kv_ledger import KvLedger
from batchbound.heuristics.serving.published import PUBLISHED, Queue, Queued
from batchbound.heuristics.serving.registry import ORDERED
from batchbound.heuristics.serving.release import predict
from batchbound.heuristics.serving.simulation import serve_on_device


def queue(prompt: list[int], output: list[int], kv_tokens: int | None = None) -> Queue:
    return Queue(np.array(prompt), np.array(output), 8, kv_tokens)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("first-come", [0, 1, 2, 3]),
        ("shortest-first", [1, 3, 0, 2]),
        ("longest-first", [2, 0, 3, 1]),
        # Areas 3 x 4 + 10 = 22, 40 x 1 + 1 = 41, 1 x 9 + 45 = 54 and 2 x 2 + 3 = 7.
        ("smallest-area-first", [3, 0, 1, 2]),
        ("paired", [2, 1, 0, 3]),
    ],
)
def test_orders_by_lengths(name: str, order: list[int]) -> None:
    assert PUBLISHED[name](queue([3, 40, 1, 2], [4, 1, 9, 2])).tolist() == order


def test_sorted_f_takes_the_batch_of_least_f_first() -> None:
    # The first takes the whole memory alone: F = 1. Three of the others fit together: F = 6 / 9.
    assert PUBLISHED["sorted-f"](queue([11, 2, 2, 2], [1, 2, 2, 2], 12)).tolist() == [1, 2, 3, 0]
    # With memory for all, F of all four is 7 / 16.
    assert PUBLISHED["sorted-f"](queue([11, 2, 2, 2], [1, 2, 2, 2])).tolist() == [0, 1, 2, 3]


def test_beginnings_in_the_cache_come_first() -> None:
    # Two documents in turn, and a prompt that shares nothing.
    tree = tree_of([-1, -1], [10, 20], [0, 1, 0, -1, 1], [1, 1, 1, 5, 1])
    waiting = Queue(tree.prompt_tokens, np.ones(5, dtype=np.int64), 8, None, tree)
    assert PUBLISHED["longest-prefix-first"](waiting).tolist() == [0, 2, 1, 4, 3]
    grouped = PUBLISHED["system-prompt-hash"](waiting).tolist()
    assert abs(grouped.index(0) - grouped.index(2)) == abs(grouped.index(1) - grouped.index(4)) == 1


class OneSecond:
    def run(self, work: DeviceBatch) -> float:
        return 1.0


@pytest.mark.parametrize("name", sorted(ORDERED))
def test_the_serving_policy_admits_in_the_order_of_its_rule(name: str) -> None:
    rng = np.random.default_rng(7)
    work = Workload.from_lengths(rng.integers(1, 40, 25), rng.integers(1, 30, 25))
    limits = EngineLimits(6, 64, 160, 16)
    ledger = KvLedger(160, 25, 16)
    run = serve_on_device(work, Queued(64, 6, PUBLISHED[name]), OneSecond(), ledger)
    order = PUBLISHED[name](Queue(work.input_tokens, work.output_tokens, 6, 160))
    predicted = predict(Sequences(work.input_tokens, work.output_tokens), limits, order)
    assert predicted is not None
    assert len(run.start) == predicted.iterations
