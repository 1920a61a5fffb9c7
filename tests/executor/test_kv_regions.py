"""Regions of keys and values on the device, guests in them, and a model that is served from them."""

import json

import numpy as np
import pytest
from builders import mostly_slow
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.cli import main
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload, numbered_ids
from batchbound.executor.serving.regions import PlacedLedger
from batchbound.heuristics.serving.econoserve.sizes import EconoServeSizes
from batchbound.heuristics.serving.registry import BLOCK_ALLOCATION, ServingOptions, serving_policy


def test_a_region_grows_where_it_is_if_the_blocks_behind_it_are_free() -> None:
    ledger = PlacedLedger(40, requests=2, block_tokens=4)
    ledger.grow(0, 4)
    ledger.grow(0, 10)
    assert ledger.spans(0, 0, 10) == ((0, 10),)
    assert ledger.spans(0, 3, 9) == ((3, 9),)


def test_a_region_that_is_hemmed_in_moves_to_the_smallest_gap_that_holds_it() -> None:
    ledger = PlacedLedger(40, requests=4, block_tokens=4)
    for request, tokens in enumerate([4, 4, 12, 4]):
        ledger.grow(request, tokens)
    ledger.release(2)
    ledger.grow(0, 8)
    # Free are places 8 to 20 and 24 to 40, both large enough.
    assert ledger.spans(0, 0, 8) == ((8, 16),)
    assert ledger.compactions == 0


def test_where_no_gap_is_large_enough_all_regions_move_together() -> None:
    ledger = PlacedLedger(24, requests=4, block_tokens=4)
    for request in range(3):
        ledger.grow(request, 8)
    ledger.release(1)
    ledger.grow(3, 4)
    ledger.release(0)
    # Free are places 0 to 8 and 12 to 16: twelve tokens fit once the others stand side by side.
    assert ledger.grow(1, 12)
    assert [ledger.spans(request, 0, 4) for request in (3, 2, 1)] == [((0, 4),), ((4, 8),), ((12, 16),)]
    assert ledger.compactions == 1


def test_a_guest_lies_in_its_host_and_moves_with_it() -> None:
    ledger = PlacedLedger(64, requests=5, block_tokens=4)
    ledger.grow(0, 4)
    ledger.grow(1, 32)
    ledger.grow(2, 4)
    ledger.lend(1, 2, start=16, tokens=16)
    # Its own block first, then half of its host's region; its own guest lies in the middle of that half.
    assert ledger.spans(2, 0, 20) == ((36, 40), (20, 36))
    ledger.lend(2, 3, start=12, tokens=8)
    assert ledger.spans(3, 0, 8) == ((28, 36),)
    ledger.release(0)
    assert ledger.grow(4, 28)
    assert ledger.spans(3, 0, 8) == ((24, 32),)


def test_a_guest_of_two_hosts_lies_in_both_in_the_order_it_borrowed() -> None:
    ledger = PlacedLedger(24, requests=3, block_tokens=4)
    ledger.grow(0, 8)
    ledger.grow(1, 12)
    ledger.lend(1, 2, start=9, tokens=3)
    ledger.lend(0, 2, start=6, tokens=2)
    assert ledger.spans(2, 0, 5) == ((17, 20), (6, 8))
    assert ledger.spans(2, 1, 4) == ((18, 20), (6, 7))


def test_pages_lie_anywhere_and_never_move() -> None:
    ledger = PlacedLedger(24, requests=4, block_tokens=4, paged=True)
    for request in range(3):
        ledger.grow(request, 4)
    ledger.grow(0, 12)
    assert ledger.spans(0, 0, 12) == ((0, 4), (12, 20))
    ledger.release(1)
    ledger.grow(2, 12)
    assert ledger.spans(2, 0, 12) == ((8, 12), (4, 8), (20, 24))
    assert ledger.compactions == 0


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 40)), max_size=40), st.booleans()
)
def test_no_place_ever_belongs_to_two(moves: list[tuple[int, int, int]], paged: bool) -> None:
    ledger = PlacedLedger(64, requests=6, block_tokens=4, paged=paged)
    for request, other, tokens in moves:
        if other == request:
            ledger.release(request)
        elif tokens % 2 and request not in ledger.loans:
            ledger.grow(request, tokens)
        elif (room := int(ledger.room[other])) and ledger.room[request] and not ledger.guests.get(request):
            ledger.lend(other, request, start=room // 2, tokens=room - room // 2)
        taken: list[int] = []
        for resident in range(6):
            room = int(ledger.room[resident])
            spans = ledger.spans(resident, 0, room)
            assert sum(end - begin for begin, end in spans) == room
            taken += [place for begin, end in spans for place in range(begin, end)]
            if not paged and resident not in ledger.loans:
                assert len(spans) <= 1
        assert len(set(taken)) == len(taken)
        assert all(0 <= place < ledger.places for place in taken)


def workload(prompts: list[int], answers: list[int]) -> Workload:
    count = len(prompts)
    return Workload(numbered_ids(count), np.array(prompts), np.array(answers), np.zeros(count))


def some(count: int, seed: int) -> tuple[Workload, list[list[int]], list[int]]:
    """Return requests, their prompts, and lengths predicted wrongly."""
    rng = np.random.default_rng(seed)
    requests = workload(rng.integers(1, 9, count).tolist(), rng.integers(1, 30, count).tolist())
    prompts = [rng.integers(250, size=tokens).tolist() for tokens in requests.input_tokens]
    predicted = np.rint(requests.output_tokens * np.exp(0.4 * rng.standard_normal(count))).clip(1)
    return requests, prompts, predicted.astype(np.int64).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_slow(["llama", "mistral"], fast=["mistral"]))
