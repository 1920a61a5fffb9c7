"""Token ids of prompts by their server, and templates that tear alike prompts apart."""

from __future__ import annotations

import numpy as np

from batchbound.data.prefix_tree import PrefixTree
from batchbound.executor.server.tokenizing import PromptTokens, torn_apart

SYSTEM = list(range(100, 200))


def prompts_of(*prompts: list[int], owners: str = "aaa") -> PromptTokens:
    return PromptTokens([np.array(prompt) for prompt in prompts], list(owners[: len(prompts)]))


def guess_of(*messages: list[int]) -> PrefixTree:
    return PrefixTree.of_prompts(messages)


def test_a_template_that_prints_an_id_first_is_told_with_its_place() -> None:
    guess = guess_of([7], [*SYSTEM, 1], [*SYSTEM, 2])
    torn = prompts_of([9, 9, 7], [9, 9, 51, *SYSTEM, 1], [9, 9, 52, *SYSTEM, 2])
    assert torn_apart(guess, torn) == (1, 2, 2)


def test_prompts_that_share_what_their_messages_share_are_not_torn_apart() -> None:
    guess = guess_of([*SYSTEM, 1], [*SYSTEM, 2])
    assert torn_apart(guess, prompts_of([9, *SYSTEM, 1], [9, *SYSTEM, 2])) is None
    # A token may stand for more bytes than four.
    assert torn_apart(guess, prompts_of([9, *SYSTEM[:40], 1], [9, *SYSTEM[:40], 2])) is None
    assert torn_apart(guess_of([1], [2]), prompts_of([1], [2])) is None


def test_prompts_kept_apart_by_a_salt_are_not_compared() -> None:
    guess = guess_of([*SYSTEM, 1], [*SYSTEM, 2])
    assert torn_apart(guess, prompts_of([51, *SYSTEM, 1], [52, *SYSTEM, 2], owners="ab")) is None
