"""One score for each prompt from several files."""

from __future__ import annotations

import numpy as np

from ...data.arrays import FloatArray
from .lengths import normal_scores

LARGEST_LOADING = 0.95
"""Largest correlation of a file with the common factor."""

DECODE_STEPS = 50
"""Iterations of the loadings; they converge in a few."""


def agreed_scores(lengths: FloatArray) -> FloatArray:
    r"""Return each prompt's common score, larger for longer completions, shape (prompts,).

    The normal score of a prompt in file ``j`` is modelled as :math:`\lambda_j f + \sqrt{1-\lambda_j^2}\, e`:
    a common factor and the file's own part (Spearman 1904). The loadings :math:`\lambda_j` fit the
    correlations between files best (minimum residuals, Harman and Jones 1966). So a file that agrees with the
    others counts more, whatever its scale. The score is the factor's expectation.

    lengths: In any unit, NaN where a file lacks the prompt, shape (files, prompts).
    returns: NaN where no file has the prompt.
    """
    scores = np.array([normal_scores(file) for file in lengths])
    has = ~np.isnan(scores)
    scores = np.where(has, scores, 0.0)
    loading = _loadings(scores, has)
    weight = loading / (1.0 - loading**2)
    factor = weight @ scores / (1.0 + (weight * loading) @ has)
    return np.where(has.any(axis=0), factor, np.nan)


def prompt_scores(lengths: FloatArray, prompt: FloatArray) -> FloatArray:
    """Return :func:`agreed_scores` of files and the prompts' own lengths.

    The prompts' lengths count as one more file if there are at least two files; one could not weigh them.

    lengths: As for :func:`agreed_scores`.
    prompt: Tokens of each prompt, shape (prompts,).
    """
    if len(lengths) < 2:
        return agreed_scores(lengths)
    scores = agreed_scores(np.vstack((lengths, prompt)))
    return np.where(np.isnan(lengths).all(axis=0), np.nan, scores)


def _loadings(scores: FloatArray, has: np.ndarray) -> FloatArray:
    """Return each file's correlation with the factor."""
    files = len(scores)
    if files == 1:
        return np.full(1, LARGEST_LOADING)
    square = scores**2 @ has.T
    correlation = scores @ scores.T / np.sqrt(np.maximum(square * square.T, np.finfo(float).tiny))
    np.fill_diagonal(correlation, 0.0)
    loading = np.full(files, 0.5)
    for _ in range(DECODE_STEPS):
        # Each is the regression of a file's correlations on the loadings of the others.
        rest = loading @ loading - loading**2
        fitted = correlation @ loading / np.maximum(rest, np.finfo(float).tiny)
        loading = (loading + np.clip(fitted, 0.0, LARGEST_LOADING)) / 2
    return loading
