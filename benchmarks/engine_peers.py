"""
The engine beside what else a CPU user could pick: same weights, prompts and lengths, one thread, in turns.

Each peer runs in a process of its own, in a Python of its own that has it installed. CPU seconds of that
process from the first prompt to the last token: loading and converting are outside for all. Answers have
pinned lengths and are greedy; how many are token for token ours is printed beside.

- ``batchbound``: the ragged tier, longest completion first.
- ``shared``: the same engine as :class:`LLM`, where a prompt that comes several times is computed once.
- ``trl``: one call of transformers' ``generate`` for all, as TRL's trainers make by default.
- ``static``, ``continuous``: transformers' ``generate`` on full batches, and its continuous batching.
- ``openvino``: OpenVINO GenAI's continuous batching, keys and values in float32, with its prefix cache where
  a prompt comes several times; needs ``openvino-genai`` and ``optimum-intel``; the model is converted once.
- ``vllm``: vLLM's ``LLM`` in one process, compiled, with its prefix cache where a prompt comes several times;
  needs vLLM for CPUs and a C++ compiler.
- ``llamacpp``: llama.cpp through ``llama-cpp-python``, with ``gguf``: a sequence a slot, and in each batch
  the next token of all that run, then prompts up to its batch, as its server does; the model is
  converted once.

Beside them stands the roofline: what the job's decode steps and prompts need at the rates that this process
measures, of bytes where each step reads all weights and what its rows hold, or of operations where those
take longer.

Run: ``python benchmarks/engine_peers.py --cells 7m-short-16 --python openvino=/path/to/its/python``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

SHAPES: dict[str, tuple[int, int, int, int, int, int, str]] = {
    "7m": (4_096, 256, 704, 7, 8, 4, "float32"),
    "50m": (8_192, 512, 1_408, 14, 8, 4, "float32"),
    "300m": (32_000, 1_024, 2_816, 20, 16, 8, "bfloat16"),
}
"""Vocabulary, hidden and intermediate size, layers, heads, key-value heads, number format."""
CELLS = {
    f"{shape}-{kind}-{slots}": (shape, kind, slots, count)
    for shape, kind, slots, count in [
        *(("7m", "short", slots, 96) for slots in (16, 64)),
        *(("7m", "tail", slots, 96) for slots in (16, 64)),
        *(("50m", "short", slots, 48 if slots == 16 else 96) for slots in (16, 64)),
        *(("50m", "tail", slots, 48 if slots == 16 else 96) for slots in (16, 64)),
        *(("300m", "short", slots, 24 if slots == 16 else 64) for slots in (16, 64)),
        *((shape, "groups", 64, 512) for shape in ("7m", "50m")),
    ]
}
"""A model, a kind of job, slots and requests."""
BATCHED_TOKENS = 512


def job_of(kind: str, count: int, vocabulary: int) -> list[dict[str, Any]]:
    """
    Return prompts with the tokens to answer them with, the longest completion first.

    ``short``: prompts of 16 to 128 tokens, completions of 8 to 64. ``tail``: prompts of 32 to 256,
    completions log-normal with median 60 and sigma 1, at most 768. ``groups``: each prompt, of 200 tokens,
    eight times; completions log-normal with median 60 and sigma 1, at most 256.
    """
    draw = np.random.default_rng(0)
    low, high = (16, 128) if kind == "short" else (32, 256)
    if kind == "groups":
        each = [draw.integers(3, vocabulary, 200).tolist() for _ in range(count // 8)]
        prompts = [prompt for prompt in each for _ in range(8)]
    else:
        prompts = [draw.integers(3, vocabulary, draw.integers(low, high + 1)).tolist() for _ in range(count)]
    if kind == "short":
        answers = draw.integers(8, 65, count)
    else:
        longest = 256 if kind == "groups" else 768
        answers = np.clip(np.exp(draw.normal(np.log(60), 1.0, count)), 2, longest).astype(int)
    jobs = [{"prompt": p, "tokens": int(n)} for p, n in zip(prompts, answers, strict=True)]
    return sorted(jobs, key=lambda job: -job["tokens"])


Answers = list[list[int]]
Row = tuple[int, int, int, bool]
"""Slot, token, its position, and whether the next token is asked for."""

Runner = Callable[[Path, list[dict[str, Any]], int], tuple[float, Answers]]
"""Takes the model's folder, the job and the slots; returns CPU seconds and the tokens of each request."""


