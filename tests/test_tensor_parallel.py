"""A model spread over processes by transformers gives the engine's answers of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchbound.executor.model_source import load_model

pytestmark = pytest.mark.slow

PROCESS = """
import sys

import numpy as np
import torch
import torch.distributed
from transformers import AutoModelForCausalLM

from batchbound.data.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.executor.huggingface import HuggingFaceEngine
from batchbound.executor.loop import execute
from batchbound.executor.tiers import choose_tier
from batchbound.heuristics.registry import policy_named

torch.distributed.init_process_group("gloo")
rng = np.random.default_rng(0)
prompts = [rng.integers(3, 200, size).tolist() for size in rng.integers(2, 12, 12)]
work = Workload.from_lengths([len(prompt) for prompt in prompts], rng.integers(1, 24, 12))
problem = Problem(work, CostModel.paper(), 4, prefill_emits_first_token=True)


def answers(model, tier):
    engine = HuggingFaceEngine(problem, model, prompts, work.output_tokens, tier=choose_tier(model, tier))
    execute(problem, policy_named("lpt", problem), engine)
    return engine.answers


spread = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto", dtype=torch.float64).eval()
assert spread.model.layers[0].self_attn.k_proj.weight.to_local().shape[0] == 16
whole = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float64).eval()
expected = answers(whole, "window")
for tier in ("window", "slab", "ragged"):
    assert answers(spread, tier) == expected, tier
"""


def test_two_processes_share_a_model_and_give_its_answers(tmp_path: Path) -> None:
    load_model("tiny:llama", dtype="float64", device="cpu").save_pretrained(tmp_path / "model")
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, *words, str(script), str(tmp_path / "model")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
