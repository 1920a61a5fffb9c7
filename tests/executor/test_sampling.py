from __future__ import annotations

import pickle

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.executor.models.mixed_sampling import MixedSampler
from batchbound.executor.models.sampling import STEP, Sampler, _uniform_whole, drawn, likely_mass

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)


def draw(sampler: Sampler, count: int) -> list[int]:
    """Tokens 0 to ``count`` of one request."""
    streams = torch.full((count,), sampler.stream("request"))
    tokens: list[int] = sampler.choose(LOGITS.expand(count, -1), streams, torch.arange(count)).tolist()
    return tokens


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert set(draw(Sampler(), 50)) == {0}


def test_draws_follow_the_softmax_of_the_scaled_logits() -> None:
    tokens = torch.tensor(draw(Sampler(temperature=2.0), 20_000))
    shares = torch.bincount(tokens, minlength=4) / len(tokens)
    torch.testing.assert_close(shares.double(), (LOGITS / 2.0).softmax(0), atol=0.015, rtol=0)


def test_a_temperature_next_to_none_takes_the_likeliest_token() -> None:
    sampler = Sampler(temperature=1e-320)
    logits = LOGITS.flip(0)
    alone = sampler.choose(logits[None], torch.tensor([sampler.stream("a")]), torch.tensor([0]))
    mixed = MixedSampler({"a": sampler, "b": Sampler()})
    streams = torch.tensor([mixed.stream("a"), mixed.stream("b")])
    assert mixed.choose(logits.expand(2, -1), streams, torch.tensor([0, 0])).tolist() == [3, 3]
    assert alone.tolist() == [3]


def test_top_k_keeps_the_likeliest_tokens_only() -> None:
    assert set(draw(Sampler(temperature=5.0, top_k=2), 500)) == {0, 1}


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    # Probabilities 0.64, 0.24, 0.09, 0.03: the second token crosses 0.7.
    assert set(draw(Sampler(temperature=1.0, top_p=0.7), 500)) == {0, 1}
    assert set(draw(Sampler(temperature=1.0, top_p=0.6), 500)) == {0}


def test_seed_request_and_index_decide_a_draw_and_nothing_else() -> None:
    sampler = Sampler(temperature=1.0, seed=3)
    assert draw(sampler, 100) == draw(Sampler(temperature=1.0, seed=3), 100)
    assert draw(sampler, 100) != draw(Sampler(temperature=1.0, seed=4), 100)
    assert sampler.stream("a") != sampler.stream("b")
    alone = sampler.choose(LOGITS[None], torch.tensor([sampler.stream("request")]), torch.tensor([57]))
    assert alone.tolist() == [draw(sampler, 100)[57]]


ASKED = [
    Sampler(),
    Sampler(temperature=0.7, seed=1),
    Sampler(temperature=0.7, seed=2),
    Sampler(temperature=1.3, top_k=1),
    Sampler(temperature=1.3, top_k=5, top_p=0.8),
    Sampler(temperature=2.0, top_k=40, seed=3),
    Sampler(temperature=0.9, top_p=0.5),
    Sampler(temperature=0.9, top_p=1.0),
]


@pytest.mark.parametrize("asked", [ASKED, ASKED[:3], ASKED[3:4] + ASKED[:1], ASKED[6:]])
def test_requests_of_one_batch_get_the_tokens_that_each_asks_for(asked: list[Sampler]) -> None:
    mixed = MixedSampler({f"request {i}": sampler for i, sampler in enumerate(asked)})
    rows = torch.arange(400) % len(asked)
    # Rounded, so that some logits are equal at the edge of what is kept.
    logits = torch.randn(len(rows), 40, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    streams = torch.tensor([mixed.stream(f"request {i}") for i in rows.tolist()])
    chosen = mixed.choose(logits, streams, torch.arange(len(rows)))
    for i, sampler in enumerate(asked):
        own = rows == i
        alone = sampler.choose(logits[own], streams[own], torch.arange(len(rows))[own])
        assert chosen[own].tolist() == alone.tolist()
    assert pickle.loads(pickle.dumps(mixed)).choose(logits, streams, torch.arange(len(rows))).equal(chosen)


def test_rows_that_no_request_holds_are_chosen_for_without_harm() -> None:
    mixed = MixedSampler({"a": Sampler(temperature=1.0), "b": Sampler(temperature=2.0, seed=1)})
    ends = torch.tensor([2**63 - 1, -(2**63), mixed.stream("a warm-up")])
    assert mixed.choose(LOGITS.expand(3, -1), ends, torch.arange(3)).max() < len(LOGITS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or more and finite, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be 0 or more"),
        ({"top_k": -2}, "top_k must be 0"),
        ({"top_p": 0.0}, "top_p must lie in"),
        ({"top_p": 1.5}, "top_p must lie in"),
    ],
)
def test_a_parameter_out_of_range_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocabulary", [3, 256, 1000, 49_152])
def test_block_sums_draw_the_tokens_that_exact_sums_draw(vocabulary: int) -> None:
    rows = 400
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(rows, vocabulary, generator=generator)
    sampler, indices = Sampler(temperature=0.7, seed=3), torch.arange(rows)
    streams = torch.tensor([sampler.stream(str(row)) for row in range(rows)])
    weights = (logits.double() / 0.7).softmax(dim=-1)
    cumulated = weights.cumsum(dim=-1)
    exact = (cumulated <= _uniform_whole(streams, indices)[:, None] * cumulated[:, -1:] * STEP).sum(dim=-1)
    drawn_tokens = sampler.choose(logits, streams, indices)
    # Weights in float32 move a boundary between tokens by 1e-7 of the sum: a draw there may differ.
    assert (drawn_tokens != exact).sum() <= 1


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    weights = torch.zeros(2_000, 1_000)
    weights[:, [300, 301, 999]] = torch.tensor([0.25, 0.5, 0.25])
    tokens = drawn(weights, torch.zeros(2_000, dtype=torch.int64), torch.arange(2_000))
    counts = tokens.bincount(minlength=1_000)
    assert counts[[300, 301, 999]].sum() == 2_000
    assert counts[301] / 2_000 == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.9999])
def test_the_likeliest_mass_is_that_of_the_sorted_vocabulary(share: float) -> None:
    logits = 3 * torch.randn(8, 5_000, generator=torch.Generator().manual_seed(2))
    weights = logits.softmax(dim=-1)
    ordered, order = weights.double().sort(dim=-1, descending=True)
    kept = likely_mass(weights, torch.tensor([[share]] * 7 + [[torch.inf]]))
    for row in range(7):
        count = int(((ordered[row].cumsum(0) - ordered[row]) < share).sum())
        assert sorted(kept[row].nonzero()[:, 0].tolist()) == sorted(order[row, :count].tolist())
    assert torch.equal(kept[7], weights[7])
