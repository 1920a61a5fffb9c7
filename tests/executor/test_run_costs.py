"""Costs that a run learns from its own stages."""

from __future__ import annotations

from batchbound.data.costs.cost import CostModel
from batchbound.data.trace import Stage
from batchbound.executor.jobs.run_costs import RunCosts

TRUE = CostModel(0.02, 0.001, 0.05, 0.002)


def prefill(tokens: int) -> Stage:
    return Stage("prefill", 0.0, float(TRUE.prefill_seconds(tokens)), 0, 1, tokens, tokens, tokens)


def decode(active: int) -> Stage:
    return Stage("decode", 0.0, 10 * TRUE.decode_seconds(active), 10, active, 10 * active, 0, 0)


def test_without_stated_costs_no_stage_costs_anything_to_open_until_there_are_enough() -> None:
    costs = RunCosts(None, least_stages=4)
    for tokens in (900, 100, 70):
        costs.ran(prefill(tokens))
    costs.ran(decode(8))
    assert costs.cost.prefill_base == 0
    costs.ran(prefill(150))
    assert abs(costs.cost.prefill_base - TRUE.prefill_base) < 1e-9


def test_steps_of_one_number_of_slots_count_whole_and_of_several_by_their_line() -> None:
    costs = RunCosts(TRUE, least_stages=2)
    for tokens in (100, 200):
        costs.ran(prefill(tokens))
    costs.ran(decode(8))
    assert costs.cost.decode_base == TRUE.decode_seconds(8)
    costs.ran(decode(2))
    for tokens in (100, 200, 300):
        costs.ran(prefill(tokens))
    assert abs(costs.cost.decode_base - TRUE.decode_base) < 1e-9


def test_prompts_of_one_size_are_told_from_the_opening_by_the_first_stage() -> None:
    costs = RunCosts(None, least_stages=6)
    noise = (0.0, 0.004, -0.004, 0.003, -0.003, 0.001)
    for tokens, more in zip((400, 41, 42, 43, 42, 41), noise, strict=True):
        costs.ran(Stage("prefill", 0.0, TRUE.prefill_seconds(tokens) + more, 0, 1, tokens, tokens, tokens))
    costs.ran(decode(8))
    assert abs(costs.cost.prefill_base - TRUE.prefill_base) < 0.005


def test_a_disturbed_stage_changes_little() -> None:
    costs = RunCosts(None, least_stages=6)
    for tokens in (500, 100, 70, 150, 90, 130):
        costs.ran(prefill(tokens))
    costs.ran(Stage("prefill", 0.0, 5.0, 0, 1, 110, 110, 110))
    costs.ran(decode(8))
    assert abs(costs.cost.prefill_base - TRUE.prefill_base) < 0.01
