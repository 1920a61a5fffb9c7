"""The bound on iterations of engines that mix prompts and generated tokens, against the optimum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_optima import least_iterations, least_shared_iterations

from batchbound.data.iterations import EngineLimits, IterationBound, Sequences
from batchbound.data.prefix_tree import PrefixTree
from batchbound.models.bounds.iterations import held_blocks, iteration_bound
from batchbound.models.certificates.iterations import verify_iteration_seconds, verify_iterations


def sequences(*pairs: tuple[int, int]) -> Sequences:
    return Sequences(np.array([p for p, _ in pairs]), np.array([a for _, a in pairs]))


PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))
ROOMS = st.sampled_from([None, (5, 1), (6, 2), (8, 2), (7, 3)])


@given(st.lists(PAIRS, min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 4), ROOMS)
@example([(1, 2)] * 4, 3, 3, (6, 2))  # three iterations only where a request that fits is put back
@settings(max_examples=25, deadline=None)
def test_no_bound_is_above_the_optimum(
    pairs: list[tuple[int, int]], slots: int, budget: int, room: tuple[int, int] | None
) -> None:
    refuse_above_optimum(pairs, slots, budget, room)


@pytest.mark.slow
@given(st.lists(PAIRS, min_size=4, max_size=4), st.integers(1, 3), st.integers(1, 4), ROOMS)
@settings(max_examples=25, deadline=None)
def test_no_bound_is_above_the_optimum_of_four_requests(
    pairs: list[tuple[int, int]], slots: int, budget: int, room: tuple[int, int] | None
) -> None:
    refuse_above_optimum(pairs, slots, budget, room)


def refuse_above_optimum(
    pairs: list[tuple[int, int]], slots: int, budget: int, room: tuple[int, int] | None
) -> None:
    work = sequences(*pairs)
    limits = EngineLimits(slots, budget, *((None, 16) if room is None else room))
    if limits.blocks is not None:
        peaks = -(-(work.prompt + work.output - 1) // limits.block_tokens)
        if int(peaks.max()) > limits.blocks:
            return
    bound = iteration_bound(work, limits)
    assert bound.iterations <= least_iterations(work, limits)
    assert verify_iterations(work, limits, bound) is None


def test_each_argument_binds_where_it_should() -> None:
    cases = {
        "slots": (sequences((1, 4), (1, 4), (1, 1), (1, 1)), EngineLimits(2), 5),
        "longest request": (sequences((5, 6), (1, 2)), EngineLimits(2, 2), 8),
        "packing": (sequences((1, 4), (1, 4), (1, 4)), EngineLimits(2), 8),
        "tokens": (sequences((9, 1), (9, 1)), EngineLimits(2, 3), 6),
        "KV": (sequences((2, 3), (2, 3), (2, 3)), EngineLimits(3, 8, 5, 1), 6),
    }
    for source, (work, limits, value) in cases.items():
        bound = iteration_bound(work, limits)
        assert (bound.source, bound.iterations) == (source, value)
        assert verify_iterations(work, limits, bound) is None


def test_a_claim_above_its_certificate_is_refuted() -> None:
    cases = (
        (sequences((1, 4), (1, 4), (1, 1), (1, 1)), EngineLimits(2)),
        (sequences((5, 6), (1, 2)), EngineLimits(2, 2)),
        (sequences((1, 4), (1, 4), (1, 4)), EngineLimits(2)),
        (sequences((9, 1), (9, 1)), EngineLimits(2, 3)),
        (sequences((2, 3), (2, 3), (2, 3)), EngineLimits(3, 8, 5, 1)),
    )
    for work, limits in cases:
        bound = iteration_bound(work, limits)
        violation = verify_iterations(work, limits, replace(bound, iterations=bound.iterations + 1))
        assert violation is not None
        assert "proves" in violation.message


def test_packing_is_refused_where_requests_may_be_put_back() -> None:
    # Three requests of four tokens on two slots: 8 iterations in intervals, 6 where one can be cut in two.
    work = sequences((1, 4), (1, 4), (1, 4))
    claim = {"kind": "packing", "heaviest": 3, "machines": 1}
    roomy, tight = EngineLimits(2, 8, 8, 1), EngineLimits(2, 8, 7, 1)
    assert verify_iterations(work, roomy, IterationBound(8, "packing", claim)) is None
    violation = verify_iterations(work, tight, IterationBound(8, "packing", claim))
    assert violation is not None
    assert "evicted" in violation.message
    assert iteration_bound(work, tight).iterations < 8


@pytest.mark.parametrize(
    "claim", [{}, {"kind": "guess"}, {"kind": "packing", "heaviest": "3", "machines": 1}]
)
def test_a_certificate_that_proves_nothing_is_refused(claim: dict[str, object]) -> None:
    work = sequences((1, 4))
    assert verify_iterations(work, EngineLimits(2), IterationBound(1, "?", claim)) is not None


def test_sums_over_several_completions_are_not_taken_for_lengths() -> None:
    work = Sequences(np.array([4, 4, 4]), np.array([4, 4, 4]), exact=False)
    limits = EngineLimits(2, 64, 6, 1)
    bound = iteration_bound(work, limits)
    assert bound.source in ("slots", "longest request", "tokens")
    for claim in ({"kind": "KV"}, {"kind": "packing", "heaviest": 3, "machines": 1}):
        assert verify_iterations(work, limits, IterationBound(1, "?", claim)) is not None


def test_cached_prompt_tokens_are_not_counted_as_work() -> None:
    work = Sequences(np.array([9, 9]), np.array([2, 2]), np.array([8, 8]))
    assert work.rows(EngineLimits(1, 3)).tolist() == [2, 2]
    assert iteration_bound(work, EngineLimits(1, 3)).iterations == 4


BEGINNINGS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), min_size=2, max_size=2)


@given(
    BEGINNINGS,
    st.lists(st.integers(1, 3), min_size=2, max_size=2),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 2)),
    st.one_of(st.none(), st.integers(0, 3)),
)
@example([(0, 0, 0, 1), (0, 0, 0, 1)], [3, 1], (2, 4, 2), 0)
@example([(0,), (0,)], [1, 1], (2, 2, 1), 0)
@settings(max_examples=40, deadline=None)
def test_no_bound_is_above_the_optimum_of_an_engine_that_keeps_prompts(
    prompts: list[tuple[int, ...]], output: list[int], sizes: tuple[int, int, int], room: int | None
) -> None:
    lengths, drawn = np.array([len(prompt) for prompt in prompts]), np.array(output)
    work = Sequences(lengths, drawn, tree=PrefixTree.of_prompts(prompts))
    slots, budget, block = sizes
    largest = block * int((-(-(lengths + drawn - 1) // block)).max())
    limits = EngineLimits(slots, budget, None if room is None else largest + block * room, block)
    bound = iteration_bound(work, limits)
    assert bound.iterations <= least_shared_iterations(tuple(prompts), work, limits)
    assert verify_iterations(work, limits, bound) is None


def test_whoever_computes_a_shared_beginning_it_is_counted_once() -> None:
    # The first two prompts are equal, the third has two tokens in common with them.
    prompts, output = [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 9)], np.array([1, 5, 2])
    work = Sequences(np.array([4, 4, 3]), output, tree=PrefixTree.of_prompts(prompts))
    assert work.cached.tolist() == [2, 3, 0]
    assert work.shared.tolist() == [3, 3, 2]
    # Two tokens an iteration: nobody needs more than one chunk for what no other may have computed.
    assert work.rows(EngineLimits(1, 2)).tolist() == [1, 5, 2]
    bound = iteration_bound(work, EngineLimits(3, 1))
    assert (bound.source, bound.iterations) == ("tokens", 1 + 4 + 1 + 5 + 1 - 1)


def test_iterations_of_several_engines_added_up_are_not_bounded_by_a_packing() -> None:
    work, limits = sequences((1, 4), (1, 4), (1, 4)), EngineLimits(2)
    assert iteration_bound(work, limits).source == "packing"
    assert iteration_bound(work, limits, summed=True).source == "slots"


@given(st.lists(st.tuples(st.integers(2, 40), st.integers(1, 40)), min_size=1, max_size=5), st.integers(1, 7))
def test_held_blocks_are_counted_as_one_by_one(pairs: list[tuple[int, int]], size: int) -> None:
    counted = sum(-(-(p + drawn) // size) for p, a in pairs for drawn in range(a))
    assert held_blocks(sequences(*pairs), EngineLimits(1, block_tokens=size)) == counted


@pytest.mark.parametrize(
    "make",
    [
        lambda: EngineLimits(0),
        lambda: EngineLimits(2.5),  # type: ignore[arg-type]
        lambda: EngineLimits(1, 0),
        lambda: EngineLimits(1, kv_tokens=15),
        lambda: sequences((0, 1)),
        lambda: Sequences(np.array([4]), np.array([1]), np.array([3]), np.array([2])),
        lambda: Sequences(np.array([4]), np.array([1]), shared=np.array([4])),
        lambda: Sequences(np.array([3]), np.array([1]), np.array([3])),
        lambda: Sequences(np.array([3, 4]), np.array([1])),
    ],
)
def test_impossible_limits_and_lengths_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"least|whole|block|many|shared"):
        make()  # type: ignore[operator]


THREE = sequences((1, 4), (1, 4), (1, 4))
PACKING = {"kind": "packing", "heaviest": 3, "machines": 1}


@pytest.mark.parametrize(
    ("limits", "claim", "message"),
    [
        (EngineLimits(2), {}, "a certificate is readable: KeyError: 'kind'"),
        (EngineLimits(2), {"kind": "guess"}, "a certificate is of a known kind: 'guess' is not"),
        (
            EngineLimits(2),
            {**PACKING, "heaviest": "3"},
            "a certificate is readable: TypeError: heaviest and machines are no whole numbers",
        ),
        (
            EngineLimits(2),
            {**PACKING, "machines": True},
            "a certificate is readable: TypeError: heaviest and machines are no whole numbers",
        ),
        (EngineLimits(2), {"kind": "KV"}, "iterations: the KV cache has no limit"),
        (EngineLimits(2), {**PACKING, "machines": 0}, "iterations: 0 of 2 slots cannot be chosen"),
        (EngineLimits(2), {**PACKING, "machines": 3}, "iterations: 3 of 2 slots cannot be chosen"),
        (
            EngineLimits(2, 8, 7, 1),
            PACKING,
            "iterations: requests may be evicted, and then share no slot",
        ),
        (
            EngineLimits(2),
            PACKING,
            "the certificate proves the bound: it proves 8 iterations, the bound says 9",
        ),
        # Four tokens are two blocks of two, and four blocks hold two requests: none is put back.
        (
            EngineLimits(2, 8, 8, 2),
            PACKING,
            "the certificate proves the bound: it proves 8 iterations, the bound says 9",
        ),
        (
            EngineLimits(2),
            {**PACKING, "machines": 2},
            "the certificate proves the bound: it proves 6 iterations, the bound says 9",
        ),
    ],
)
def test_each_claim_that_does_not_hold_is_refused_by_name(
    limits: EngineLimits, claim: dict[str, object], message: str
) -> None:
    assert str(verify_iterations(THREE, limits, IterationBound(9, "?", claim))) == message


@pytest.mark.parametrize("kind", ["KV", "packing"])
def test_what_needs_lengths_is_refused_for_their_sums(kind: str) -> None:
    work = Sequences(np.array([4, 4]), np.array([4, 4]), exact=False)
    violation = verify_iterations(work, EngineLimits(2, 64, 6, 1), IterationBound(1, "?", {"kind": kind}))
    assert str(violation) == f"iterations: {kind} needs the length of each completion, not their sum"


def test_the_fullest_slots_hold_the_fewest_that_an_even_deal_gives_them() -> None:
    # Four requests on three slots: the two fullest hold three, of 2, 2 and 3 iterations at least.
    work, claim = sequences((1, 4), (1, 3), (1, 2), (1, 2)), {**PACKING, "heaviest": 4, "machines": 2}
    assert verify_iterations(work, EngineLimits(3), IterationBound(4, "packing", claim)) is None
    violation = verify_iterations(work, EngineLimits(3), IterationBound(5, "packing", claim))
    assert violation is not None
    assert violation.message == "it proves 4 iterations, the bound says 5"


@pytest.mark.parametrize(("kind", "proven"), [("slots", 4), ("longest", 2), ("tokens", 2), ("KV", 1)])
def test_no_argument_counts_cached_prompt_tokens(kind: str, proven: int) -> None:
    # One prompt token and one drawn token are computed for each of two requests; the prompts may share every
    # place of theirs, so that each request holds one block, of three, once it has drawn a token.
    work, limits = Sequences(np.array([9, 9]), np.array([2, 2]), np.array([8, 8])), EngineLimits(1, 3, 6, 2)
    assert verify_iterations(work, limits, IterationBound(proven, "?", {"kind": kind})) is None
    violation = verify_iterations(work, limits, IterationBound(proven + 1, "?", {"kind": kind}))
    assert violation is not None
    assert violation.message == f"it proves {proven} iterations, the bound says {proven + 1}"


def test_a_packing_is_of_the_requests_that_need_most_iterations() -> None:
    work, claim = sequences((1, 1), (1, 4), (1, 1), (1, 4)), {**PACKING, "heaviest": 2}
    assert verify_iterations(work, EngineLimits(1), IterationBound(8, "packing", claim)) is None


@pytest.mark.parametrize(
    ("pairs", "size", "blocks", "proven"),
    [
        # Five, six, seven and eight tokens of two a block.
        ([(5, 4)], 2, 1, 3 + 3 + 4 + 4),
        ([(5, 4)], 2, 3, 5),
        ([(7, 3), (4, 5)], 3, 4, 6),
        ([(16, 2), (1, 1)], 16, 3, 2),
    ],
)
def test_blocks_are_counted_from_the_first_token_to_the_last(
    pairs: list[tuple[int, int]], size: int, blocks: int, proven: int
) -> None:
    counted = sum(-(-(p + drawn) // size) for p, a in pairs for drawn in range(a))
    assert -(-counted // blocks) == proven
    limits = EngineLimits(1, 64, blocks * size, size)
    assert verify_iterations(sequences(*pairs), limits, IterationBound(proven, "?", {"kind": "KV"})) is None
    assert str(
        verify_iterations(sequences(*pairs), limits, IterationBound(proven + 1, "?", {"kind": "KV"}))
    ).endswith(f"it proves {proven} iterations, the bound says {proven + 1}")


def test_blocks_of_a_prompt_that_is_cached_in_part_are_those_of_its_own_tokens() -> None:
    # Three of seven prompt tokens are its own: three, four and five tokens of two a block.
    work, limits = Sequences(np.array([7]), np.array([3]), np.array([4])), EngineLimits(1, 64, 2, 2)
    assert verify_iterations(work, limits, IterationBound(2 + 2 + 3, "?", {"kind": "KV"})) is None
    assert verify_iterations(work, limits, IterationBound(2 + 2 + 3 + 1, "?", {"kind": "KV"})) is not None


# Of nine prompt tokens five are computed and three drawn; of five all, and two drawn.
TIMED = Sequences(np.array([9, 5]), np.array([3, 2]), np.array([4, 0]))
LEAST = IterationBound(3, "longest request", {"kind": "longest"})
NEEDED = {
    "iterations": 3,
    "decodes": 2 + 1,
    "prompt_tokens": 5 + 5,
    "drawn": 3 + 2,
    "kv_tokens": (10 + 11) + 6,
    "pairs": (4.5 + 5.5 + 6.5 + 7.5 + 8.5) + (0.5 + 1.5 + 2.5 + 3.5 + 4.5),
}
RATES = dict.fromkeys(NEEDED, 0.0)
ROOMY, SHORT = EngineLimits(2), EngineLimits(2, 64, 16, 1)
"""On the second an engine may have to put requests back: they hold 11 and 6 tokens at last."""


@pytest.mark.parametrize("kind", NEEDED)
def test_seconds_are_those_of_the_work_that_no_order_saves(kind: str) -> None:
    rates = {**RATES, kind: 2.0}
    proven = 2.0 * NEEDED[kind]
    assert verify_iteration_seconds(TIMED, ROOMY, LEAST, rates, proven) is None
    more = proven * (1 + 1e-8)
    assert str(verify_iteration_seconds(TIMED, ROOMY, LEAST, rates, more)) == (
        f"the certificate proves the bound: the rates prove {proven:.9g} s, the bound says {more:.9g}"
    )


def test_seconds_of_different_work_are_added() -> None:
    rates = dict.fromkeys(NEEDED, 1.0)
    assert verify_iteration_seconds(TIMED, ROOMY, LEAST, rates, sum(NEEDED.values())) is None
    assert verify_iteration_seconds(TIMED, ROOMY, LEAST, rates, sum(NEEDED.values()) + 0.001) is not None


def test_no_seconds_follow_from_iterations_that_are_not_proven() -> None:
    said = verify_iteration_seconds(TIMED, ROOMY, replace(LEAST, iterations=4), RATES, 0.0)
    assert str(said) == "the certificate proves the bound: it proves 3 iterations, the bound says 4"
    two_slots = replace(LEAST, certificate={"kind": "slots"})
    assert verify_iteration_seconds(TIMED, ROOMY, two_slots, {**RATES, "iterations": 1.0}, 3.0) is None


@pytest.mark.parametrize("given", [sorted(NEEDED)[1:], [*sorted(NEEDED), "watts"]])
def test_rates_of_other_work_are_refused_by_name(given: list[str]) -> None:
    said = verify_iteration_seconds(TIMED, ROOMY, LEAST, dict.fromkeys(given, 0.0), 0.0)
    assert str(said) == f"rates: there are rates of {given}, not of {sorted(NEEDED)}"


@pytest.mark.parametrize("kind", sorted(NEEDED.keys() - {"drawn"}))
@pytest.mark.parametrize("rate", [-1e-12, float("nan")])
def test_a_rate_below_zero_is_refused_since_work_may_be_left_out(kind: str, rate: float) -> None:
    said = verify_iteration_seconds(TIMED, ROOMY, LEAST, {**RATES, kind: rate}, -1.0)
    assert str(said) == f"rates: {kind} is below zero: work that need not be done would lower the bound"


def test_tokens_drawn_are_the_same_in_every_order_and_may_take_less_than_nothing() -> None:
    rates = {**RATES, "drawn": -1.0, "iterations": 10.0}
    assert verify_iteration_seconds(TIMED, ROOMY, LEAST, rates, 25.0) is None
    assert verify_iteration_seconds(TIMED, ROOMY, LEAST, rates, 25.1) is not None


@pytest.mark.parametrize(("rates", "seconds"), [({"drawn": float("nan")}, 0.0), ({}, float("nan"))])
def test_what_is_no_number_proves_nothing(rates: dict[str, float], seconds: float) -> None:
    assert verify_iteration_seconds(TIMED, ROOMY, LEAST, {**RATES, **rates}, seconds) is not None


def test_a_decode_dearer_than_the_chunk_in_its_place_is_refused_where_requests_may_be_put_back() -> None:
    dear = {**RATES, "decodes": 1.0, "kv_tokens": 0.5, "prompt_tokens": 1.4}
    just = {**dear, "prompt_tokens": 1.5}
    said = "rates: a decode counts more than the chunk that may take its place"
    assert str(verify_iteration_seconds(TIMED, SHORT, LEAST, dear, 1.0)) == said
    assert verify_iteration_seconds(TIMED, SHORT, LEAST, just, 1.0) is None
    assert verify_iteration_seconds(TIMED, ROOMY, LEAST, dear, 1.0) is None
    assert verify_iteration_seconds(TIMED, SHORT, LEAST, dear, 1.0, resumed_known=True) is None
