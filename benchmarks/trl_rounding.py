"""
How far log-probabilities of the same tokens lie apart under TRL's default bf16 autocast, and in float32.

``python benchmarks/trl_rounding.py``: three steps of ``GRPOTrainer`` with its defaults on a model of random
weights. Compared are ours with TRL's own forward pass, TRL's pass sample by sample with its pass over the
padded batch, transformers' ``generate`` with TRL's pass, and each with a pass in float32. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import unwrap_model_for_generation

from batchbound.executor.llm import LLM
from batchbound.executor.rollout import Rollout, rollout_function

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "trl_grpo.py"))
PAD, EOS, LONGEST, STEPS = 0, 1, 24, 3

Rows = list[list[int]]
Values = list[list[float]]


def model_of(vocabulary: int, hidden: int, layers: int) -> LlamaForCausalLM:
    """Return a Llama of random weights, spread widely enough that tokens differ in probability."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def padded(prompts: Rows, completions: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask, prompts padded on the left and completions on the right, as TRL does."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest + max(map(len, completions))), PAD)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        here = slice(longest - len(prompt), longest + len(completion))
        ids[row, here], mask[row, here] = torch.tensor(prompt + completion), 1
    return ids, mask


@torch.no_grad()
def by_trl(trainer: Any, prompts: Rows, completions: Rows) -> Values:
    """Return the log-probabilities of TRL's own forward pass over a batch."""
    ids, mask = padded(prompts, completions)
    longest = max(map(len, completions))
    values = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest)[0]
    return [row[: len(one)].tolist() for row, one in zip(values, completions, strict=True)]


def one_by_one(trainer: Any, prompts: Rows, completions: Rows) -> Values:
    """Return TRL's, each sample in a pass of its own."""
    return [
        by_trl(trainer, [prompt], [completion])[0]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


@torch.no_grad()
def in_float32(trainer: Any, prompts: Rows, completions: Rows) -> Values:
    """Return those of a pass past the autocast that accelerate has put into ``forward``."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt + completion])
        logits = type(trainer.model).forward(trainer.model, input_ids=ids).logits[0, len(prompt) - 1 : -1]
        told = torch.log_softmax(logits / trainer.temperature, -1)
        found.append(told.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist())
    return found


@torch.no_grad()
def by_generate(trainer: Any, prompts: Rows) -> tuple[Rows, Values]:
    """Return completions that transformers' ``generate`` draws as TRL calls it, and their scores."""
    ids, mask = padded(prompts, [[] for _ in prompts])
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        drawn = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=LONGEST,
            do_sample=True,
            top_k=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    told = torch.stack([torch.log_softmax(scores.float(), -1) for scores in drawn.scores], 1)
    completions, values = [], []
    for row, tokens in enumerate(drawn.sequences[:, ids.shape[1] :].tolist()):
        completion = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
        completions.append(completion)
        values.append([float(told[row, at, token]) for at, token in enumerate(completion)])
    return completions, values


def measured(hidden: int, layers: int, bf16: bool | None) -> dict[str, dict[str, float]]:
    """Return the differences of three steps: tokens, the largest, the mean."""
    tokenizer = EXAMPLE["make_tokenizer"]()
    model = model_of(len(tokenizer), hidden, layers)
    draw = rollout_function(LLM(model, tokenizer, slots=4))
    found: dict[str, list[float]] = {}

    def note(name: str, left: Values, right: Values) -> None:
        gaps = [np.abs(np.subtract(a, b)) for a, b in zip(left, right, strict=True)]
        found.setdefault(name, []).extend(np.concatenate(gaps).tolist())

    def rollout(prompts: Sequence[str], trainer: GRPOTrainer) -> Rollout:
        answer = draw(prompts, trainer)
        asked, written, ours = answer["prompt_ids"], answer["completion_ids"], answer["logprobs"]
        was = trainer.model.training
        trainer.model.eval()
        alone = one_by_one(trainer, asked, written)
        exact = in_float32(trainer, asked, written)
        note("ours, TRL's", ours, alone)
        note("TRL's padded, TRL's", by_trl(trainer, asked, written), alone)
        drawn, scores = by_generate(trainer, asked)
        note("generate's, TRL's", scores, one_by_one(trainer, asked, drawn))
        note("ours, float32", ours, exact)
        note("TRL's, float32", alone, exact)
        trainer.model.train(was)
        return answer

    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            model,
            reward_funcs=EXAMPLE["of_its_kind"],
            args=GRPOConfig(
                folder,
                max_steps=STEPS,
                max_completion_length=LONGEST,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                bf16=bf16,
            ),
            train_dataset=Dataset.from_dict(
                {"prompt": [f"name some {kind}" for kind in EXAMPLE["WORDS"]] * 8}
            ),
            processing_class=tokenizer,
            rollout_func=rollout,
        ).train()
    return {
        name: {"tokens": len(gaps), "largest": max(gaps), "mean": float(np.mean(gaps))}
        for name, gaps in found.items()
    }


def main() -> None:
    """Measure both number formats, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    formats = {"bf16 autocast": None, "float32": False}
    results = {name: measured(args.hidden, args.layers, bf16) for name, bf16 in formats.items()}
    print(json.dumps({"hidden": args.hidden, "layers": args.layers, **results}, indent=1))


if __name__ == "__main__":
    main()
