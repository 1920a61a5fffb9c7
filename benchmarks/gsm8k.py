"""
GSM8K end to end: 1,319 real prompts, real answer lengths, a tiny Llama built from its configuration.

Profiles the model on this machine, plans with the measured costs, runs the plan at pinned lengths and
prints the report. Needs the public files `gsm8k/` and `gpt2_bpe/` (see --data).

Also prints what prefilling ahead of free slots could save at most, the reason why the engine does not:
0.8 % of the plan where it was measured (49 stages, 2,075 decode steps), less 0.1 ms for each insertion.

    python benchmarks/gsm8k.py --data ../shared/data --slots 64
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

from batchbound.cli import main as batchbound
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.executor.models.tokenizers import load_tokenizer


def write_prompts(data: Path, path: Path, solver: str) -> None:
    """Write the test problems as completion requests whose answers are as long as a real model's."""
    tokenizer = load_tokenizer(str(data / "gpt2_bpe"))
    with (data / "gsm8k" / "example_model_solutions.jsonl").open() as lines, path.open("w") as out:
        for number, line in enumerate(lines):
            row = json.loads(line)
            tokens = len(tokenizer.encode(row[solver]["solution"]))
            body = {"prompt": f"Question: {row['question']}\nAnswer:", "max_tokens": tokens}
            request = {"custom_id": f"gsm8k-{number}", "output_tokens": tokens, "body": body}
            out.write(json.dumps(request) + "\n")


def write_model(data: Path, folder: Path) -> None:
    """Write a tiny Llama's configuration with GPT-2's tokenizer; its weights are drawn when it is loaded."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=50257,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(data / "gpt2_bpe" / name, folder / name)


def least_seconds_ahead(problem: Problem) -> float:
    """
    Return seconds that no schedule goes below, not even one that prefills before slots are free.

    One prefill stage, no slot ever empty, as few rounds as the answers need.
    """
    cost, decode_steps = problem.cost, int(problem.decode_steps.sum())
    fewest = max(-(-decode_steps // problem.slots), int(problem.decode_steps.max()))
    return (
        cost.prefill_seconds(int(problem.prompt_tokens.sum()))
        + cost.decode_base * fewest
        + cost.decode_per_slot * decode_steps
        + cost.decode_per_kv_token * problem.kv_token_steps
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("BATCHBOUND_DATA", "../shared/data"))
    )
    parser.add_argument("--folder", type=Path, default=Path("gsm8k-output"))
    parser.add_argument("--slots", default="64")
    parser.add_argument("--time-limit", default="10")
    parser.add_argument("--solver", default="175b_finetuning", help="whose answers set the lengths")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    prompts, model = args.folder / "prompts.jsonl", args.folder / "model"
    write_prompts(args.data, prompts, args.solver)
    write_model(args.data, model)
    cost, plan, answers, trace, picture = (
        str(args.folder / name)
        for name in ("cost.json", "plan.json", "answers.jsonl", "trace.jsonl", "gantt.png")
    )
    named, limit = ["--model", str(model)], ["--time-limit", args.time_limit]
    loaded = [*named, "--load-format", "dummy", "--threads", "1"]
    steps = (
        ["profile", *loaded, "--slots", args.slots, "--prompt-tokens", "256", "-o", cost],
        ["plan", str(prompts), *named, "--slots", args.slots, "--cost", cost, *limit, "-o", plan],
        ["verify", plan],
        ["run", plan, *loaded, "--pinned", "-o", answers, "--trace", trace],
        ["report", plan, trace, "--gantt", picture],
    )
    for words in steps:
        begun = time.perf_counter()
        overwrite = [] if words[0] == "verify" else ["--overwrite"]
        print(f"$ batchbound {' '.join(words)}", flush=True)
        status = batchbound([*words, *overwrite])
        if status:
            return status
        print(f"[{time.perf_counter() - begun:.1f} s]\n", flush=True)
    planned = Plan.load(plan)
    saved = planned.makespan - least_seconds_ahead(planned.problem)
    print(f"prefilling ahead would save at most {saved:.2f} s, {saved / planned.makespan:.2%} of the plan")
    return 0


if __name__ == "__main__":
    sys.exit(main())
