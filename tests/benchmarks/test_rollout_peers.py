"""Rollouts on our engine and on vLLM: medians, and results of tools that both engines get."""

from __future__ import annotations

import rollout_peers


def test_a_way_is_told_by_the_medians_of_its_runs() -> None:
    runs = [{"tokens": 5, "seconds": seconds} for seconds in (9.0, 3.0, 4.0)]
    row = rollout_peers.medians({"vllm": runs})
    assert row == {"vllm": {"tokens": 5, "seconds": 4.0, "all_seconds": [9.0, 3.0, 4.0]}}


def test_tools_give_different_tokens_to_different_turns() -> None:
    results = {
        tuple(rollout_peers.given_tokens(position, turn)) for position in range(16) for turn in range(5)
    }
    assert len(results) == 80
    assert {len(tokens) for tokens in results} == {rollout_peers.GIVEN}
