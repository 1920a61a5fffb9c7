"""Memory is taken before the first stage, and kept for the next call."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.executor.engines.huggingface import HuggingFaceEngine
from batchbound.executor.engines.tiers import choose_tier

_PAGES = """
import resource
import numpy as np
from batchbound.executor.engines.device_memory import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        np.ones(12 << 20, dtype=np.uint8), np.ones(60 << 20, dtype=np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(pages())
keep_freed_memory()
pages()
print(pages())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_memory_freed_is_kept_for_the_next_call_unless_the_user_says_otherwise() -> None:
    def measured(**settings: str) -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", _PAGES], capture_output=True, text=True, check=True, env=settings
        )
        return [int(line) for line in done.stdout.split()]

    plain = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    before, after = measured(**plain)
    assert after < before / 100
    before, after = measured(**plain, MALLOC_TRIM_THRESHOLD_="65536")
    assert after > before / 2


@pytest.mark.parametrize(("tier", "kv_capacity"), [("window", None), ("ragged", None), ("ragged", 100)])
def test_an_engine_holds_its_keys_and_values_before_its_first_stage(
    tier: str, kv_capacity: int | None, llama: Any
) -> None:
    problem = Problem(
        Workload.from_lengths([5, 9, 3], [4, 2, 7]),
        CostModel.paper(),
        2,
        kv_capacity=kv_capacity,
        prefill_emits_first_token=True,
    )
    prompts = [[1] * 5, [2] * 9, [3] * 3]
    engine = HuggingFaceEngine(
        problem, llama, prompts, problem.workload.output_tokens, tier=choose_tier(llama, tier)
    )
    batch = engine._residence._batch
    store: Any = batch._store
    held = [layer.buffers for layer in store.layers]
    assert batch.active == 0
    engine.prefill([0, 1], [0, 1])
    assert all(
        new is old
        for layer, kept in zip(store.layers, held, strict=True)
        for new, old in zip(layer.buffers, kept, strict=True)
    )