def by_transformers(way: str) -> Runner:
    """Return what runs a job by a way of ``engine_speed.py``, on a model of transformers."""

    def run(folder: Path, jobs: list[dict[str, Any]], slots: int) -> tuple[float, Answers]:
        import torch
        from engine_speed import WAYS, Job
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        model.eval()
        work = [Job(job["prompt"], job["tokens"]) for job in jobs]
        call = WAYS[way]
        call(model, [Job(job.prompt[:8], 4) for job in work[:2]], 2)
        start = time.process_time()
        answers = call(model, work, slots)
        return time.process_time() - start, answers

    return run


def by_shared_prompts(folder: Path, jobs: list[dict[str, Any]], slots: int) -> tuple[float, Answers]:
    """Run a job by the library, which computes a prompt once however often it comes."""
    import torch
    from transformers import AutoModelForCausalLM

    from batchbound import LLM
    from batchbound.executor.models.tokenizers import load_tokenizer

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    llm = LLM(model, load_tokenizer("tiny:llama"), slots=slots, tier="ragged")
    list(llm.generate([job["prompt"][:8] for job in jobs[:2]], max_tokens=4, ignore_eos=True))
    prompts, tokens = [job["prompt"] for job in jobs], [job["tokens"] for job in jobs]
    start = time.process_time()
    answers: Answers = [[] for _ in jobs]
    for one in llm.generate(prompts, max_tokens=tokens, expected_tokens=tokens, ignore_eos=True):
        answers[one.index] = list(one.completion_ids)
    return time.process_time() - start, answers


def by_one_call(folder: Path, jobs: list[dict[str, Any]], slots: int) -> tuple[float, Answers]:
    """Run a job by one call of ``generate``, whatever the slots: each row goes on until the last ends."""
    return by_transformers("static generate")(folder, jobs, len(jobs))


def by_openvino(folder: Path, jobs: list[dict[str, Any]], slots: int) -> tuple[float, Answers]:
    """Run a job by OpenVINO GenAI."""
    import openvino
    import openvino_genai

    converted = folder / "openvino"
    if not converted.exists():
        from optimum.intel import OVModelForCausalLM

        model = OVModelForCausalLM.from_pretrained(folder, export=True, load_in_8bit=False, compile=False)
        model.save_pretrained(converted)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = slots, BATCHED_TOKENS
    scheduler.cache_size, scheduler.dynamic_split_fuse = 2, True
    scheduler.enable_prefix_caching = prompts_repeat(jobs)
    kind = {"float32": "f32", "bfloat16": "bf16"}[json.loads((folder / "config.json").read_text())["dtype"]]
    options = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind, "INFERENCE_NUM_THREADS": 1}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(converted), scheduler, "CPU", options)

    def generate(some: list[dict[str, Any]]) -> Answers:
        settings = []
        for job in some:
            one = openvino_genai.GenerationConfig()
            one.max_new_tokens, one.min_new_tokens = job["tokens"], job["tokens"]
            # Its own default, -1, it refuses.
            one.eos_token_id, one.stop_token_ids = 0, {0}
            one.ignore_eos, one.do_sample = True, False
            settings.append(one)
        prompts = [openvino.Tensor(np.array([job["prompt"]], dtype=np.int64)) for job in some]
        return [list(result.m_generation_ids[0]) for result in pipeline.generate(prompts, settings)]

    generate([{"prompt": job["prompt"][:8], "tokens": 4} for job in jobs[:2]])
    start = time.process_time()
    answers = generate(jobs)
    return time.process_time() - start, answers


