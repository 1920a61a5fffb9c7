"""What several files of earlier completions agree on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from batchbound.heuristics.unknown_lengths.agreement import agreed_scores, prompt_scores


def drawn(loadings: list[float], prompts: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a factor, and lengths in files that follow it as far as their loadings say."""
    rng = np.random.default_rng(seed)
    factor = rng.standard_normal(prompts)
    own = rng.standard_normal((len(loadings), prompts))
    loading = np.array(loadings)[:, None]
    return factor, np.exp(loading * factor + np.sqrt(1 - loading**2) * own)


def test_one_file_is_ranked_as_it_stands() -> None:
    lengths = np.array([[30.0, 10.0, 20.0]])
    assert np.argsort(agreed_scores(lengths)).tolist() == [1, 2, 0]


def test_scale_of_a_file_does_not_matter() -> None:
    _, lengths = drawn([0.8, 0.6, 0.7])
    scaled = lengths * np.array([[1.0], [50.0], [0.01]])
    assert agreed_scores(scaled) == pytest.approx(agreed_scores(lengths))


def test_a_file_that_disagrees_with_all_others_counts_less_than_in_the_mean() -> None:
    factor, lengths = drawn([0.9, 0.8, 0.9, 0.0, 0.0, 0.0])
    mean = np.log(lengths).mean(axis=0)
    assert spearmanr(agreed_scores(lengths), factor)[0] > spearmanr(mean, factor)[0] + 0.03


def test_a_file_that_goes_against_the_others_is_not_followed() -> None:
    factor, lengths = drawn([0.8, 0.8, 0.8])
    against = np.vstack((lengths, np.exp(-factor)))
    assert spearmanr(agreed_scores(against), agreed_scores(lengths))[0] > 0.99


def test_a_prompt_that_a_file_lacks_is_scored_by_the_others() -> None:
    _, lengths = drawn([0.8, 0.8, 0.8], prompts=50)
    lengths[0, 7] = np.nan
    lengths[:, 9] = np.nan
    scores = agreed_scores(lengths)
    assert np.isnan(scores).nonzero()[0].tolist() == [9]


def test_long_prompts_count_as_far_as_the_files_go_along_with_them() -> None:
    factor, lengths = drawn([0.5, 0.5, 0.5, 0.7])
    *files, prompt = lengths
    told, untold = prompt_scores(np.array(files), prompt), agreed_scores(np.array(files))
    assert spearmanr(told, factor)[0] > spearmanr(untold, factor)[0]


def test_one_file_alone_is_not_mixed_with_the_prompts_lengths() -> None:
    _, lengths = drawn([0.8, 0.8])
    assert prompt_scores(lengths[:1], lengths[1]) == pytest.approx(agreed_scores(lengths[:1]))


def test_prompts_of_which_no_file_has_a_length_have_no_score() -> None:
    _, lengths = drawn([0.8, 0.8], prompts=20)
    lengths[:, 3] = np.nan
    assert np.isnan(prompt_scores(lengths, np.arange(20.0))).nonzero()[0].tolist() == [3]
