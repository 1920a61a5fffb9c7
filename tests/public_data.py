"""Small files in the formats of the public data that benchmarks read, for machines that do not have those."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

RNG = np.random.default_rng(20)


def lengths(count: int, typical: float, most: int) -> list[int]:
    """Return lengths with a long tail."""
    drawn = RNG.lognormal(np.log(typical), 0.7, count).astype(int)
    return [int(length) for length in np.clip(drawn, 1, most)]


def table(path: Path, columns: str, rows: Sequence[tuple[object, ...]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns.split(","))
        writer.writerows(rows)


def rollouts(folder: Path) -> None:
    """RL steps of a few prompts with eight completions each, and two models' completions of one set."""
    for name in ("dapo_qwen32b", "deepcoder14b", "video_qwen7b"):
        rows: list[tuple[object, ...]] = [
            (step, f"s{step}_{prompt}", f"s{step}_{prompt}_{k}", 60 + prompt, length)
            for step in range(6)
            for prompt in range(4)
            for k, length in enumerate(lengths(8, 200, 900))
        ]
        table(folder / f"{name}.csv", "step,group,id,input_tokens,output_tokens", rows)
    for name in ("gsm8k_models", "math_level5_models"):
        rows = [
            (model, f"{name}-{k}", 0, 80 + k % 40, length)
            for model in ("Qwen2-7B-Instruct", "Athene-70B")
            for k, length in enumerate(lengths(40, 60, 400))
        ]
        table(folder / f"{name}.csv", "model,session_id,sample,prompt_tokens,output_tokens", rows)


def questions(folder: Path) -> None:
    """Sums with worked answers, and two models' solutions of them."""
    folder.mkdir(parents=True)
    for name, count in (("train", 400), ("test", 60)):
        rows = [
            {
                "question": f"What is {k} plus {k * 7 % 90}?",
                "answer": f"It is {k + k * 7 % 90}. " * (1 + k % 9),
            }
            for k in range(count)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        solved = [
            {"question": row["question"], "ground_truth": row["answer"]}
            | {
                model: {"is_correct": True, "solution": row["answer"]}
                for model in ("6b_finetuning", "175b_finetuning")
            }
            for row in rows[:24]
        ]
    text = "".join(json.dumps(row) + "\n" for row in solved)
    (folder / "example_model_solutions.jsonl").write_text(text, encoding="utf-8")


def gpt2(folder: Path) -> None:
    """GPT-2's two files without merges: a token for each byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    folder.mkdir(parents=True)
    letters = [*bytes_to_unicode().values(), "<|endoftext|>"]  # type: ignore[no-untyped-call]
    vocabulary = json.dumps({letter: number for number, letter in enumerate(letters)})
    (folder / "vocab.json").write_text(vocabulary, encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")


def layer_profiles(folder: Path) -> None:
    """Microseconds of a small Llama's layers on one device and on each of two, linear in their work."""
    folder.mkdir(parents=True)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8}
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000, "model_type": "llama"}
    (folder / "Toy.json").write_text(json.dumps(heads | sizes), encoding="utf-8")
    for degree in (1, 2):
        mine = folder / f"RTX4090-Toy-tp{degree}"
        dense = [
            (name, tokens, 20 + tokens * cost / degree)
            for name, cost in (("qkv_proj", 0.1), ("o_proj", 0.05), ("gate_up_proj", 0.2), ("down_proj", 0.1))
            for tokens in (1, 64, 512, 4096)
        ]
        table(mine / "dense.csv", "layer,tokens,time_us", dense)
        head = [("lm_head", rows, 10 + rows * 0.2 / degree) for rows in (1, 64, 512)]
        table(mine / "per_sequence.csv", "layer,sequences,time_us", head)
        grid = [
            (chunk, before, rows, kept, 5 + (0.02 * chunk + 0.001 * before + 0.002 * rows * kept) / degree)
            for chunk, before in ((0, 0), (256, 0), (2048, 0), (256, 2048))
            for rows, kept in ((0, 0), (1, 64), (64, 64), (64, 1024), (256, 1024))
            if chunk or rows
        ]
        columns = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
        table(mine / "attention.csv", columns, grid)


def conversations(folder: Path) -> None:
    """Conversations as Mooncake records them: later turns begin with the blocks of earlier ones."""
    folder.mkdir(parents=True)
    rows = []
    for number, tokens in enumerate(lengths(120, 60, 400)):
        blocks = 1 + number % 7
        ids = [number // 7 * 100 + block for block in range(blocks)]
        prompt = 512 * (blocks - 1) + 1 + number * 37 % 512
        rows.append({"timestamp": number, "input_length": prompt, "output_length": tokens, "hash_ids": ids})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "conversation_trace.jsonl").write_text(text, encoding="utf-8")


def public_data(folder: Path) -> Path:
    """Write every file that a benchmark may ask for, and return the folder."""
    rollouts(folder / "rollouts")
    questions(folder / "gsm8k")
    gpt2(folder / "gpt2_bpe")
    layer_profiles(folder / "layer_profiles")
    prompts, completions = lengths(300, 300, 2000), lengths(300, 80, 600)
    rows = [(f"2023-11-16 18:15:{k // 10:02}.{k % 10}00", prompts[k], completions[k]) for k in range(300)]
    for part in ("conv", "code"):
        file = folder / "azure2023" / f"AzureLLMInferenceTrace_{part}.csv"
        table(file, "TIMESTAMP,ContextTokens,GeneratedTokens", rows)
    true = lengths(3000, 120, 1000)
    classes = [(k, length, min(4, length // 100), 0.01, "vicuna-13b") for k, length in enumerate(true)]
    file = folder / "ssjf" / "predictions_warmup_cls_1000K.csv"
    table(file, ",output_token_length,predicted_length,latency,model", classes)
    conversations(folder / "mooncake")
    points = [
        (
            "vllm",
            model,
            system,
            "fp8",
            "fp8",
            1024,
            256,
            batch,
            degree,
            1,
            40 * batch / degree,
            9 + batch / degree,
        )
        for model in ("Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B-Instruct")
        for system in ("h100_sxm", "h200_sxm", "b200_sxm")
        for batch in (1, 8, 64)
        for degree in (2, 4)
    ]
    table(
        folder / "aiconfigurator" / "measured_points.csv",
        "backend,model_path,system,gemm_quant_mode,moe_quant_mode,isl,osl,batch_size,tp_size,"
        "attention_dp_size,silicon_ttft_ms,silicon_tpot_ms",
        points,
    )
    fits = {
        f"facebook/opt-{size}": {
            str(devices): {
                "decoding_large_small_bs_threshold": 95,
                "prefill": [5 + 13 * scale / devices, 0.1 * scale / devices, 7e-6 * scale / devices],
                "decoding_smallbs": [
                    5 + 15 * scale / devices,
                    6e-4 * scale / devices,
                    0.04 * scale / devices,
                ],
                "decoding_largebs": [2 + 5 * scale / devices, 6e-4 * scale / devices, 0.16 * scale / devices],
            }
            for devices in (1, 2, 4, 8)
        }
        for size, scale in (("13b", 1), ("66b", 5), ("175b", 13))
    }
    (folder / "distserve").mkdir()
    file = folder / "distserve" / "profiler-a100-80g.distserve.json"
    file.write_text(json.dumps(fits), encoding="utf-8")
    return folder
