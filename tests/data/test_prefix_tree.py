"""The tree of shared beginnings, held against a comparison of every two prompts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchbound.data.files.record import plain, record
from batchbound.data.prefix_tree import PrefixTree

Prompts = list[list[int]]

drawn_prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=8)


def _common(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def _path(tree: PrefixTree, request: int) -> list[int]:
    node, path = int(tree.leaf[request]), []
    while node >= 0:
        path.append(node)
        node = int(tree.parent[node])
    return path


def _shared(tree: PrefixTree, one: int, other: int) -> int:
    both = set(_path(tree, one)) & set(_path(tree, other))
    return int(sum(tree.tokens[node] for node in both))


@given(drawn_prompts, st.integers(1, 4), st.data())
def test_two_prompts_share_the_whole_units_of_their_common_beginning_before_the_last_token(
    prompts: Prompts, unit: int, data: st.DataObject
) -> None:
    identities = [data.draw(st.sampled_from("ab")) for _ in prompts]
    tree = PrefixTree.of_prompts(prompts, identities, unit)
    assert tree.prompt_tokens.tolist() == [len(prompt) for prompt in prompts]
    for i, one in enumerate(prompts):
        for j, other in enumerate(prompts[:i]):
            common = min(_common(one, other), len(one) - 1, len(other) - 1) // unit * unit
            assert _shared(tree, i, j) == (common if identities[i] == identities[j] else 0)


@given(drawn_prompts, st.integers(1, 4))
def test_a_prompt_continues_the_longest_other_one_that_it_begins_with(prompts: Prompts, unit: int) -> None:
    tree = PrefixTree.of_prompts(prompts, unit=unit)
    for i, one in enumerate(prompts):
        begun = [len(p) for p in prompts if len(p) < len(one) and one[: len(p)] == p]
        equal = [j for j, other in enumerate(prompts) if other == one]
        before = tree.continues[i]
        if i != equal[0]:
            assert before == equal[equal.index(i) - 1]
        elif begun:
            assert one[: len(prompts[before])] == prompts[before]
            assert len(prompts[before]) == max(begun)
        else:
            assert before == -1


@given(drawn_prompts, st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_depth_first_order_visits_each_subtree_in_one_go(
    prompts: Prompts, unit: int, random: object
) -> None:
    tree = PrefixTree.of_prompts(prompts, unit=unit)
    key = [random.random() for _ in tree.parent]  # type: ignore[attr-defined]
    place = tree.depth_first(key)
    below = [{v for v in range(len(place)) if node in _up(tree, v)} for node in range(len(place))]
    assert sorted(place.tolist()) == list(range(len(place)))
    for node, subtree in enumerate(below):
        places = sorted(place[v] for v in subtree)
        assert places == list(range(place[node], place[node] + len(subtree)))
        siblings = [v for v in range(len(place)) if tree.parent[v] == tree.parent[node]]
        assert sorted(siblings, key=lambda v: (key[v], v)) == sorted(siblings, key=place.__getitem__)
    assert tree.requests_below.tolist() == [
        sum(tree.leaf[i] in subtree for i in range(len(tree))) for subtree in below
    ]
    assert tree.depth_first().tolist() == list(range(len(place)))


def _up(tree: PrefixTree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parent[node])
    return path


@given(drawn_prompts, st.integers(1, 3), st.data())
def test_some_requests_share_what_they_share_among_all(
    prompts: Prompts, unit: int, data: st.DataObject
) -> None:
    tree = PrefixTree.of_prompts(prompts, unit=unit)
    chosen = data.draw(st.lists(st.sampled_from(range(len(prompts))), unique=True, min_size=1))
    part = tree.select(chosen)
    assert part.prompt_tokens.tolist() == tree.prompt_tokens[chosen].tolist()
    assert (part.requests_below > 0).all()
    for a, i in enumerate(chosen):
        for b, j in enumerate(chosen):
            assert a == b or _shared(part, a, b) == _shared(tree, i, j)
        begun = [len(prompts[j]) for j in chosen if prompts[i][: len(prompts[j])] == prompts[j] and j != i]
        before = int(part.continues[a])
        shorter = [tokens for tokens in begun if tokens < len(prompts[i])]
        if before < 0:
            assert not shorter
        else:
            assert part.prompt_tokens[before] in (max(shorter, default=0), len(prompts[i]))


def test_a_system_prompt_with_two_documents_is_a_tree_of_three_nodes() -> None:
    system, first, second = [1, 2, 3, 4], [5, 6], [7, 8, 9]
    prompts = [
        [*system, *first, 10],
        [*system, *second, 11],
        [*system, *first, 12, 13],
        [*system, *second, 14],
    ]
    tree = PrefixTree.of_prompts(prompts)
    assert tree.parent.tolist() == [-1, 0, 0]
    assert tree.tokens.tolist() == [4, 2, 3]
    assert tree.through.tolist() == [4, 6, 7]
    assert tree.leaf.tolist() == [1, 2, 1, 2]
    assert tree.own.tolist() == [1, 1, 2, 1]
    assert tree.distinct_tokens == 14
    assert tree.requests_below.tolist() == [4, 2, 2]
    assert tree.depth_first_key().tolist() == [2, 3, 2, 3]
    # Blocks of two tokens: the second document is cut after its second token.
    assert PrefixTree.of_prompts(prompts, unit=2).tokens.tolist() == [4, 2, 2]


def test_blocks_of_a_trace_share_whole_blocks_alone() -> None:
    tree = PrefixTree.of_blocks([[0, 1, 2], [0, 1], [0, 3], [0, 1]], [12, 8, 6, 8], 4)
    # The last token of the second prompt, which ends with its block, is always computed.
    assert tree.shared_tokens.tolist() == [4, 4, 4, 4]
    assert tree.continues.tolist() == [3, -1, -1, 1]
    assert tree.unit == 4
    assert tree.tokens.tolist() == [4]
    with pytest.raises(ValueError, match="prompt 0 has 12 tokens in 1 blocks of 4"):
        PrefixTree.of_blocks([[0]], [12], 4)


@given(drawn_prompts, st.integers(1, 3))
def test_blocks_tell_the_same_tree_as_the_prompts_of_full_blocks(prompts: Prompts, size: int) -> None:
    full = [[token for token in prompt for _ in range(size)] for prompt in prompts]
    by_blocks = PrefixTree.of_blocks(prompts, [len(prompt) for prompt in full], size)
    assert plain(by_blocks) == plain(PrefixTree.of_prompts(full, unit=size))


def test_groups_of_a_table_are_a_tree_of_one_level() -> None:
    tree = PrefixTree.of_groups([10, 9, 8, 7], [3, -1, 3, 5], [6, 0, 6, 0])
    assert tree.tokens.tolist() == [6]
    assert tree.leaf.tolist() == [0, -1, 0, -1]
    assert tree.own.tolist() == [4, 9, 2, 7]
    assert PrefixTree.of_groups([10, 8], [0, 0], [6, 6], unit=4).tokens.tolist() == [4]


@given(drawn_prompts, st.integers(1, 3))
def test_a_tree_comes_back_from_json(prompts: Prompts, unit: int) -> None:
    tree = PrefixTree.of_prompts(prompts, unit=unit)
    assert plain(record(PrefixTree, json.loads(json.dumps(plain(tree))))) == plain(tree)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent": [-1, 1]}, "the parent of node 1 of a prefix tree is 1"),
        ({"parent": [-1]}, "a parent and tokens for each node"),
        ({"tokens": [2, 3]}, "the tokens of node 1 of a prefix tree is 3"),
        ({"tokens": [2, 0]}, "the tokens of node 1 of a prefix tree is 0"),
        ({"leaf": [0, 2]}, "the leaf of request 1 of a prefix tree is 2"),
        ({"own": [1, 0]}, "the own tokens of request 1 of a prefix tree is 0"),
        ({"own": [1]}, "a leaf and own tokens for each request"),
        ({"unit": 0}, "a beginning is reused by 0 tokens"),
        ({"continues": [1, -1]}, "continues one that it cannot begin with"),
        ({"leaf": [0, 0], "continues": [1, 0]}, "continues one that it cannot begin with"),
    ],
)
def test_columns_that_are_no_tree_are_refused(changes: dict[str, object], message: str) -> None:
    columns: dict[str, object] = {
        "parent": [-1, 0],
        "tokens": [2, 2],
        "leaf": [0, 1],
        "own": [1, 1],
        "unit": 2,
    }
    PrefixTree(**columns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        PrefixTree(**{**columns, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 is no list of token ids"),
        ([["a"]], "prompt 0 is no list of token ids"),
        ([[-1]], "prompt 0 has the token id -1"),
        ([[1], [2**24]], "prompt 1 has the token id 16777216"),
        ([], "at least one prompt"),
    ],
)
def test_prompts_that_are_no_token_ids_are_refused(prompts: Prompts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixTree.of_prompts(prompts)


@pytest.mark.slow
def test_a_tree_of_many_documents_takes_little_time_for_each_prompt() -> None:
    random = np.random.default_rng(1)
    documents = random.integers(0, 50_000, (2000, 400))
    # No two documents begin with the same token, and no two questions.
    documents[:, 0] = np.arange(2000)
    questions = random.integers(0, 50_000, (20_000, 30))
    questions[:, 0] = np.arange(20_000)
    prompts = (np.append(documents[row % 2000], question) for row, question in enumerate(questions))
    tree = PrefixTree.of_prompts(prompts)
    assert len(tree.parent) == 2000
    assert tree.distinct_tokens <= 2000 * 400 + 20_000 * 30