def by_vllm(folder: Path, jobs: list[dict[str, Any]], slots: int) -> tuple[float, Answers]:
    """Run a job by vLLM's offline engine, scheduler and worker in this process: all its CPU time is seen."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder),
        skip_tokenizer_init=True,
        # By itself it would take half the bits of a model in float32.
        dtype=json.loads((folder / "config.json").read_text())["dtype"],
        max_num_seqs=slots,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_model_len=2048,
        enable_prefix_caching=prompts_repeat(jobs),
        distributed_executor_backend="uni",
    )

    def generate(some: list[dict[str, Any]]) -> Answers:
        prompts = [{"prompt_token_ids": job["prompt"]} for job in some]
        counts = [job["tokens"] for job in some]
        settings = [
            SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            for n in counts
        ]
        done = engine.generate(prompts, settings, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]

    generate([{"prompt": job["prompt"][:8], "tokens": 4} for job in jobs[:2]])
    start = time.process_time()
    answers = generate(jobs)
    return time.process_time() - start, answers


def read_safetensors(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file in float32; NumPy alone has no bfloat16."""
    blob = file.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    tensors = {}
    for name, entry in json.loads(blob[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        low, high = (8 + size + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(blob[low:high], np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(blob[low:high], np.float32)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def write_gguf(folder: Path, file: Path) -> None:
    """Write a folder's Llama as llama.cpp reads it, in the folder's number format."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    kind = gguf.GGMLQuantizationType.BF16 if config["dtype"] == "bfloat16" else gguf.GGMLQuantizationType.F32
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, values in read_safetensors(folder / "model.safetensors").items():
        for part, count in (("q_proj", heads), ("k_proj", config["num_key_value_heads"])):
            if part in name:
                # Its rotation takes neighbours as pairs, transformers' takes the halves of a head.
                halves = values.reshape(count, 2, -1, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        kept = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        target = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(values), kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaServer:
    """llama.cpp's library, called in the order of its server: a sequence a slot, all in one batch."""

    def __init__(self, file: Path, slots: int, longest: int, number_format: str) -> None:
        import llama_cpp

        self._library, self._slots = llama_cpp, slots
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        options = llama_cpp.llama_context_default_params()
        # Each sequence has a part of its own, in blocks of 256.
        options.n_ctx, options.n_seq_max = slots * (-(-longest // 256) * 256), slots
        options.n_batch = options.n_ubatch = BATCHED_TOKENS
        options.n_threads = options.n_threads_batch = 1
        # The library names no GGML_TYPE_BF16.
        options.type_k = options.type_v = 30 if number_format == "bfloat16" else llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(model, options)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCHED_TOKENS, 0, 1)

    def generate(self, jobs: list[dict[str, Any]]) -> Answers:
        """Return greedy answers of pinned lengths."""
        answers: Answers = [[] for _ in jobs]
        waiting = deque(range(len(jobs)))
        holds: dict[int, int] = {}
        done = [0] * self._slots
        while waiting or holds:
            for slot in range(self._slots):
                if slot not in holds and waiting:
                    holds[slot], done[slot] = waiting.popleft(), 0
                    self._library.llama_memory_seq_rm(self._memory, slot, -1, -1)
            rows: list[Row] = []
            # What runs comes first, then the prompts that are not read to their ends.
            for slot, one in sorted(holds.items(), key=lambda item: (not answers[item[1]], item[0])):
                prompt = jobs[one]["prompt"]
                fresh = [answers[one][-1]] if answers[one] else prompt[done[slot] :]
                for token in fresh[: BATCHED_TOKENS - len(rows)]:
                    rows.append((slot, token, done[slot], done[slot] + 1 >= len(prompt)))
                    done[slot] += 1
            for slot, token in self._decode(rows):
                answers[holds[slot]].append(token)
                if len(answers[holds[slot]]) == jobs[holds[slot]]["tokens"]:
                    del holds[slot]
        return answers

    def _decode(self, rows: list[Row]) -> list[tuple[int, int]]:
        """Return the slots that got a token, each with it."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (slot, token, position, last) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, last
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, slot
        if self._library.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp could not decode a batch")
        found = []
        for row, (slot, _, _, last) in enumerate(rows):
            if last:
                logits = self._library.llama_get_logits_ith(self._context, row)
                found.append((slot, int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())))
        return found


def by_llamacpp(folder: Path, jobs: list[dict[str, Any]], slots: int) -> tuple[float, Answers]:
    """Run a job by llama.cpp's library."""
    converted = folder / "llama.gguf"
    if not converted.exists():
        write_gguf(folder, converted)
    longest = max(len(job["prompt"]) + job["tokens"] for job in jobs)
    number_format = json.loads((folder / "config.json").read_text())["dtype"]
    server = LlamaServer(converted, slots, longest, number_format)
    server.generate([{"prompt": job["prompt"][:8], "tokens": 4} for job in jobs[:2]])
    start = time.process_time()
    answers = server.generate(jobs)
    return time.process_time() - start, answers


def prompts_repeat(jobs: list[dict[str, Any]]) -> bool:
    """Return whether a prompt comes several times."""
    return len({tuple(job["prompt"]) for job in jobs}) < len(jobs)


RUNNERS: dict[str, Runner] = {
    "batchbound": by_transformers("ragged"),
    "shared": by_shared_prompts,
    "trl": by_one_call,
    "static": by_transformers("static generate"),
    "continuous": by_transformers("transformers continuous batching"),
    "openvino": by_openvino,
    "vllm": by_vllm,
    "llamacpp": by_llamacpp,
}


def machine_rates(shape: str) -> tuple[float, float]:
    """Return bytes of weights read again and again, and operations of a matrix product, in a CPU second."""
    import torch

    torch.set_num_threads(1)
    dtype = getattr(torch, SHAPES[shape][-1])
    read = torch.ones(sum(weights_of(shape)) * dtype.itemsize // 4)
    factor = torch.ones(1024, 1024, dtype=dtype)
    # What multiplies fastest here, by more than twice in float32: weights that oneDNN has packed.
    with torch.inference_mode():
        packed = torch.ops.mkldnn._reorder_linear_weight(factor, 1024)

    def least(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(8):
            begun = time.process_time()
            call()
            taken.append(time.process_time() - begun)
        return min(taken)

    with torch.inference_mode():
        product = least(lambda: torch.ops.mkldnn._linear_pointwise(factor, packed, None, "none", [], ""))
    return read.nbytes / least(read.sum), 2 * 1024**3 / product


def weights_of(shape: str) -> tuple[int, int]:
    """Return the weights of all layers, and of the logits."""
    vocabulary, hidden, intermediate, layers, heads, kv_heads, _ = SHAPES[shape]
    attention = 2 * hidden * hidden + 2 * hidden * (hidden // heads) * kv_heads
    return layers * (attention + 3 * hidden * intermediate), hidden * vocabulary


def roofline(shape: str, jobs: list[dict[str, Any]], slots: int, rates: tuple[float, float]) -> float:
    """Return the seconds of a job at a machine's rates, each slot taking the next request when free."""
    _, hidden, _, layers, heads, kv_heads, dtype = SHAPES[shape]
    (inner, logits), size = weights_of(shape), 2 if dtype == "bfloat16" else 4
    free = [0] * slots
    active = np.zeros(sum(job["tokens"] for job in jobs))
    held, operations = np.zeros_like(active), 0.0
    for job in jobs:
        slot, tokens, prompt = free.index(min(free)), job["tokens"] - 1, len(job["prompt"])
        decode_steps = slice(free[slot], free[slot] + tokens)
        active[decode_steps] += 1
        held[decode_steps] += prompt + 1 + np.arange(tokens)
        free[slot] += tokens
        operations += 2 * (inner * prompt + logits) + 2 * hidden * layers * prompt**2
    number = 2 * layers * kv_heads * (hidden // heads)
    steps = slice(0, max(free))
    reading = ((inner + logits) + number * held[steps]) * size / rates[0]
    computing = (2 * (inner + logits) * active[steps] + 4 * hidden * layers * held[steps]) / rates[1]
    return float(np.maximum(reading, computing).sum() + operations / rates[1])


def write_model(shape: str, folder: Path) -> None:
    """Write a random Llama of a shape."""
    import torch
    from transformers import AutoConfig

    from batchbound.executor.models.source import build_random

    vocabulary, hidden, intermediate, layers, heads, kv_heads, dtype = SHAPES[shape]
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
    build_random(config, seed=0).to(getattr(torch, dtype)).eval().save_pretrained(folder)


def in_its_own_process(python: str, peer: str, folder: Path, job: Path, slots: int) -> dict[str, Any]:
    """Run a peer once; raise if it fails."""
    command = [
        python,
        __file__,
        "--worker",
        peer,
        "--model",
        str(folder),
        "--job",
        str(job),
        "--slots",
        str(slots),
    ]
    environment = dict(os.environ)
    if python != sys.executable:
        # Our packages are not its packages.
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{peer} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(cell: str, peers: dict[str, str], repeats: int, home: Path) -> dict[str, Any]:
    """Run the peers in turns on a cell; return the least CPU seconds of each, and whose answers are ours."""
    shape, kind, slots, count = CELLS[cell]
    folder, job = home / shape, home / f"{cell}.json"
    if not folder.exists():
        home.mkdir(parents=True, exist_ok=True)
        write_model(shape, folder)
    jobs = job_of(kind, count, SHAPES[shape][0])
    job.write_text(json.dumps(jobs), encoding="utf-8")
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    answers: dict[str, Answers] = {}
    for _ in range(repeats):
        for peer, python in peers.items():
            result = in_its_own_process(python, peer, folder, job, slots)
            seconds[peer].append(result["cpu_seconds"])
            answers[peer] = result["answers"]
    for peer, theirs in answers.items():
        if [len(answer) for answer in theirs] != [job["tokens"] for job in jobs]:
            raise RuntimeError(f"{peer} gave answers of other lengths than asked for")
    ours = answers["batchbound"]
    return {
        "cell": cell,
        "requests": count,
        "roofline_seconds": roofline(shape, jobs, slots, machine_rates(shape)),
        "cpu_seconds": {peer: min(values) for peer, values in seconds.items()},
        "same_answers": {
            peer: sum(a == b for a, b in zip(theirs, ours, strict=True)) for peer, theirs in answers.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="*", choices=sorted(CELLS), default=["7m-short-16"])
    parser.add_argument(
        "--peers", nargs="*", choices=sorted(RUNNERS), default=["batchbound", "static", "continuous"]
    )
    parser.add_argument(
        "--python", nargs="*", default=[], metavar="PEER=PYTHON", help="what has it installed"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--home", type=Path, help="keep the models there for another time")
    parser.add_argument("--output", type=Path, help="JSON, written after every cell")
    parser.add_argument("--worker", choices=sorted(RUNNERS), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        jobs = json.loads(options.job.read_text(encoding="utf-8"))
        seconds, answers = RUNNERS[options.worker](options.model, jobs, options.slots)
        print(json.dumps({"cpu_seconds": seconds, "answers": answers}))
        return
    pythons = dict(entry.split("=", 1) for entry in options.python)
    peers = {
        peer: pythons.get(peer, sys.executable) for peer in dict.fromkeys(["batchbound", *options.peers])
    }
    results = []
    with nullcontext(options.home) if options.home else tempfile.TemporaryDirectory() as home:
        for cell in options.cells:
            results.append(compare(cell, peers, options.repeats, Path(home)))
            if options.output:
                options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{cell:14s} {'roofline':12s} {results[-1]['roofline_seconds']:8.2f} CPU s")
            ours = results[-1]["cpu_seconds"]["batchbound"]
            for peer, seconds in results[-1]["cpu_seconds"].items():
                same = results[-1]["same_answers"][peer]
                print(
                    f"{cell:14s} {peer:12s} {seconds:8.2f} CPU s, batchbound takes {ours / seconds:5.2f} of"
                    f" it, {same} of {results[-1]['requests']} answers the same",
                    flush=True,
                )


if __name__ == "__main__":
    main()
