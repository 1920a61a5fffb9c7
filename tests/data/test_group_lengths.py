"""Expected lengths of requests whose prompts are asked several times, updated while a job runs."""

from __future__ import annotations

import heapq
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from batchbound.data.lengths.group_lengths import LEAST_SEEN, GroupLengths

Whole = np.ndarray[tuple[int], np.dtype[np.int64]]


def test_a_prompt_whose_completion_was_long_is_expected_to_be_long_again() -> None:
    group = np.repeat(np.arange(10), 3)
    estimate = GroupLengths(group, np.full(30, 100))
    for k in range(10):
        for request, noise in ((3 * k, 1.1), (3 * k + 1, 0.9)):
            estimate.seen(request, (400 if k < 3 else 50) * noise)
    expected = estimate.expected()[2::3]
    assert (expected[:3] > 300).all()
    assert (expected[3:] < 70).all()


def test_where_groups_do_not_differ_nothing_is_learnt_of_them() -> None:
    group = np.repeat(np.arange(10), 3)
    estimate = GroupLengths(group, np.full(30, 100))
    for k in range(10):
        estimate.seen(3 * k, 100 if k % 2 else 400)
        estimate.seen(3 * k + 1, 400 if k % 2 else 100)
    assert np.ptp(estimate.expected()) == pytest.approx(0)


def test_what_was_planned_stands_until_enough_is_seen_and_keeps_its_order_within_a_prompt() -> None:
    planned = np.tile([10, 20], 12)
    estimate = GroupLengths(np.repeat(np.arange(12), 2), planned)
    for k in range(LEAST_SEEN - 1):
        estimate.seen(2 * k, 500)
    assert estimate.expected().tolist() == planned.tolist()
    estimate.seen(2 * (LEAST_SEEN - 1), 500)
    expected = estimate.expected()
    assert expected[1] == pytest.approx(2 * expected[0])
    assert not GroupLengths(np.arange(5), np.arange(1, 6)).useful


def makespan(lengths: Whole, group: Whole, slots: int, *, mend: bool) -> int:
    """Return when the last of these requests ends that take a slot each, in their order or a mended one."""
    estimate = GroupLengths(group, np.full(len(lengths), 1000))
    scout = np.zeros(len(lengths), dtype=bool)
    scout[np.unique(group, return_index=True)[1]] = mend
    ready = np.argsort(~scout, kind="stable").tolist()
    ends: list[tuple[int, int]] = []
    now = 0
    while ready or ends:
        while ready and len(ends) < slots:
            request = ready.pop(0)
            heapq.heappush(ends, (now + int(lengths[request]), request))
        now, request = heapq.heappop(ends)
        estimate.seen(request, lengths[request])
        if mend and ready:
            expected = estimate.expected()
            ready.sort(key=lambda one: (not scout[one], -expected[one] if not scout[one] else 0.0, one))
    return now


@pytest.mark.parametrize(("name", "slots", "share"), [("deepcoder14b", 32, 0.6), ("video_qwen7b", 64, 0.85)])
def test_on_public_rollouts_the_mended_order_loses_a_part_of_what_file_order_does(
    public_data: Path, name: str, slots: int, share: float
) -> None:
    table = pd.read_csv(public_data / "rollouts" / f"{name}.csv")
    lost = {False: 0.0, True: 0.0}
    for _, step in table.groupby("step"):
        lengths = step["output_tokens"].to_numpy()
        group = np.unique(step["group"], return_inverse=True)[1]
        least = max(lengths.sum() / slots, lengths.max())
        for mend in lost:
            lost[mend] += makespan(lengths, group, slots, mend=mend) / least - 1
    assert lost[True] < share * lost[False]
