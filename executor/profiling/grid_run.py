"""Measuring prefill stages and decode rounds of an engine over a small grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...data.costs.cost import CostModel
from ...data.problem import Problem
from ...data.trace import Stage
from ...data.workload import Workload
from ...heuristics.engine import Engine

_NO_COST = CostModel(0.0, 0.0, 0.0, 0.0)


def profile(
    engine_for: Callable[[Problem], Engine],
    slots: Sequence[int],
    prompt_tokens: Sequence[int],
    *,
    rounds: int = 8,
    repeats: int = 3,
    warm_up: int = 1,
    kv_capacity: int | None = None,
    on_point: Callable[[int, int], None] | None = None,
) -> list[Stage]:
    """
    Return the median prefill stage and decode stage at every point of a grid.

    At a point, as many requests as slots are prefilled in one stage and decoded together, all of one length,
    so that nothing is padded. Rounds are timed from the first after the prefill, as a run has them. The
    points are visited in turn for every repeat, so that a disturbance of the machine hits one repeat of many
    points and the median of none.

    Parameters
    ----------
    engine_for
        Makes a fresh engine for the problem of a point; the prompts' content is its choice.
    slots
        Numbers of slots to measure.
    prompt_tokens
        Prompt lengths to measure, tokens.
    rounds
        Decode rounds timed at a point.
    repeats
        Measurements of a point, of which the median counts.
    warm_up
        Measurements of the largest point that are thrown away first.
    kv_capacity
        Points that would hold more tokens are left out.
    on_point
        Called after each measurement with the number done and the number in all.

    Raises
    ------
    ValueError
        If no point fits into ``kv_capacity``, or there is nothing to repeat.
    """
    if repeats < 1 or rounds < 1:
        raise ValueError(f"repeats and rounds are {repeats} and {rounds}; both must be at least 1")
    points = [
        (active, prompt)
        for active in sorted(set(slots))
        for prompt in sorted(set(prompt_tokens))
        if kv_capacity is None or active * (prompt + rounds) <= kv_capacity
    ]
    if not points:
        raise ValueError(
            f"no point of the grid (slots {list(slots)}, prompts {list(prompt_tokens)} tokens) fits into"
            f" {kv_capacity} tokens of keys and values"
        )
    order = [max(points, key=lambda point: point[0] * point[1])] * warm_up + points * repeats
    measured: dict[tuple[int, int], list[tuple[Stage, Stage]]] = {point: [] for point in points}
    for number, (active, prompt) in enumerate(order):
        pair = _measure(engine_for, active, prompt, rounds)
        if number >= warm_up:
            measured[active, prompt].append(pair)
        if on_point is not None:
            on_point(number + 1, len(order))
    return [_median([pair[kind] for pair in pairs]) for pairs in measured.values() for kind in (0, 1)]


def grid(most: int, *, least: int = 1, points: int = 6) -> list[int]:
    """
    Return at most ``points`` whole numbers from ``least`` to ``most``, evenly spaced by ratio.

    Parameters
    ----------
    most, least
        The ends, both included.
    points
        Numbers wanted, at least 2.
    """
    ratio = most / least
    return sorted({round(least * ratio ** (step / (points - 1))) for step in range(points)})


def _measure(
    engine_for: Callable[[Problem], Engine], active: int, prompt: int, rounds: int
) -> tuple[Stage, Stage]:
    # One token more than is decoded: nothing finishes, so the engine never stops early.
    answer = 1 + rounds + 1
    workload = Workload.from_lengths([prompt] * active, [answer] * active)
    engine = engine_for(Problem(workload, _NO_COST, active, prefill_emits_first_token=True))
    everyone = list(range(active))
    prefill, _ = engine.prefill(everyone, everyone)
    decode, _ = engine.decode(rounds, float("inf"))
    return prefill, decode


def _median(stages: list[Stage]) -> Stage:
    return sorted(stages, key=lambda stage: stage.seconds)[(len(stages) - 1) // 2]
