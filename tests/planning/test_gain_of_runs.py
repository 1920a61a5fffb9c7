"""First come, first served on the end screen is what a run in file order takes: drawn jobs, really run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import mostly_slow

pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.data.costs.cost import CostModel
from batchbound.data.plan import Plan, Provenance
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.problem import Problem
from batchbound.data.readers.requests import read_workload
from batchbound.data.trace import Trace
from batchbound.executor.jobs.job import Job
from batchbound.executor.jobs.journal import Journal
from batchbound.executor.models.prompts import Prompts, encoded
from batchbound.executor.models.sampling import Sampler
from batchbound.executor.models.source import load_model
from batchbound.executor.models.tokenizers import load_tokenizer
from batchbound.gain import Gain, GainParams, gain_of
from batchbound.planning.plan import make_plan
from batchbound.solvers.result import Limits

MODEL = "tiny:speller"
COST = CostModel(0.02, 3e-4, 0.01, 2e-4, decode_per_kv_token=1e-6)
QUICK = GainParams(least_seconds=0.005, most_seconds=0.005)
JOBS = 40


@dataclass(frozen=True)
class Drawn:
    """A job with its limits, ready to run by any policy."""

    plan: Plan
    prompts: Prompts
    pinned: bool

    def run(self, folder: Path, policy: str | None) -> Trace:
        job = Job(
            self.plan,
            self.prompts,
            loaded()[0],
            loaded()[1],
            Sampler(),
            pinned=self.pinned,
            policy=policy,
            costs_known=False,
        )
        with Journal(folder / f"{policy}.journal", {}) as journal:
            (trace,) = job.run(journal).traces
            journal.remove()
        return trace

    def gain(self, trace: Trace) -> Gain:
        gain = gain_of(self.plan.fleet, trace, cost=COST, params=QUICK)
        assert gain is not None
        return gain


@cache
def loaded() -> tuple[Any, Any]:
    import torch

    torch.set_num_threads(1)
    return load_model(MODEL, dtype="float32", device="cpu"), load_tokenizer(MODEL)


def drawn(seed: int, folder: Path) -> Drawn:
    """Draw kinds of prompts, samples, caps, slots, a token cap and a KV capacity."""
    rng = np.random.default_rng(seed)
    count, slots = int(rng.integers(4, 25)), int(rng.integers(1, 13))
    several = rng.choice([1, 1, 4, 8], size=count) if rng.random() < 0.4 else np.ones(count, int)
    kinds = ["spell {}", "Write the number {} in words, please: ", "{} {} {} {} {}"]
    rows = [
        {
            "custom_id": f"r{k}",
            "body": {
                "prompt": str(rng.choice(kinds)).replace("{}", str(rng.integers(1, 10**6))),
                "max_tokens": int(rng.integers(1, 40)),
                "n": int(several[k]),
            },
        }
        for k in range(count)
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = read_workload(path, count_tokens=lambda records: [*map(len, encoded(records, loaded()[1]))])
    prompts = Prompts.encode(job.records, loaded()[1])
    work = job.workload.with_tree(PrefixTree.of_prompts(prompts.tokens).worth_keeping())
    longest = int((work.input_tokens + work.output_tokens).max())
    cap = int(work.input_tokens.max() + rng.integers(0, 150)) if rng.random() < 0.4 else None
    capacity = int(longest * rng.uniform(1, 1 + 0.7 * slots)) if rng.random() < 0.5 else None
    room = int(rng.integers(0, 2 * longest)) if work.tree is not None and rng.random() < 0.5 else 0
    problem = Problem(work, COST, slots, prefill_token_cap=cap, kv_capacity=capacity, prefix_cache=room)
    problem = replace(problem, prefill_emits_first_token=True)
    plan = make_plan(problem, limits=Limits(work=1), provenance=Provenance(job.lengths.to_json()))
    return Drawn(plan, prompts, pinned=bool(rng.random() < 0.3))


# In the last one the run leaves more room for beginnings than was planned.
@pytest.fixture(params=mostly_slow([*range(JOBS), 274], (1, 3, 4, 5, 274)))
def job(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Drawn, Path]:
    return drawn(request.param, tmp_path), tmp_path


def test_a_run_in_file_order_gains_nothing_and_the_others_gain_over_it(job: tuple[Drawn, Path]) -> None:
    jobs, folder = job
    fcfs = jobs.run(folder, "fcfs")
    own = jobs.gain(fcfs)
    counts = fcfs.decode_steps, fcfs.prefill_stages
    assert (own.first_come.decode_steps, own.first_come.prefill_stages) == counts
    assert own.first_come.prompt_tokens == own.this_run.prompt_tokens == fcfs.prompt_tokens
    assert own.first_come.seconds == pytest.approx(own.this_run.seconds, rel=0.005)
    assert own.least <= own.this_run.seconds * (1 + 1e-9)
    planned = jobs.run(folder, None)
    first = jobs.gain(planned).first_come
    assert (first.decode_steps, first.prefill_stages) == counts
