"""Comparison with a server of the same completions: medians, ratios, and how many are equal."""

from __future__ import annotations

from typing import Any

import beginning_peers
import pytest


def run(cpu_seconds: float, *answers: list[int], computed: int = 0) -> dict[str, Any]:
    return {
        "seconds": 2 * cpu_seconds,
        "cpu_seconds": cpu_seconds,
        "answers": list(answers),
        "computed_prompt_tokens": computed,
    }


def test_engines_are_compared_by_their_median_and_by_equal_completions() -> None:
    ours = [
        run(9.0, [1, 2], [3], computed=5),
        run(3.0, [1, 2], [3], computed=5),
        run(4.0, [1, 2], [3], computed=5),
    ]
    theirs = [run(seconds, [1, 2], [4]) for seconds in (8.0, 7.0, 80.0)]
    row = beginning_peers.compared({"batchbound": ours, "vllm": theirs}, {"prompts": [[1] * 4, [1] * 6]})
    assert row["ratio"] == pytest.approx(4.0 / 8.0)
    assert row["vllm"]["seconds"] == 16.0
    assert (row["prompt_tokens"], row["computed_prompt_tokens"], row["equal"]) == (10, 5, 1)


def test_our_engine_alone_has_no_ratio() -> None:
    row = beginning_peers.compared({"batchbound": [run(3.0, [1])]}, {"prompts": [[1]]})
    assert "ratio" not in row
