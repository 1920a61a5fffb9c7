from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.executor.sampling import Sampler  # noqa: E402

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
