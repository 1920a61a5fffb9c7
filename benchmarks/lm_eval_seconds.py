"""
lm-eval on GSM8K with ``hf`` and with ``batchbound``: CPU seconds of the evaluation, and what differs.

Tasks of local questions: ``generate`` completes them, ``numbers`` chooses among the right number and three
of other questions, ``letters`` among A, B, C and D, ``perplexity`` scores questions with their solutions.
``:first`` has five fixed worked examples before each question, ``:random`` five drawn ones. Both models run
in one process on one object, in turns; ``hf`` at each of its batch sizes, of which the fastest counts.

Run: ``python benchmarks/lm_eval_seconds.py --model DIR --output FILE``, with lm-eval installed
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

KINDS = {
    "generate": "output_type: generate_until\n"
    'doc_to_text: "Question: {{question}}\\nAnswer:"\ndoc_to_target: " {{solution}}"\n'
    'generation_kwargs: {until: ["Question:"], max_gen_toks: 64, do_sample: false}\n'
    "metric_list: [{metric: exact_match}]\n",
    "numbers": "output_type: multiple_choice\n"
    'doc_to_text: "Question: {{question}}\\nAnswer:"\ndoc_to_choice: numbers\ndoc_to_target: right\n'
    "metric_list: [{metric: acc}]\n",
    "letters": "output_type: multiple_choice\n"
    'doc_to_text: "Question: {{question}}\\nA. {{numbers[0]}}\\nB. {{numbers[1]}}\\nC. {{numbers[2]}}'
    '\\nD. {{numbers[3]}}\\nAnswer:"\ndoc_to_choice: [A, B, C, D]\ndoc_to_target: right\n'
    "metric_list: [{metric: acc}]\n",
    "perplexity": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\n'
    'doc_to_target: "{{question}} {{solution}}"\n'
    "metric_list: [{metric: word_perplexity}]\n",
}
SHOTS = {"": "", "first": "fewshot_config: {sampler: first_n}\n", "random": ""}


def write_tasks(folder: Path, data: Path, questions: int) -> None:
    """Write the tasks, and files of questions and of worked examples."""
    for name, first, count in (("test", 0, questions), ("train", 1_000, 40)):
        rows = [json.loads(line) for line in (data / "test.jsonl").read_text(encoding="utf-8").splitlines()]
        numbers = [row["answer"].split("####")[1].strip() for row in rows]
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for at in range(first, first + count):
                right = at % 4
                others = [numbers[(at + step) % len(rows)] for step in (7, 19, 31)]
                choices = [*others[:right], numbers[at], *others[right:]]
                row = {"question": rows[at]["question"], "solution": rows[at]["answer"]}
                out.write(json.dumps(row | {"numbers": choices, "right": right}) + "\n")
    for kind, text in KINDS.items():
        for shots, sampler in SHOTS.items():
            files = f"test: {folder}/test.jsonl, train: {folder}/train.jsonl"
            (folder / f"{kind}_{shots}.yaml").write_text(
                f"task: local_{kind}_{shots}\ndataset_path: json\n"
                f"dataset_kwargs: {{data_files: {{{files}}}}}\n"
                f"test_split: test\nfewshot_split: train\nnum_fewshot: {5 if shots else 0}\n{sampler}{text}",
                encoding="utf-8",
            )


def evaluated(model: Any, task: str, tasks: Any) -> dict[str, Any]:
    """Evaluate a model on a task; return CPU seconds, scores and responses."""
    from lm_eval import simple_evaluate

    start = time.process_time()
    found = simple_evaluate(
        model, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0, verbosity="ERROR"
    )
    seconds = time.process_time() - start
    replies = {sample["doc_id"]: sample["filtered_resps"] for sample in found["samples"][task]}
    scores = {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
    return {"cpu_seconds": seconds, "scores": scores, "replies": [replies[at] for at in sorted(replies)]}


def compared(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return how many texts and greedy flags are equal, and the largest difference of log-likelihoods."""
    pairs = [
        pair
        for mine, theirs in zip(own["replies"], other["replies"], strict=True)
        for pair in zip(mine, theirs, strict=True)
    ]
    if isinstance(pairs[0][0], str):
        return {"replies": len(pairs), "equal": sum(a == b for a, b in pairs)}
    values = [(a, b) if isinstance(a, float) else (a[0], b[0]) for a, b in pairs]
    flags = [True if isinstance(a, float) else a[1] == b[1] for a, b in pairs]
    return {
        "replies": len(pairs),
        "equal": sum(flags),
        "largest_difference": max(abs(a - b) for a, b in values),
        "same_scores": own["scores"] == other["scores"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--tasks",
        nargs="*",
        default=["generate:first", "generate:random", "generate", "numbers:first", "letters", "perplexity"],
    )
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="*", default=[16], help="batch sizes of hf")
    data = Path(os.environ.get("BATCHBOUND_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=data / "gsm8k")
    parser.add_argument("--output", type=Path, help="JSON, written after every task")
    options = parser.parse_args()
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from batchbound.integrations.lm_eval import BatchboundLM

    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as home:
        write_tasks(Path(home), options.data.resolve(), options.questions)
        tasks = TaskManager(include_path=home, include_defaults=False)
        ours = BatchboundLM(
            options.model, dtype=options.dtype, device="cpu", batch_size=options.slots, max_length=2_048
        )
        theirs = {
            size: HFLM(ours.model, tokenizer=ours.tokenizer, batch_size=size, max_length=2_048)
            for size in options.batches
        }
        for task in options.tasks:
            kind, _, shots = task.partition(":")
            name = f"local_{kind}_{shots}"
            own = evaluated(ours, name, tasks)
            others = {size: evaluated(model, name, tasks) for size, model in theirs.items()}
            least, *more = others.values()
            size, best = min(others.items(), key=lambda item: item[1]["cpu_seconds"])
            rows.append(
                {
                    "task": task,
                    "questions": options.questions,
                    "dtype": options.dtype,
                    "cpu_seconds": own["cpu_seconds"],
                    "hf_cpu_seconds": best["cpu_seconds"],
                    "hf_batch_size": size,
                    "ratio": own["cpu_seconds"] / best["cpu_seconds"],
                    **compared(own, best),
                    "hf_with_another_batch_size": compared(least, more[0]) if more else None,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
            if options.output:
                options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
