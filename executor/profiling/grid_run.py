"""Measurement of prefill stages and decode steps on a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import nnls

from ...data.arrays import FloatArray
from ...data.costs.cost import CostModel
from ...data.problem import Problem
from ...data.trace import Stage
from ...data.workload import Workload
from ...heuristics.engine import Engine

_NO_COST = CostModel(0.0, 0.0, 0.0, 0.0)
_SPREAD = 0.5
"""Largest relative distance of a point's prompts from their mean."""
_BURSTS = (1, 2, 4)
"""Decode steps of later bursts; a request leaves before each."""
DECODE_STEPS = 8
"""Decode steps of the first burst of a measurement."""
_JOB_ANSWER = 24
"""Mean tokens of a completion in :func:`mixed_job`."""
LONGEST_PROMPT = 1 + _SPREAD
"""Ratio of a point's longest prompt to its mean."""
MOST_STEPS = 160
"""Most tokens of a measured completion."""


def profile(
    engine_for: Callable[[Problem], Engine],
    slots: Sequence[int],
    prompt_tokens: Sequence[int],
    *,
    decode_steps: int = DECODE_STEPS,
    repeats: int = 3,
    on_point: Callable[[int], None] | None = None,
) -> list[Stage]:
    """Measure the median stages at every point of a grid.

    At a point, one stage prefills a request per slot, of lengths spread around their mean. They decode
    together, as in a run. Decode steps are timed from the first after the prefill. Then requests
    leave one by one, after ever more decode steps. This separates the cost of a batch change from that of a
    decode step. The points are visited in turn for every repeat: a disturbance of the machine hits
    one repeat of many points and the median of none. A first measurement of the largest point is discarded.
    """
    if repeats < 1 or decode_steps < 1:
        raise ValueError(
            f"repeats and decode steps are {repeats} and {decode_steps}; both must be at least 1"
        )
    order = order_of(slots, prompt_tokens, repeats)
    measured: dict[tuple[int, int], list[list[Stage]]] = {point: [] for point in order[1:]}
    for number, (active, prompt) in enumerate(order):
        stages = _measure(engine_for, active, prompt, decode_steps)
        if number:
            measured[active, prompt].append(stages)
        if on_point is not None:
            on_point(number + 1)
    return [_median(again) for runs in measured.values() for again in zip(*runs, strict=True)]


def order_of(slots: Sequence[int], prompt_tokens: Sequence[int], repeats: int) -> list[tuple[int, int]]:
    """Return slots and prompt tokens of each measurement, first of the one that is discarded."""
    points = [(active, prompt) for active in sorted(set(slots)) for prompt in sorted(set(prompt_tokens))]
    return [max(points, key=lambda point: point[0] * point[1])] + points * repeats


def work_of(order: Sequence[tuple[int, int]], jobs: Sequence[Problem]) -> FloatArray:
    """Return forward passes and tokens of measurements and of jobs after them, shape (measurements, 2)."""
    steps = DECODE_STEPS + sum(_BURSTS)
    points = [(1 + steps, active * (prompt + steps)) for active, prompt in order]
    return np.array([*points, *map(_work_of_job, jobs)], dtype=np.float64)


def _work_of_job(job: Problem) -> tuple[int, int]:
    prompts, answers = job.workload.input_tokens, job.workload.output_tokens
    return int(answers.sum()) // job.slots, int(prompts.sum() + answers.sum())


def seconds_left(work: FloatArray, seconds: Sequence[float]) -> float | None:
    """Estimate the seconds of the measurements to come by those of the first ones; None at first.

    work: As of :func:`work_of`.
    """
    if len(seconds) < 2:
        return None
    per_unit, _ = nnls(work[: len(seconds)], np.array(seconds))
    return float((work[len(seconds) :] @ per_unit).sum())


def mixed_job(slots: int, longest: int, cost: CostModel, seed: int = 0) -> Problem:
    """Return a job with prompts and completions of all lengths."""
    rng, count = np.random.default_rng(seed), 3 * slots
    prompts = np.exp(rng.uniform(np.log(min(8, longest)), np.log(longest), count)).astype(np.int64)
    answers = np.minimum(2 + rng.geometric(1 / _JOB_ANSWER, count), MOST_STEPS)
    workload = Workload.from_lengths(np.minimum(prompts, longest).tolist(), answers.tolist())
    return Problem(workload, cost, slots, prefill_emits_first_token=True)


def grid(most: int, *, least: int = 1, points: int = 6) -> list[int]:
    """Return whole numbers from ``least`` to ``most``, spaced by ratio."""
    ratio = most / least
    return sorted({round(least * ratio ** (step / (points - 1))) for step in range(points)})


def _measure(
    engine_for: Callable[[Problem], Engine], active: int, prompt: int, decode_steps: int
) -> list[Stage]:
    rng = np.random.default_rng((active, prompt))
    # Truncated towards the mean on both sides, so that the prompts add up to it.
    spread = np.trunc(_SPREAD * prompt * (2 * np.arange(active) + 1 - active) / active).astype(np.int64)
    prompts = prompt + rng.permutation(spread)
    bursts = [decode_steps, *_BURSTS][:active]
    # One token more is decoded, so that no request finishes before its turn.
    answers = np.full(active, 2 + sum(bursts))
    answers[rng.permutation(active)[: len(bursts) - 1]] = 1 + np.cumsum(bursts[:-1])
    workload = Workload.from_lengths(prompts.tolist(), answers.tolist())
    engine = engine_for(Problem(workload, _NO_COST, active, prefill_emits_first_token=True))
    everyone = list(range(active))
    stages = [engine.prefill(everyone, everyone)[0]]
    return stages + [engine.decode(burst, float("inf"))[0] for burst in bursts]


def _median(stages: Sequence[Stage]) -> Stage:
    return sorted(stages, key=lambda stage: stage.seconds)[(len(stages) - 1) // 2]
