"""A model whose layers two processes share, on the engine: the answers of the model alone."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from scripts import begun

from batchbound.executor.models.families import UnsupportedModelError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = """
import gc
import json
import numpy as np
import torch
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.executor.engines.huggingface import HuggingFaceEngine, vocabulary_of
from batchbound.heuristics.loop import execute
from batchbound.executor.models.source import load_model
from batchbound.executor.models.prompts import Prompts
from batchbound.executor.processes.tensor_parallel import share_layers
from batchbound.executor.engines.tiers import choose_tier
from batchbound.heuristics.exegpt.dynamic_batch import DynamicBatch
from batchbound.heuristics.exegpt.round_robin import RoundRobinAllocation

torch.set_num_threads(1)
model = load_model("tiny:llama", dtype="float64", device="cpu")
rng = np.random.default_rng(5)
workload = Workload.from_lengths(rng.integers(1, 20, 8), rng.integers(1, 10, 8))
problem = Problem(workload, CostModel.paper(), 4, prefill_emits_first_token=True)
prompts = Prompts.random(workload, vocabulary_of(model), seed=2)
alone = []
for prompt, count in zip(prompts.tokens, workload.output_tokens.tolist()):
    ids = torch.tensor([prompt])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )
    alone.append(whole[0, len(prompt):].tolist())
shared = share_layers(model, 2)
same = []
for tier in ("window", "ragged"):
    chosen = choose_tier(shared, tier)
    engine = HuggingFaceEngine(problem, shared, prompts.tokens, workload.output_tokens, tier=chosen)
    execute(problem, RoundRobinAllocation(3, DynamicBatch(2, 10.0, None)), engine)
    same.append(engine.answers == alone)
held = shared.model.layers[0].self_attn.q_proj.weight.to_local().shape[0]
print(json.dumps({"same": same, "held": held}))
# A group that is destroyed while a model still uses it now and then aborts its process.
del shared, engine, model
gc.collect()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
# Of the second the output layer has the embedding's weights.
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_two_processes_that_share_each_layer_give_the_answers_of_the_model_alone(
    family: str, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (script := tmp_path / "script.py").write_text(SCRIPT.replace("tiny:llama", f"tiny:{family}"), "utf-8")
    with ExitStack() as stack:
        processes = []
        for rank in ("0", "1"):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            processes.append(stack.enter_context(begun(script, [], tmp_path, {**os.environ, **place})))
        for process, logs in processes:
            process.join(240)
            assert process.exitcode == 0, (logs / "stderr").read_text(encoding="utf-8")
            # Each holds half of the 64 rows of a layer's query weights.
            said = (logs / "stdout").read_text(encoding="utf-8").splitlines()
            assert json.loads(said[-1]) == {"same": [True, True], "held": 32}


def test_an_output_layer_with_the_embeddings_weights_gets_its_own_to_be_shared() -> None:
    from batchbound.executor.models.source import load_model
    from batchbound.executor.processes.tensor_parallel import untie

    model: Any = load_model("tiny:gemma3", device="cpu")
    names = set(dict(model.named_parameters()))
    untie(model)
    assert set(dict(model.named_parameters())) - names == {"lm_head.weight"}
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_what_cannot_be_shared_is_refused() -> None:
    from batchbound.executor.models.source import load_model
    from batchbound.executor.processes.tensor_parallel import share_layers

    llama: Any = load_model("tiny:llama", device="cpu")
    with pytest.raises(ValueError, match="num_attention_heads is 4, which 3 processes"):
        share_layers(llama, 3)
    with pytest.raises(UnsupportedModelError, match="no plan for sharing"):
        share_layers(load_model("tiny:bloom", device="cpu"), 2)
