"""
Compare orders of requests whose lengths are unknown, simulated with real completion lengths.

Each job is the completions of one model to the public GSM8K and MATH questions, or the first step of a public
RL rollout. The completions of another model, or the prompt's other samples, predict them. Orders: longest
kinds first where sampling says that it saves (`KindOrder`, the order that ``run`` uses; the kinds are four
random ones, quarters of the predictions, and quarters of a noisy oracle with the predictor's correlation),
longest prediction first, longest oracle first, and longest first by the true lengths. A number is the mean
change of the makespan against file order, in percent, over shuffled files.

Run: ``python benchmarks/unknown_orders.py`` (``BATCHBOUND_DATA`` names the folder of public data).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.queues.admission import Admission
from batchbound.heuristics.queues.ordered import Ordered
from batchbound.heuristics.queues.prefill_rules import PrefillFirst
from batchbound.heuristics.queues.queue_policy import Queue, QueuePolicy
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.unknown_lengths.kinds import KindOrder

DATA = Path(os.environ.get("BATCHBOUND_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
FILES = ("gsm8k_models", "math_level5_models")
ROLLOUTS = ("dapo_qwen32b", "deepcoder14b", "video_qwen7b")
PROMPT_TOKENS = 50
COST = CostModel(prefill_base=0.02, prefill_per_token=0.0005, decode_base=0.03, decode_per_slot=0.001)
COLUMNS = ("random kinds", "predicted kinds", "oracle kinds", "prediction", "oracle", "true lengths")


def jobs(requests: int) -> Iterator[tuple[str, IntArray, FloatArray]]:
    """Yield each job's name, true lengths and predicted lengths, in tokens."""
    for file in FILES:
        table = pd.read_csv(DATA / "rollouts" / f"{file}.csv")
        lengths = table.pivot_table(index="session_id", columns="model", values="output_tokens").dropna()
        models = sorted(lengths.columns)
        for model, predictor in zip(models[::3], models[1::3], strict=False):
            true = lengths[model].to_numpy()[:requests].astype(np.int64)
            yield f"{file.split('_')[0]}, {model}", true, lengths[predictor].to_numpy()[:requests]
    for file in ROLLOUTS:
        table = pd.read_csv(DATA / "rollouts" / f"{file}.csv")
        step = table[table["step"] == table["step"].min()][:requests]
        true = step["output_tokens"].to_numpy(dtype=np.int64)
        group = step.groupby("group")["output_tokens"]
        total, count = (group.transform(name).to_numpy(dtype=np.float64) for name in ("sum", "size"))
        yield f"{file.split('_')[0]}, first step", true, (total - true + true.mean()) / count


def changes(true: IntArray, predicted: FloatArray, slots: int, rng: np.random.Generator) -> dict[str, float]:
    """Return the change of the makespan by each order of a shuffled file, in percent of file order's."""
    shuffled = rng.permutation(len(true))
    true, predicted, cap = true[shuffled], predicted[shuffled], int(true.max())
    workload = Workload.from_lengths(
        input_tokens=[PROMPT_TOKENS] * len(true), output_tokens=[cap] * len(true)
    )
    problem = Problem(workload, COST, slots=slots, prefill_emits_first_token=True)

    def makespan(queue: Queue) -> float:
        policy = QueuePolicy(queue, PrefillFirst(), Admission(problem))
        return float(simulate(problem, policy, true).makespan)

    file = np.arange(len(true))
    noisy = oracle(true, predicted, rng)
    kinds = (rng.integers(0, 4, len(true)), quarters(predicted), quarters(noisy))
    queues: list[Queue] = [KindOrder(problem, file, kind, np.full(len(true), cap)) for kind in kinds]
    queues += [Ordered(np.argsort(-lengths, kind="stable")) for lengths in (predicted, noisy, true)]
    base = makespan(Ordered(file))
    return {name: 100 * (makespan(queue) / base - 1) for name, queue in zip(COLUMNS, queues, strict=True)}


def oracle(true: IntArray, predicted: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return true log lengths with noise that gives the predictions' correlation."""
    logs = np.log(true)
    correlation = np.corrcoef(logs, np.log(predicted))[0, 1]
    scaled = (logs - logs.mean()) / logs.std()
    noisy: FloatArray = correlation * scaled + np.sqrt(1 - correlation**2) * rng.standard_normal(len(true))
    return noisy


def quarters(values: FloatArray) -> IntArray:
    """Return the quarter of the values in which each lies, from 0."""
    return np.searchsorted(np.quantile(values, [0.25, 0.5, 0.75]), values)


def main() -> None:
    """Print the mean changes of each job and number of slots."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--orders", type=int, default=5, help="shuffled files of each job")
    asked = parser.parse_args()
    print("job | slots |", " | ".join(COLUMNS))
    for name, true, predicted in jobs(asked.requests):
        for slots in asked.slots:
            found = [changes(true, predicted, slots, np.random.default_rng(k)) for k in range(asked.orders)]
            means = [np.mean([one[column] for one in found]) for column in COLUMNS]
            print(f"{name} | {slots} |", " | ".join(f"{mean:+.2f}" for mean in means), flush=True)


if __name__ == "__main__":
    main()