def test_every_policy_gives_the_models_own_answers_from_half_the_memory(family: str) -> None:
    from batchbound.executor.models.source import load_model
    from batchbound.executor.serving.engine import own_answer, serve_on_model

    requests, prompts, predicted = some(14, seed=1)
    model = load_model(f"tiny:{family}:0", dtype="float64")
    own = [own_answer(model, p, int(n)) for p, n in zip(prompts, requests.output_tokens, strict=True)]
    longest = int((requests.input_tokens + requests.output_tokens).max())
    sizes = EconoServeSizes(padding=0.0, reserved=0.1, buffer=0.0)
    moved = stopped = lent = 0
    for name in ("vllm", "sarathi", "multires", "fastserve", "econoserve-sdo", "econoserve", "pipelined"):
        done = serve_on_model(
            model,
            prompts,
            requests,
            serving_policy(name, ServingOptions(longest, 12, sizes)),
            2 * longest,
            block_tokens=4,
            paged=name in BLOCK_ALLOCATION,
            predicted=np.array(predicted),
        )
        assert done.answers == own
        moved += done.moved_tokens
        stopped += int(done.run.preempted.sum())
        if name in ("econoserve", "pipelined"):
            lent += done.run.lent_tokens > 0
    assert lent == 2
    assert moved > 0
    assert stopped > 0


@pytest.mark.slow
def test_lending_holds_more_than_exact_allocation_and_than_blocks_alone() -> None:
    from batchbound.executor.models.source import load_model
    from batchbound.executor.serving.engine import serve_on_model

    # A quarter of Alpaca's lengths on blocks of a quarter of 32 tokens, the paper's.
    drawn, count = generate("alpaca", 0, 96), 96
    inputs, outputs = (-(-lengths // 4) for lengths in (drawn.input_tokens, drawn.output_tokens))
    requests = workload(inputs.clip(1, 32).tolist(), outputs.tolist())
    guess = requests.output_tokens * np.exp(0.126 * np.random.default_rng(7).standard_normal(count))
    longest = int((requests.input_tokens + requests.output_tokens).max())
    model = load_model("tiny:llama:0", dtype="float64")
    prompts = [[1] * int(tokens) for tokens in requests.input_tokens]
    held = {}
    for name in ("vllm", "multires", "pipelined"):
        done = serve_on_model(
            model,
            prompts,
            requests,
            serving_policy(name, ServingOptions(longest, 1024, EconoServeSizes(reserved=0.02))),
            8 * longest,
            block_tokens=8,
            paged=name in BLOCK_ALLOCATION,
            predicted=np.rint(guess).clip(1).astype(np.int64),
        )
        held[name] = float(done.run.held.mean()) / done.run.capacity
    assert held["pipelined"] > 1.05 * max(held["vllm"], held["multires"])


@pytest.mark.slow
def test_serve_runs_a_model_and_says_whether_its_answers_are_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["serve", "alpaca:1:6", "--engine", "tiny:llama:0", "--dtype", "float64", "--kv-capacity", "600"]
    assert main([*words, "--verify", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["wrong_answers"]) == (6, 0)
    assert 0 < figures["kv_held_per_iteration"] <= 1


def test_a_model_that_serve_cannot_run_is_refused_without_an_option_that_it_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers", reason="the engine extra is not installed")
    assert main(["serve", "alpaca:0:3", "--engine", "tiny:bloom", "--kv-capacity", "1000"]) == 2
    message = capsys.readouterr().err
    assert "its layers do not call transformers' attention interface; serve one such as Llama" in message
    assert "--tier" not in message


def test_serve_needs_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "alpaca:1:6", "--kv-capacity", "600"]) == 2
    assert "Give --cost FILE and --model NAME, or --engine MODEL" in capsys.readouterr().err
    words = ["serve", "alpaca:1:6", "--engine", "tiny:llama:0", "--kv-capacity", "600"]
    assert main([*words, "--policy", "distserve"]) == 2
    assert "needs two devices" in capsys.readouterr().err
