"""Workloads drawn from published statistics have these statistics."""

from __future__ import annotations

import numpy as np
import pytest

from batchbound.data.files.disk import InputError
from batchbound.data.lengths.distributions import LengthDistribution
from batchbound.data.readers.generators import GENERATORS, PAPER_REQUESTS, generate

TABLE3 = ("table3", "table3-atom45", "table3-atom55", "table3-censored")

# ExeGPT, Table 3: (average, deviation, maximum) of inputs; of outputs with the 99th percentile.
EXEGPT = {
    "S": ((256, 252, 512), (32, 13, 63, 80)),
    "T": ((128, 81, 256), (128, 68, 292, 320)),
    "G": ((64, 23, 128), (192, 93, 417, 480)),
    "C1": ((256, 115, 512), (64, 30, 137, 160)),
    "C2": ((512, 252, 1024), (256, 134, 579, 640)),
}

# EconoServe, Table 2: (average, least, most) of inputs and outputs, requests per second.
ECONOSERVE = {
    "alpaca": ((19.31, 9, 2470), (58.41, 13, 292), 36.0),
    "sharegpt": ((161.31, 16, 3200), (337.99, 19, 991), 28.0),
    "bookcorpus": ((1952.11, 18, 2048), (681.2, 32, 1041), 1.2),
}


@pytest.mark.parametrize("name", TABLE3)
def test_table3_has_the_published_moments(name: str) -> None:
    inputs, outputs = GENERATORS[name].input_tokens(), GENERATORS[name].output_tokens()
    assert (inputs.mean, inputs.sd) == pytest.approx((68.43, 25.04))
    assert (outputs.mean, outputs.sd) == pytest.approx((344.83, 187.99))
    assert (outputs.low, outputs.high) == (1, 512)


@pytest.mark.parametrize(
    ("name", "share"), [("table3", 0.5), ("table3-atom45", 0.45), ("table3-atom55", 0.55)]
)
def test_table3_cuts_a_share_of_the_answers_at_512_tokens(name: str, share: float) -> None:
    assert GENERATORS[name].output_tokens().probabilities[-1] == pytest.approx(share)


def test_the_moments_of_a_hundred_draws_of_table3_are_the_published_ones() -> None:
    draws = [generate("table3", seed) for seed in range(100)]
    outputs = np.concatenate([draw.output_tokens for draw in draws])
    inputs = np.concatenate([draw.input_tokens for draw in draws])
    assert all(len(draw) == PAPER_REQUESTS for draw in draws)
    assert outputs.mean() == pytest.approx(344.83, abs=2.0)  # four standard errors of 131,900 lengths
    assert outputs.std() == pytest.approx(187.99, abs=2.0)
    assert inputs.mean() == pytest.approx(68.43, abs=0.3)
    assert inputs.std() == pytest.approx(25.04, abs=0.5)


@pytest.mark.parametrize("task", EXEGPT)
def test_exegpt_outputs_have_the_published_moments_and_tail(task: str) -> None:
    mean, sd, percentile, most = EXEGPT[task][1]
    outputs = GENERATORS[f"exegpt-{task}"].output_tokens()
    assert (outputs.mean, outputs.sd, outputs.high) == pytest.approx((mean, sd, most))
    assert abs(outputs.quantile(0.99) - percentile) <= 1


@pytest.mark.parametrize("task", EXEGPT)
def test_exegpt_inputs_have_the_published_moments_where_any_can(task: str) -> None:
    mean, sd, most = EXEGPT[task][0]
    inputs = GENERATORS[f"exegpt-{task}"].input_tokens()
    assert inputs.high == most
    assert inputs.mean == pytest.approx(mean, rel=2e-3)
    widest = (most - 1) / 12**0.5  # of a single-peaked distribution around the middle: the uniform one
    assert inputs.sd == pytest.approx(sd) if sd < widest else 0.8 * widest < inputs.sd < widest


@pytest.mark.parametrize("trace", ECONOSERVE)
def test_econoserve_traces_have_the_published_averages_and_ranges(trace: str) -> None:
    made = GENERATORS[trace]
    *sides, rate = ECONOSERVE[trace]
    assert made.arrival_rate == rate
    for got, (mean, low, high) in zip((made.input_tokens(), made.output_tokens()), sides, strict=True):
        assert isinstance(got, LengthDistribution)
        assert (got.mean, got.low, got.high) == pytest.approx((mean, low, high))


@pytest.mark.parametrize("trace", ECONOSERVE)
def test_requests_arrive_at_the_published_rate(trace: str) -> None:
    drawn = generate(trace, 7, 20_000)
    assert drawn.arrival[0] == 0
    assert (np.diff(drawn.arrival) >= 0).all()
    assert 19_999 / drawn.arrival[-1] == pytest.approx(ECONOSERVE[trace][2], rel=0.03)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_draw_repeats_with_its_seed_and_has_the_count_asked_for(name: str) -> None:
    first, second, other = generate(name, 5, 60), generate(name, 5, 60), generate(name, 6, 60)
    assert len(first) == 60
    assert list(first) == list(second)
    assert list(first) != list(other)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'table9' is not a generator.*table3, .*exegpt-S.*bookcorpus"):
        generate("table9", 0)


@pytest.mark.parametrize(("seed", "count"), [(-1, 5), (0, 0)])
def test_a_seed_or_count_that_cannot_be_is_refused(seed: int, count: int) -> None:
    with pytest.raises(InputError, match=f"seed {seed} and count {count}"):
        generate("table3", seed, count)
