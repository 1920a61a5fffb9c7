"""Measuring an engine and fitting a cost model to it: engines whose true cost is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.costs.cost import CalibratedCost, CostModel
from batchbound.data.files.disk import InputError
from batchbound.data.files.record import plain, record
from batchbound.data.problem import Problem
from batchbound.data.trace import Stage
from batchbound.data.workload import Workload
from batchbound.executor.profiling.calibrate import calibrate, fit_cost, fit_error
from batchbound.executor.profiling.grid_run import grid, mixed_job, order_of, profile, seconds_left, work_of
from batchbound.heuristics.loop import execute
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulator import Simulator

TRUE = CostModel(0.025, 0.00013, 0.029, 0.00021, prefill_floor=0.06, decode_per_kv_token=2e-6)
SLOTS, PROMPTS = [1, 4, 16, 64], [16, 64, 256]


def engine_of(cost: CostModel) -> Callable[[Problem], Simulator]:
    return lambda problem: Simulator(replace(problem, cost=cost))


def stretched(stage: Stage, factor: float) -> Stage:
    return replace(stage, end=stage.start + factor * stage.seconds)


def same(fitted: CostModel, true: CostModel, tolerance: float) -> bool:
    sizes = [(tokens, active, active * 300) for tokens in (16, 300, 4000, 20000) for active in (1, 30, 64)]
    return all(
        fitted.prefill_seconds(tokens) == pytest.approx(true.prefill_seconds(tokens), rel=tolerance)
        and fitted.decode_seconds(active, kv) == pytest.approx(true.decode_seconds(active, kv), rel=tolerance)
        for tokens, active, kv in sizes
    )


def test_a_profile_has_a_prefill_stage_at_every_point_and_bursts_that_requests_leave_after() -> None:
    seen: list[int] = []
    stages = profile(engine_of(TRUE), [1, 4], [16, 64], decode_steps=3, on_point=seen.append)
    leaving = [("decode", 4, 12), ("decode", 3, 3), ("decode", 2, 4), ("decode", 1, 4)]
    assert [(stage.kind, stage.active, stage.tokens) for stage in stages] == [
        ("prefill", 1, 16),
        ("decode", 1, 3),
        ("prefill", 1, 64),
        ("decode", 1, 3),
        ("prefill", 4, 64),
        *leaving,
        ("prefill", 4, 256),
        *leaving,
    ]
    assert seen[-1] == 13


def test_a_profile_takes_the_median_of_its_repeats() -> None:
    made = 0

    def disturbed(problem: Problem) -> Simulator:
        nonlocal made
        made += 1
        slow = replace(TRUE, decode_base=100 * TRUE.decode_base) if made in (2, 3) else TRUE
        return Simulator(replace(problem, cost=slow))

    stages = profile(disturbed, [1], [16, 64], decode_steps=2)
    assert stages[1].seconds == pytest.approx(TRUE.decode_seconds(1, 17) + TRUE.decode_seconds(1, 18))


def test_a_grid_keeps_its_ends() -> None:
    assert grid(200) == [1, 3, 8, 24, 69, 200]
    assert grid(3) == [1, 2, 3]
    assert grid(512, least=32, points=3) == [32, 128, 512]


def test_a_fit_recovers_the_cost_of_what_was_measured() -> None:
    fitted = fit_cost(profile(engine_of(TRUE), SLOTS, PROMPTS))
    for name, value in plain(TRUE).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=1e-6), name


class Changing(Simulator):
    """An engine that takes 3 ms for every change of its batch."""

    def decode(self, decode_steps: int, until: float) -> tuple[Stage, list[int]]:
        stage, finished = super().decode(decode_steps, until)
        self.wait(stage.end + 0.003)
        return replace(stage, end=self.time), finished


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_what_follows_a_change_of_the_batch_is_told_from_what_a_step_takes(noise: float) -> None:
    rng = np.random.default_rng(5)
    true = replace(TRUE, decode_base=0.004)
    stages = profile(lambda problem: Changing(replace(problem, cost=true)), SLOTS, PROMPTS)
    fitted = fit_cost([stretched(stage, 1 + noise * rng.uniform(-1, 1)) for stage in stages])
    assert fitted.decode_per_change == pytest.approx(0.003, rel=1e-6 + 10 * noise)
    assert fitted.decode_base == pytest.approx(0.004, rel=1e-6 + 10 * noise)
    # An engine whose changes are free is not given a price for them by noise.
    free = profile(engine_of(true), SLOTS, PROMPTS)
    plain = fit_cost([stretched(stage, 1 + noise * rng.uniform(-1, 1)) for stage in free])
    assert plain.decode_per_change < 2e-4


def test_a_job_that_was_not_fitted_fills_its_slots_again_and_tells_the_error_beyond_the_fit() -> None:
    def held_out(cost: CostModel) -> tuple[Stage, ...]:
        problem = mixed_job(4, 64, cost)
        engine = Simulator(replace(problem, cost=replace(TRUE, decode_base=2 * TRUE.decode_base)))
        return execute(problem, policy_named("fcfs-ski", problem), engine).stages

    stages = profile(engine_of(TRUE), SLOTS, PROMPTS)
    found = calibrate(stages, engine={}, date="2026-01-31", held_out=held_out)
    assert found.error is not None
    assert found.error.makespan == pytest.approx(0, abs=1e-6)
    assert found.held_out is not None
    assert found.held_out.prefill_stages > 2
    assert -0.5 < found.held_out.makespan < -0.3
    again = record(CalibratedCost, plain(found))
    assert again.held_out == found.held_out
    before = {name: value for name, value in plain(found).items() if name != "held_out"}
    assert record(CalibratedCost, before) == replace(found, held_out=None)


def test_a_plan_beyond_what_was_measured_is_named(calibration: CalibratedCost) -> None:
    assert calibration.beyond(64, 256, 256.0) == ()
    assert calibration.beyond(65, 300, 257.2) == (
        "65 slots, measured up to 64",
        "a prompt of 300 tokens, measured up to 256",
        "257 tokens held by a request, measured up to 256",
    )
    assert replace(calibration, slots_grid=(), prompt_grid=()).beyond(900, 900, 900.0) == ()


def test_a_line_that_meets_nothing_below_zero_is_fitted_as_a_bend() -> None:
    bent = CostModel(0.0, 0.0001, 0.029, 0.00021, 0.06, prefill_bend=600.0, prefill_per_token_beyond=0.0003)
    assert bent.prefill_seconds(1600) == pytest.approx(-0.18 + 0.0004 * 1600)
    fitted = fit_cost(profile(engine_of(bent), SLOTS, PROMPTS))
    for name, value in plain(bent).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=1e-6, abs=1e-12), name


def test_a_cost_without_a_floor_is_fitted_without_one() -> None:
    fitted = fit_cost(profile(engine_of(CostModel.paper()), SLOTS, PROMPTS))
    assert fitted.prefill_floor == 0
    assert fitted.decode_per_kv_token == pytest.approx(0, abs=1e-12)
    assert fitted.prefill_base == pytest.approx(0.025)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 0.1), st.floats(0, 1e-3))
def test_a_fit_bears_noise(seed: int, base: float, per_token: float, step: float, per_slot: float) -> None:
    true = CostModel(0.001 + base, 1e-5 + per_token, 0.001 + step, per_slot, decode_per_kv_token=1e-6)
    rng = np.random.default_rng(seed)
    stages = [
        stretched(stage, 1 + 0.02 * rng.uniform(-1, 1)) for stage in profile(engine_of(true), SLOTS, PROMPTS)
    ]
    fitted = fit_cost(stages)
    assert min(plain(fitted).values()) >= 0
    error = fit_error(fitted, stages)
    assert error.prefill_mape < 0.03
    assert error.decode_mape < 0.03
    assert abs(error.makespan) < 0.03


def test_a_fit_is_not_moved_by_a_disturbed_stage() -> None:
    rng = np.random.default_rng(7)
    stages = [
        stretched(stage, 1 + 0.01 * rng.uniform(-1, 1)) for stage in profile(engine_of(TRUE), SLOTS, PROMPTS)
    ]
    for disturbed in (5, 18):
        stages[disturbed] = stretched(stages[disturbed], 5.0)
    assert same(fit_cost(stages), TRUE, 0.03)


@pytest.mark.parametrize("seed", range(20))
def test_full_slots_on_a_busy_machine_keep_the_fixed_cost_of_a_decode_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages = [Stage("prefill", 0, 0.03 + 3e-4 * size, 0, 1, size, size, size) for size in (16, 90)]
    pace = np.linspace(1, rng.uniform(0.6, 1.8), 10) * np.exp(rng.normal(0, 0.35, 10))
    for k, factor in enumerate(pace.tolist()):
        active, steps = 8 - k % 2, int(rng.integers(3, 30))
        kv = active * int(rng.uniform(40, 120))
        seconds = factor * steps * (0.02 + 0.0015 * active + 1e-6 * kv)
        stages.append(Stage("decode", 0, seconds, steps, active, steps * active, steps * kv, steps * kv))
    assert fit_cost(stages).decode_base > 0.004


def test_the_errors_by_hand() -> None:
    cost = CostModel(1.0, 0.5, 1.0, 0.5, decode_per_kv_token=0.1)
    stages = [
        Stage("prefill", 0, 2.5, 0, 1, 2, 2, 2),
        # Two rounds over two slots that read 10 tokens, padding included: the model says 2 x 2 + 1 = 5 s.
        Stage("decode", 2.5, 6.5, 2, 2, 4, 8, 10),
        # One decode step of one slot without any: 1.5 s.
        Stage("decode", 6.5, 8.0, 1, 1, 1, 0, 0),
    ]
    error = fit_error(cost, stages)
    assert error.prefill_mape == pytest.approx(0.2)
    assert error.decode_mape == pytest.approx((2 * 0.25 + 0.0) / 3)
    assert error.makespan == pytest.approx(8.5 / 8.0 - 1)
    assert (error.prefill_stages, error.decode_steps) == (1, 3)


def test_too_small_a_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="different numbers of tokens; a fit needs at least two"):
        fit_cost(profile(engine_of(TRUE), [1], [16]))


def test_steps_of_always_as_many_slots_have_a_fixed_cost_alone() -> None:
    fitted = fit_cost(profile(engine_of(CostModel.paper()), [1], [16, 64]))
    assert fitted.decode_base == pytest.approx(0.029 + 0.00021)
    assert fitted.decode_per_slot == 0


@pytest.fixture
def calibration() -> CalibratedCost:
    stages = profile(engine_of(TRUE), SLOTS, PROMPTS)
    engine = {"name": "simulator", "model": "none", "torch": "2.13"}
    return calibrate(stages, engine=engine, date="2026-01-31", slots_grid=SLOTS, prompt_grid=PROMPTS)


def test_a_calibration_survives_its_file(calibration: CalibratedCost, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    calibration.save(path)
    assert CalibratedCost.load(path) == calibration
    assert json.loads(path.read_text())["error"]["decode_steps"] == 3 * (8 + 3 * 15)


def test_a_calibration_says_in_what_another_machine_differs(calibration: CalibratedCost) -> None:
    assert calibration.differences(calibration.engine) == ()
    assert calibration.differences({**calibration.engine, "distinct_tokens": 9, "endings": {}}) == ()
    other = dict(calibration.engine) | {"torch": "2.14", "device": "cuda"}
    assert calibration.differences(other) == ("device cuda instead of unknown", "torch 2.14 instead of 2.13")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batchbound_cost", None),
        ("batchbound_cost", 9),
        ("cost", 3),
        ("cost", {"decode_base": 1.0}),
        ("error", {}),
        ("engine", "cpu"),
        ("date", 20260131),
        ("slots_grid", [1.5]),
    ],
)
def test_a_damaged_calibration_names_the_field(
    calibration: CalibratedCost, field: str, value: object
) -> None:
    with pytest.raises(InputError, match=r"cost\.json") as refusal:
        record(CalibratedCost, plain(calibration) | {field: value}, file="cost.json")
    assert field in str(refusal.value) or "coefficient" in str(refusal.value)


def test_the_time_left_is_told_by_passes_and_tokens_so_far() -> None:
    order = order_of([1, 4], [10, 100], repeats=1)
    assert order == [(4, 100), (1, 10), (1, 100), (4, 10), (4, 100)]
    job = Problem(Workload.from_lengths([50, 60], [8, 10]), TRUE, 2)
    work = work_of(order, [job])
    # A prefill and 15 decode steps of each slot; the job decodes 18 tokens in two slots.
    assert work[:2].tolist() == [[16, 460], [16, 25]]
    assert work[-1].tolist() == [9, 128]
    seconds = work @ [0.5, 0.01]
    assert seconds_left(work, seconds[:1].tolist()) is None
    assert seconds_left(work, seconds[:2].tolist()) == pytest.approx(seconds[2:].sum())
