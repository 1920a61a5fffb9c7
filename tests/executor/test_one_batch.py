"""A rollout's figures in the log of TRL's trainer."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.executor.one_batch import one_batch_seconds
from batchbound.heuristics.loop import execute
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulator import Simulator


def test_one_padded_batch_is_modelled_at_the_runs_own_pace() -> None:
    cost = CostModel(prefill_base=0.0, prefill_per_token=0.5, decode_base=1.0, decode_per_slot=0.25)
    problem = Problem(
        Workload.from_lengths([2, 4, 6, 4], [9, 3, 2, 5]), cost, 2, prefill_emits_first_token=True
    )
    trace = execute(problem, policy_named("fcfs", problem), Simulator(problem))
    # Four prompts padded to six tokens, and eight steps of four rows.
    assert one_batch_seconds(problem, trace) == pytest.approx(4 * 6 * 0.5 + 8 * (1.0 + 0.25 * 4))


@pytest.mark.parametrize(("requests", "tells"), [(2, True), (4, False)])
def test_one_number_of_rows_tells_only_of_itself(requests: int, tells: bool) -> None:
    problem = Problem(Workload.from_lengths([1] * requests, [3] * requests), CostModel.paper(), 2)
    trace = execute(problem, policy_named("fcfs", problem), Simulator(problem))
    seconds = one_batch_seconds(problem, trace)
    assert seconds == (pytest.approx(trace.makespan - problem.cost.decode_seconds(2)) if tells else None)


def test_a_step_of_more_rows_never_takes_less() -> None:
    # Noise made the steps of fewer rows slower: 2 s for one row, 1 s for two.
    problem = Problem(Workload.from_lengths([1, 1], [2, 3]), CostModel.paper(), 2)
    trace = execute(problem, policy_named("fcfs", problem), Simulator(problem))
    stages, clock = [], 0.0
    for stage in trace.stages:
        end = clock + stage.decode_steps * (3 - stage.active)
        stages.append(replace(stage, start=clock, end=end))
        clock = end
    seconds = one_batch_seconds(problem, replace(trace, stages=tuple(stages)))
    assert seconds is not None
    assert 2 * 1.0 <= seconds <= 2 * 2.0


def test_a_step_has_its_figures_in_the_trainers_log(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    from batchbound.executor.llm import LLM
    from batchbound.executor.rollout import rollout_function

    llm = LLM.from_pretrained("tiny:speller", slots=2)
    metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}
    llm.model.train()
    trainer = SimpleNamespace(model=llm.model, _metrics=metrics, args=None)
    rollout = rollout_function(llm, max_tokens=20, log=tmp_path / "steps.csv")
    prompts = ["Spell 4096.", "Spell 7.", "Spell 12."]
    rollout(prompts, trainer)
    begun = perf_counter()
    rollout(prompts, trainer)
    clock, logged = perf_counter() - begun, metrics["train"]
    assert 0 <= logged["rollout/tail"][-1] <= 1
    assert logged["rollout/above_bound"][-1] >= 0
    # The seconds are those of the call, also before its first stage, and those of the table.
    seconds = logged["rollout/seconds"][-1]
    assert llm.report().makespan < seconds <= clock
    with (tmp_path / "steps.csv").open(encoding="utf-8") as stream:
        *_, last = csv.DictReader(stream)
    assert float(last["generation_seconds"]) == round(seconds, 4)
    batch = llm.one_batch_seconds()
    assert batch is not None
    assert logged["rollout/times_one_batch"][-1] == batch / seconds
