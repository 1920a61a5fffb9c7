"""Distributions of lengths, and the choice of answer lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.files.disk import InputError
from batchbound.data.files.jsonl import file_digest
from batchbound.data.lengths.distributions import LengthDistribution
from batchbound.data.readers.length_source import LengthSource, length_source_of
from batchbound.data.readers.requests import read_workload

some_lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def test_an_empirical_distribution_has_the_moments_of_what_was_observed() -> None:
    seen = LengthDistribution.empirical([2, 2, 4, 8])
    assert (seen.low, seen.high) == (2, 8)
    assert seen.mean == 4.0
    assert seen.sd == pytest.approx(np.std([2, 2, 4, 8]))
    assert [seen.quantile(q) for q in (0.0, 0.5, 0.51, 0.75, 0.76, 1.0)] == [2, 2, 4, 4, 8, 8]


@given(some_lengths, st.floats(0.0, 1.0))
def test_a_quantile_is_the_smallest_length_that_covers_the_share(lengths: list[int], q: float) -> None:
    seen = LengthDistribution.empirical(lengths)
    covering = [x for x in sorted(lengths) if np.mean(np.array(lengths) <= x) >= q - 1e-12]
    assert seen.quantile(q) == covering[0]


@given(some_lengths, st.integers(0, 2**32))
def test_samples_stay_among_the_observed_lengths(lengths: list[int], seed: int) -> None:
    drawn = LengthDistribution.empirical(lengths).sample(np.random.default_rng(seed), 50)
    assert drawn.dtype == np.int64
    assert set(drawn.tolist()) <= set(lengths)


@pytest.mark.parametrize(
    ("family", "mean", "sd", "high"),
    [
        ("normal", 32.0, 13.0, 80),
        ("normal", 256.0, 140.0, 512),
        ("censored_normal", 344.83, 187.99, 512),
        ("log_normal", 68.43, 25.04, None),
        ("log_normal", 200.0, 300.0, 4000),
        ("gamma", 177.66, 121.6, 511),
        ("gamma", 50.0, 80.0, 2000),
    ],
)
def test_a_family_member_has_the_moments_asked_for_after_truncation(
    family: str, mean: float, sd: float, high: int | None
) -> None:
    made = LengthDistribution.with_moments(family, mean, sd, 1, high)
    assert made.mean == pytest.approx(mean, rel=1e-5)
    assert made.sd == pytest.approx(sd, rel=1e-5)
    assert made.low == 1
    assert high is None or made.high == high


def test_parametric_reads_the_moments_as_those_before_truncation() -> None:
    free = LengthDistribution.parametric("normal", 500.0, 20.0, 1, 1000)
    assert (free.mean, free.sd) == pytest.approx((500.0, 20.0), rel=1e-3)
    assert LengthDistribution.parametric("normal", 32.0, 13.0, 1, 80).mean > 32.1


def test_moments_no_member_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no normal distribution on 1\.\.512 tokens has mean 256"):
        LengthDistribution.with_moments("normal", 256.0, 252.0, 1, 512)
    with pytest.raises(ValueError, match="mean 600"):
        LengthDistribution.with_moments("gamma", 600.0, 10.0, 1, 512)
    with pytest.raises(ValueError, match="'cauchy' is not a family"):
        LengthDistribution.with_moments("cauchy", 6.0, 2.0)


@given(st.integers(1, 50), st.integers(2, 400), st.floats(0.02, 0.98))
def test_the_most_random_distribution_has_the_mean_and_the_range(low: int, width: int, at: float) -> None:
    mean = low + at * width
    made = LengthDistribution.most_random(mean, low, low + width)
    assert made.mean == pytest.approx(mean, rel=1e-6)
    assert (made.low, made.high) == (low, low + width)


def test_a_mixture_weighs_its_parts() -> None:
    ones, tens = LengthDistribution.empirical([1]), LengthDistribution.empirical([10])
    mixed = LengthDistribution.mixture([(0.25, ones), (0.75, tens)])
    assert mixed.mean == 7.75
    assert mixed.quantile(0.2) == 1
    assert mixed.quantile(0.3) == 10


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["normal", "log_normal", "gamma", "censored_normal"]))
def test_a_fit_recovers_the_moments_of_a_sample(seed: int, family: str) -> None:
    sample = np.random.default_rng(seed).integers(20, 120, 200)
    fitted = LengthDistribution.fit(sample, family)
    assert fitted.mean == pytest.approx(sample.mean(), rel=1e-5)
    assert fitted.sd == pytest.approx(sample.std(), rel=1e-5)


def test_equal_lengths_fit_any_family() -> None:
    assert LengthDistribution.fit([7, 7, 7], "gamma").quantile(0.9) == 7


def test_sampling_repeats_with_its_seed() -> None:
    seen = LengthDistribution.empirical([1, 5, 9])
    first, second = (seen.sample(np.random.default_rng(3), 100) for _ in range(2))
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize("masses", [[], [0.5, 0.4], [1.5, -0.5], [float("nan"), 1.0]])
def test_probabilities_that_are_none_are_refused(masses: list[float]) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        LengthDistribution(1, np.array(masses))


def test_lengths_below_one_token_and_shares_above_one_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths from 0"):
        LengthDistribution(0, np.ones(1))
    with pytest.raises(ValueError, match="between 0 and 1"):
        LengthDistribution.empirical([3]).quantile(1.5)


# The choice of answer lengths.


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    rows = {"a": 10, "b": 20, "c": 30}
    path.write_text(
        "".join(
            json.dumps(
                {
                    "custom_id": name,
                    "response": {"status_code": 200, "body": {"usage": {"completion_tokens": tokens}}},
                    "error": None,
                }
            )
            + "\n"
            for name, tokens in rows.items()
        )
    )
    return path


def test_known_lengths_are_taken_up_to_the_cap() -> None:
    resolved = LengthSource.parse("known").resolve(["a", "b"], caps=[None, 5], known=[9, 9])
    assert resolved.tolist() == [9, 5]
    assert resolved.dtype == np.int64


def test_a_constant_is_cut_at_the_cap() -> None:
    assert LengthSource.parse("constant:7").resolve(["a", "b"], caps=[None, 3]).tolist() == [7, 3]


def test_the_cap_itself_can_be_the_length() -> None:
    assert LengthSource.parse("cap").resolve(["a", "b"], caps=[4, 3]).tolist() == [4, 3]


def test_a_longest_answer_caps_what_requests_state_and_those_that_state_nothing() -> None:
    source = replace(LengthSource.parse("cap"), longest=5)
    assert source.resolve(["a", "b", "c"], caps=[4, 9, None]).tolist() == [4, 5, 5]
    assert length_source_of(source.to_json()) == source


def test_a_longest_answer_caps_the_lengths_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n3,9\n3,2\n")
    assert read_workload(tmp_path / "lengths.csv", longest=5).workload.output_tokens.tolist() == [5, 2]


def test_earlier_answers_are_matched_by_name(answers: Path) -> None:
    source = LengthSource.parse(f"completions:{answers}")
    assert source.resolve(["c", "a"]).tolist() == [30, 10]
    assert source.digest == file_digest(answers)


def test_earlier_lengths_can_come_from_a_table(tmp_path: Path) -> None:
    table = tmp_path / "lengths.csv"
    table.write_text("id,output_tokens\na,3\nb,4\n")
    assert LengthSource.parse(f"completions:{table}").resolve(["b", "a"]).tolist() == [4, 3]


def test_the_name_that_earlier_plans_have_for_completions_is_read(answers: Path) -> None:
    now = LengthSource.parse(f"completions:{answers}")
    assert LengthSource.parse(f"answers:{answers}") == now
    assert length_source_of({**now.to_json(), "kind": "answers"}) == now
    assert now.to_json()["kind"] == "completions"


def test_a_quantile_is_the_same_for_every_request_up_to_its_cap(answers: Path) -> None:
    source = LengthSource.parse(f"quantile:0.5:{answers}")
    assert source.resolve(["x", "y"], caps=[None, 12]).tolist() == [20, 12]
    fitted = LengthSource.parse(f"quantile:0.99:gamma:{answers}")
    assert fitted.family == "gamma"
    assert 40 <= fitted.resolve(["x"])[0] <= 48  # beyond the longest seen


def test_a_file_that_does_not_answer_every_request_is_refused(answers: Path) -> None:
    with pytest.raises(InputError, match="2 of 3 requests have no completion length, first 'x'") as refused:
        LengthSource.parse(f"completions:{answers}").resolve(["a", "x", "y"])
    assert "answers.jsonl" in str(refused.value)
    assert "quantile:Q:FILE" in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("known", r"1 of 2 requests have no completion length, first 'b'.*constant:N"),
        ("cap", r"no max_tokens in 'b'\. Add --longest-completion 1024.*constant:N"),
    ],
)
def test_a_request_without_its_length_or_cap_is_named(kind: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        LengthSource.parse(kind).resolve(["a", "b"], caps=[3, None], known=[3, None])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "names no source"),
        ("capped", "names no source"),
        ("known:5", "names no source"),
        ("constant", "names no source"),
        ("constant:0", "'0' in 'constant:0' is not a whole number of tokens"),
        ("constant:1.5", "not a whole number"),
        ("constant:inf", "not a whole number"),
        ("constant:many", "not a whole number"),
        ("constant:9999999999", "not a whole number"),
        ("quantile:0.5", "names no source"),
        ("quantile:2:x.jsonl", "not a quantile above 0 and up to 1"),
        ("quantile:nan:x.jsonl", "not a quantile above 0 and up to 1"),
        ("completions:nowhere.jsonl", "nowhere.jsonl: cannot be read"),
    ],
)
def test_a_source_of_lengths_that_is_none_is_refused(spec: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        LengthSource.parse(spec)


def test_an_empty_source_of_lengths_is_not_the_default(tmp_path: Path) -> None:
    table, batch = tmp_path / "job.csv", tmp_path / "job.jsonl"
    table.write_text("id,input_tokens,output_tokens\na,3,4\n")
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4}
    batch.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}))
    for job in (table, batch):
        assert read_workload(job).workload.output_tokens.tolist() == [4]
        with pytest.raises(InputError, match="'' names no source"):
            read_workload(job, lengths="")


def test_lengths_no_family_member_fits_name_the_mend(tmp_path: Path) -> None:
    table = tmp_path / "two.csv"
    table.write_text("id,output_tokens\n" + "".join(f"r{i},{1 + 499 * (i % 10 == 0)}\n" for i in range(50)))
    with pytest.raises(InputError, match=r"two.csv.*no normal distribution.*empirical"):
        LengthSource.parse(f"quantile:0.9:normal:{table}").resolve(["a"])


def test_the_plan_keeps_the_choice(answers: Path) -> None:
    for spec in ("known", "cap", "constant:8", f"completions:{answers}", f"quantile:0.9:gamma:{answers}"):
        source = LengthSource.parse(spec)
        assert length_source_of(json.loads(json.dumps(source.to_json()))) == source
    assert LengthSource("cap").to_json() == {"kind": "cap"}


@pytest.mark.parametrize(
    "value", [{}, {"kind": "guess"}, {"kind": "cap", "x": 1}, {"kind": "cap", "file": 3}]
)
def test_a_choice_of_another_kind_in_a_plan_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"plan.json, field 'provenance.lengths.*Plan again"):
        length_source_of(value, file="plan.json")
