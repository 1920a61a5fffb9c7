"""
GRPO with TRL on rollouts of batchbound: ``python examples/trl_grpo.py [SEED]``, some ten seconds on a CPU.

A tiny model learns to answer in words of the kind it is asked for. ``pip install 'batchbound[trl]'`` first.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from batchbound.data.report import TAIL
from batchbound.executor.llm import LLM
from batchbound.executor.rollout import Rollout, rollout_function

STEPS, PROMPTS, GROUP = 30, 8, 8

WORDS = {
    "colours": ["red", "green", "blue", "yellow", "black", "white", "brown", "pink", "grey", "violet"],
    "animals": ["cat", "dog", "horse", "cow", "pig", "sheep", "hen", "duck", "goose", "mouse"],
    "numbers": ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"],
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a word."""
    words = [
        "<pad>",
        "<eos>",
        "<unk>",
        "name",
        "some",
        *WORDS,
        *(word for kind in WORDS.values() for word in kind),
    ]
    raw = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return a Llama of some hundred thousand weights, as training begins with them."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def of_its_kind(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return the share of each completion's words that are of the kind asked for."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        wanted, words = WORDS[prompt.split()[-1]], completion.split()
        rewards.append(sum(word in wanted for word in words) / max(1, len(words)))
    return rewards


def train(seed: int, *, steps: int = STEPS) -> list[float]:
    """Train a model; print a line for each step, and return each step's mean reward."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    engine = LLM(model, tokenizer, slots=32)
    draw = rollout_function(engine)

    def rollout(prompts: Sequence[str], trainer: GRPOTrainer) -> Rollout:
        begun = time.perf_counter()
        answers = draw(prompts, trainer)
        seconds = time.perf_counter() - begun
        report = engine.report()
        lengths = [len(ids) for ids in answers["completion_ids"]]
        gap = round(report.run_gap, 4) + 0.0
        tail = report.slot_seconds[TAIL] / sum(report.slot_seconds.values())
        print(
            f"step {trainer.state.global_step:2}: rollout {seconds:.2f} s, {sum(lengths)} tokens, longest"
            f" {max(lengths)}, {tail:.0%} of the slots' time in the tail, {gap:.1%} above the"
            " bound for these lengths, in the cost model's seconds"
        )
        return answers

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            reward_funcs=of_its_kind,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=PROMPTS * GROUP,
                num_generations=GROUP,
                gradient_accumulation_steps=1,
                max_completion_length=24,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                seed=seed,
            ),
            train_dataset=Dataset.from_dict({"prompt": [f"name some {kind}" for kind in WORDS] * 64}),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        trainer.remove_callback(PrinterCallback)  # A line a step is enough.
        trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    """Train with the seed named on the command line, and say what became of the reward."""
    rewards = train(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for at in range(0, len(rewards), 5):
        mean = sum(rewards[at : at + 5]) / len(rewards[at : at + 5])
        print(f"steps {at + 1:2} to {at + len(rewards[at : at + 5]):2}: mean reward {mean:.3f}")


if __name__ == "__main__":
    main()
