"""Jobs of the arena: public length sources, in three regimes of an engine's limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from batchbound.data.iterations import UNLIMITED, EngineLimits
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.planning.mixed_job import MixedJob

DATA = Path(os.environ.get("BATCHBOUND_DATA", "../shared/data"))
REGIMES = ("slots", "KV", "tokens")
SLOTS, BUDGET, BLOCK = 64, 8192, 16

Draw = Callable[[np.random.Generator, int], pd.DataFrame]


def _sampled(file: str, prompt: str, output: str, rows: str | None = None) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> pd.DataFrame:
        table = pd.read_csv(DATA / file)
        if rows is not None:
            # One model, one step: a job is not drawn from several.
            names = table[rows].unique()
            table = table[table[rows] == names[int(rng.integers(len(names)))]]
        table = table[[prompt, output]].set_axis(["prompt", "output"], axis=1)
        table = table[(table.prompt > 0) & (table.output > 0)]
        return table.sample(min(count, len(table)), random_state=int(rng.integers(2**31)))

    return draw


def _paper(rng: np.random.Generator, count: int) -> pd.DataFrame:
    work = generate("table3", int(rng.integers(2**31)), count)
    return pd.DataFrame({"prompt": work.input_tokens, "output": work.output_tokens})


SOURCES: Mapping[str, Draw] = {
    "paper": _paper,
    "azure-conv": _sampled("azure2023/AzureLLMInferenceTrace_conv.csv", "ContextTokens", "GeneratedTokens"),
    "azure-code": _sampled("azure2023/AzureLLMInferenceTrace_code.csv", "ContextTokens", "GeneratedTokens"),
    "gsm8k": _sampled("rollouts/gsm8k_models.csv", "prompt_tokens", "output_tokens", "model"),
    "math": _sampled("rollouts/math_level5_models.csv", "prompt_tokens", "output_tokens", "model"),
    "rollouts": _sampled("rollouts/dapo_qwen32b.csv", "input_tokens", "output_tokens", "step"),
}
"""Sources by name; all but the first need BATCHBOUND_DATA."""


PUBLISHED = {
    "paper": "drawn by batchbound's generator table3",
    "azure-conv": "lengths of Azure/AzurePublicDataset (CC-BY 4.0)",
    "gsm8k": "lengths of completions in WildEval/ZeroEval (Apache-2.0), tokens of GPT-2",
    "math": "lengths of completions in WildEval/ZeroEval (Apache-2.0), tokens of GPT-2",
}
"""Sources whose lengths may be published, with their licences."""


def arena_job(source: str, regime: str, seed: int, count: int = 400) -> tuple[MixedJob, EngineLimits]:
    """Draw a job and the engine's limits.

    *slots*: 64 slots, with tokens and memory for all of them. *KV*: 8,192 tokens an iteration, and memory for
    40 % of the slots at the mean peak, but for four requests of the largest at least. *tokens*: as *slots*,
    with half of the prompt tokens that 64 slots would compute in an iteration on average.
    """
    rng = np.random.default_rng([seed, list(SOURCES).index(source)])
    table = SOURCES[source](rng, count)
    work = Workload.from_lengths(table.prompt, table.output)
    peak = work.input_tokens + work.output_tokens
    limits = EngineLimits(SLOTS, UNLIMITED, None, BLOCK)
    if regime == "KV":
        room = max(int(0.4 * SLOTS * peak.mean()), 4 * (int(peak.max()) + BLOCK))
        limits = EngineLimits(SLOTS, BUDGET, room // BLOCK * BLOCK, BLOCK)
    if regime == "tokens":
        limits = EngineLimits(
            SLOTS, SLOTS + int(0.5 * SLOTS * work.input_tokens.sum() / work.output_tokens.sum()) + 1
        )
    return MixedJob(work), limits
