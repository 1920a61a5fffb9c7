"""Workloads drawn from published statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

import numpy as np

from ..files.disk import InputError
from ..lengths.distributions import LengthDistribution
from ..workload import Workload, numbered_ids

PAPER_REQUESTS = 1319
"""Requests of Table III: the test problems of GSM8K."""

MOST_REQUESTS = 10_000_000
"""Most requests to draw at once."""


@dataclass(frozen=True, slots=True)
class Generator:
    """Published statistics of a workload, with matching distributions.

    source: Publication of the statistics.
    input_tokens, output_tokens: Functions that return the distributions.
    count: Default number of requests.
    arrival_rate: Requests per second of a Poisson process; None if all arrive at the start.
    """

    source: str
    input_tokens: Callable[[], LengthDistribution]
    output_tokens: Callable[[], LengthDistribution]
    count: int = 1000
    arrival_rate: float | None = None


def generate(name: str, seed: int, count: int | None = None) -> Workload:
    """Return a workload drawn from published statistics."""
    generator = GENERATORS.get(name)
    if generator is None:
        near = get_close_matches(name, GENERATORS, n=1)
        known = f"{f'Did you mean {near[0]}? ' if near else ''}Known are {', '.join(GENERATORS)}."
        raise InputError(f"{name!r} is not a generator of workloads", where="workload", hint=known)
    count = generator.count if count is None else count
    if seed < 0 or not 1 <= count <= MOST_REQUESTS:
        message = f"seed {seed} and count {count} of {name!r}"
        hint = f"Give a seed of 0 or more and a count from 1 to {MOST_REQUESTS:,}."
        raise InputError(message, where="workload", hint=hint)
    rng = np.random.default_rng(seed)
    inputs = _distribution(generator.input_tokens).sample(rng, count)
    outputs = _distribution(generator.output_tokens).sample(rng, count)
    arrival = np.zeros(count)
    if generator.arrival_rate is not None:
        arrival[1:] = np.cumsum(rng.exponential(1 / generator.arrival_rate, count - 1))
    return Workload(numbered_ids(count), inputs, outputs, arrival)


@cache
def _distribution(make: Callable[[], LengthDistribution]) -> LengthDistribution:
    return make()


def _table3(output_tokens: Callable[[], LengthDistribution]) -> Generator:
    return Generator(
        "hybrid offline-online paper, Table III", _table3_inputs, output_tokens, count=PAPER_REQUESTS
    )


def _table3_inputs() -> LengthDistribution:
    return LengthDistribution.with_moments("log_normal", 68.43, 25.04)


def _cut(share: float) -> Callable[[], LengthDistribution]:
    """Return gamma outputs with Table III's moments, cut at 512 tokens."""

    def make() -> LengthDistribution:
        mean, sd, cap = 344.83, 187.99, 512
        rest = (mean - share * cap) / (1 - share)
        rest_square = (mean**2 + sd**2 - share * cap**2) / (1 - share)
        finished = LengthDistribution.with_moments("gamma", rest, (rest_square - rest**2) ** 0.5, 1, cap - 1)
        whole = LengthDistribution(cap, np.ones(1))
        return LengthDistribution.mixture([(share, whole), (1 - share, finished)])

    return make


def _exegpt(
    inputs: tuple[float, float, int], outputs: tuple[float, float, int], *, spread_too_wide: bool = False
) -> Generator:
    """Return a task of ExeGPT's Table 3 from published moments.

    Truncated normal, as its section 7.1 says. With moments after truncation to 1..maximum, the outputs' 99th
    percentiles are the published ones to within a token. The inputs of S and T spread wider than any
    single-peaked distribution on their range can. Their moments are therefore read as those before
    truncation, which keeps the mean to 0.2 %.
    """

    def make_inputs() -> LengthDistribution:
        if spread_too_wide:
            return LengthDistribution.parametric("normal", *inputs[:2], 1, inputs[2])
        return LengthDistribution.with_moments("normal", *inputs[:2], 1, inputs[2])

    def make_outputs() -> LengthDistribution:
        return LengthDistribution.with_moments("normal", *outputs[:2], 1, outputs[2])

    return Generator("ExeGPT, Table 3", make_inputs, make_outputs)


def _econoserve(
    inputs: Callable[[], LengthDistribution], outputs: tuple[float, int, int], arrival_rate: float
) -> Generator:
    """Return a trace of EconoServe's Table 2, as random as possible.

    ``inputs`` and ``outputs`` are (average, least, most).
    """
    mean, low, high = outputs
    return Generator(
        "EconoServe, Table 2",
        inputs,
        lambda: LengthDistribution.most_random(mean, low, high),
        arrival_rate=arrival_rate,
    )


def _book_chunks() -> LengthDistribution:
    """Return lengths of book chunks of 2,048 tokens.

    The last chunk of a book has at least 18. The table's longest input (461K tokens) is a book before it is
    cut; its average is one of chunks.
    """
    mean, low, chunk = 1952.11, 18, 2048
    last = LengthDistribution(low, np.full(chunk - low, 1 / (chunk - low)))
    share = (mean - last.mean) / (chunk - last.mean)
    return LengthDistribution.mixture([(share, LengthDistribution(chunk, np.ones(1))), (1 - share, last)])


GENERATORS: Mapping[str, Generator] = {
    "table3": _table3(_cut(0.50)),
    "table3-atom45": _table3(_cut(0.45)),
    "table3-atom55": _table3(_cut(0.55)),
    "table3-censored": _table3(
        lambda: LengthDistribution.with_moments("censored_normal", 344.83, 187.99, 1, 512)
    ),
    "exegpt-S": _exegpt((256, 252, 512), (32, 13, 80), spread_too_wide=True),
    "exegpt-T": _exegpt((128, 81, 256), (128, 68, 320), spread_too_wide=True),
    "exegpt-G": _exegpt((64, 23, 128), (192, 93, 480)),
    "exegpt-C1": _exegpt((256, 115, 512), (64, 30, 160)),
    "exegpt-C2": _exegpt((512, 252, 1024), (256, 134, 640)),
    "alpaca": _econoserve(lambda: LengthDistribution.most_random(19.31, 9, 2470), (58.41, 13, 292), 36.0),
    "sharegpt": _econoserve(
        lambda: LengthDistribution.most_random(161.31, 16, 3200), (337.99, 19, 991), 28.0
    ),
    "bookcorpus": _econoserve(_book_chunks, (681.2, 32, 1041), 1.2),
}
"""Workloads that can be drawn, by name."""
