"""
Policies that know no length on real rollouts: how far above the clairvoyant bound, and what they recover.

Each step of each trace is a job of its own, all there at the start, on the hybrid paper's costs; each of the
models whose completions of GSM8K and MATH are known is a job, too, with the other models' completions as its
history. A policy sees one token in the place of each length. Its loss is its makespan above the bound of the
step with all lengths known; ``recovered`` is the share of first come, first served's loss that it does not
have, ``worst`` the largest makespan beside that of first come, first served on any step.

One step is one draw of luck: on a step whose longest request happens to stand first, nothing beats arrival's
order. ``--orders N`` serves each step in N orders, the file's and others of the same groups or prompts, which
says what a policy is worth apart from luck.

``--several`` serves the steps of a trace one after another, each group's prompt computed once: with a
barrier, with partial rollouts that go on, with RollPacker's decode steps, with the first k of n completions.
``--intervals`` says on how many steps the 90 % interval holds that the other steps of a trace give, or the
other models' completions. ``--drawn N`` does so on drawn traces. ``--moves N`` moves KV caches in N drawn
jobs of each share of completions that are cut at a cap.

Run: ``python benchmarks/rollouts.py --orders 3 --several --intervals --json rollouts.json --picture
rollouts.png`` (``BATCHBOUND_DATA`` names the folder of public data); prints a table.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from group_orders import ORDERS
from scipy.special import ndtri
from scipy.stats import chi2

from batchbound.data.arrays import IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.kept_beginnings import usual_prefix_cache
from batchbound.data.lengths.interval import Interval
from batchbound.data.lengths.steps import BARRIER, Way
from batchbound.data.problem import Problem
from batchbound.data.workload import COLUMNS, Workload
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.unknown_lengths import learned
from batchbound.heuristics.unknown_lengths.agreement import prompt_scores
from batchbound.heuristics.unknown_lengths.groups import has_groups
from batchbound.heuristics.unknown_lengths.lengths import NOTHING, Known
from batchbound.heuristics.unknown_lengths.registry import hidden_policy, without_lengths
from batchbound.hidden_lengths import (
    drawn_makespans,
    simulate_hidden,
)
from batchbound.models.bounds.makespan import best_bound
from batchbound.planning.history import History
from batchbound.planning.step_changes import simulate_hidden_steps

DATA = Path(os.environ.get("BATCHBOUND_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))

SWAP = 1.6e-5
"""Seconds a token of KV cache takes to the host or back: a quarter of a megabyte at 16 GB/s."""

BASELINE = "fcfs"
HIDDEN = ("fcfs-ski", "learned")
MOVING = "learned, KV moved"
CLAIRVOYANT = "lengths known"
"""Longest first with the ski-rental rule: how near the bound a simple rule comes that knows all lengths."""


@dataclass(frozen=True, slots=True)
class Step:
    """One job: its requests with their true lengths, and what is known of them beforehand."""

    name: str
    workload: Workload
    known: Known = NOTHING

    def shuffled(self, seed: int) -> Step:
        """Return the step with its groups, and the requests of each, in another order; 0 for the file's."""
        if not seed:
            return self
        rng = np.random.default_rng(seed)
        group = self.workload.group
        names = rng.permutation(np.unique(group))
        order = np.concatenate([rng.permutation(np.flatnonzero(group == name)) for name in names])
        return replace(self, workload=self.workload.select(order))


def trace_steps(name: str, longest: int) -> list[Step]:
    """Return the steps of a trace of rollouts, in the file's order."""
    with (DATA / "rollouts" / f"{name}.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    found = []
    for step in dict.fromkeys(row["step"] for row in rows):
        mine = [row for row in rows if row["step"] == step]
        number = {group: k for k, group in enumerate(dict.fromkeys(row["group"] for row in mine))}
        workload = Workload(
            np.array([row["id"] for row in mine]),
            np.array([int(row["input_tokens"]) for row in mine]),
            np.array([int(row["output_tokens"]) for row in mine]),
            group=np.array([number[row["group"]] for row in mine]),
        )
        found.append(Step(step, workload, Known(longest=longest)))
    return found


def model_steps(name: str) -> list[Step]:
    """Return a step for each model, with what the other models' completions agree on as history."""
    with (DATA / "rollouts" / f"{name}.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    prompts = {prompt: k for k, prompt in enumerate(dict.fromkeys(row["session_id"] for row in rows))}
    models = {model: k for k, model in enumerate(dict.fromkeys(row["model"] for row in rows))}
    tokens = np.full((len(models), len(prompts)), np.nan)
    inputs = np.zeros(len(prompts), dtype=np.int64)
    for row in rows:
        at = prompts[row["session_id"]]
        tokens[models[row["model"]], at] = max(1, int(row["output_tokens"]))
        inputs[at] = int(row["prompt_tokens"])
    found = []
    for model, k in models.items():
        has = np.flatnonzero(~np.isnan(tokens[k]))
        others = prompt_scores(np.delete(tokens[:, has], k, axis=0), inputs[has].astype(float))
        workload = Workload(
            np.array([str(prompt) for prompt in has]),
            inputs[has],
            tokens[k, has].astype(np.int64),
            group=np.arange(len(has)),
        )
        found.append(Step(model, workload, Known(score=others)))
    return found


DATASETS: Mapping[str, tuple[int, Callable[[], list[Step]]]] = {
    "deepcoder": (32, lambda: trace_steps("deepcoder14b", 16_000)),
    "dapo": (64, lambda: trace_steps("dapo_qwen32b", 20_480)),
    "video": (64, lambda: trace_steps("video_qwen7b", 16_000)),
    "gsm8k": (64, lambda: model_steps("gsm8k_models")),
    "math": (64, lambda: model_steps("math_level5_models")),
}
"""Each data set's slots, and what reads its steps."""

TRACES = ("deepcoder", "dapo", "video")
"""Those of several steps of one training run."""


ROUNDING = 1e-9
"""A loss that is none: sums of the same seconds in another order."""


def losses(step: Step, slots: int) -> dict[str, float]:
    """Return each policy's loss on a step, as a share of the bound."""
    problem = Problem(step.workload, CostModel.paper(), slots)
    bound = best_bound(problem).seconds
    blind, truth = without_lengths(problem), problem.workload.output_tokens
    found = {}
    for name in (BASELINE, *HIDDEN):
        found[name] = simulate(blind, hidden_policy(name, blind, step.known), truth).makespan
    for name, order in ORDERS.items():
        found[name] = simulate(blind, order(blind), truth).makespan
    if has_groups(blind):
        moving = hidden_policy("learned", blind, step.known, SWAP)
        found[MOVING] = simulate(blind, moving, truth, swap=SWAP).makespan
    else:
        # Nothing is moved.
        found[MOVING] = found["learned"]
    found[CLAIRVOYANT] = simulate(problem, policy_named("lpt-ski", problem)).makespan
    return {name: seconds / bound - 1 for name, seconds in found.items()}


def summary(loss: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """
    Return what each policy comes to over steps.

    Returns
    -------
    dict
        By policy: ``loss``, its mean; ``recovered``, the share of the baseline's that it does not have (None
        of no loss); ``worst``, the largest makespan beside the baseline's, as a share above it; ``worse``,
        the share of steps on which it is more than 0.5 % above; ``best``, its mean makespan beside the least
        of all that know no length.
    """
    base = np.array([step[BASELINE] for step in loss])
    lost = base.mean() > ROUNDING
    found: dict[str, dict[str, float | None]] = {}
    least = min(np.mean([step[name] for step in loss]) for name in loss[0] if name != CLAIRVOYANT)
    for name in loss[0]:
        mine = np.array([step[name] for step in loss])
        beside = (1 + mine) / (1 + base) - 1
        found[name] = {
            "loss": round(float(mine.mean()), 4),
            "recovered": round(float(1 - mine.mean() / base.mean()), 4) if lost else None,
            "worst": round(float(beside.max()), 4),
            "worse": round(float((beside > 0.005).mean()), 4),
            "best": round(float((1 + mine.mean()) / (1 + least) - 1), 4),
        }
    return found


def evaluated(name: str, orders: int, most: int | None) -> dict[str, Any]:
    """Return the losses on the steps of a data set, in several orders, and what they come to."""
    slots, read = DATASETS[name]
    steps = read()[:most]
    rows = {
        f"{step.name}/{order}": losses(step.shuffled(order), slots)
        for step in steps
        for order in range(orders)
    }
    given = [row for key, row in rows.items() if key.endswith("/0")]
    rounded = {key: {policy: round(value, 4) for policy, value in row.items()} for key, row in rows.items()}
    found: dict[str, Any] = {"slots": slots, "given order": summary(given), "steps": rounded}
    if len(given) < len(rows):
        found["all orders"] = summary(list(rows.values()))
    return found


WAYS: Mapping[str, tuple[str, Way]] = {
    "fcfs, barrier": ("fcfs", BARRIER),
    "fcfs-ski, barrier": ("fcfs-ski", BARRIER),
    "learned, barrier": ("learned", BARRIER),
    "APRIL: a third ahead, KV computed anew": ("fcfs", Way(ahead=1 / 3)),
    "RollPacker: a quarter ahead, restarts": ("fcfs", Way(ahead=0.25, restart=True)),
    "learned, goes on, KV computed anew": ("learned", Way(ahead=1 / 3)),
    "learned, goes on, KV kept": ("learned", Way(ahead=1 / 3, keep_kv=True)),
    "learned, 7 of 8": ("learned", Way(keep=7)),
    "learned, 7 of 8, goes on, KV kept": ("learned", Way(ahead=1 / 3, keep=7, keep_kv=True)),
}
"""Ways to serve several steps: a policy, and when a step ends."""


def joined_steps(steps: Sequence[Workload]) -> tuple[Workload, IntArray]:
    """Return the requests of several steps as one workload, and the step of each."""
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(step, name) for step in steps]) for name in COLUMNS
    }
    groups, first = [], 0
    for step in steps:
        numbers = step.group_numbers()
        groups.append(numbers + first)
        first += int(numbers.max()) + 1
    columns["group"] = np.concatenate(groups)
    return Workload(**columns), np.repeat(np.arange(len(steps)), [len(step) for step in steps])


def several(name: str, most: int | None) -> dict[str, dict[str, float]]:
    """Return what the steps of a trace come to, one after another, in each way."""
    slots, read = DATASETS[name]
    chosen = read()[:most]
    workload, step = joined_steps([one.workload for one in chosen])
    shared = workload.with_shared_prompts()
    kept = usual_prefix_cache(shared, slots)
    problem = Problem(shared, CostModel.paper(), slots, prefix_cache=kept)
    truth = workload.output_tokens
    found: dict[str, dict[str, float]] = {}
    barrier = np.zeros(0)
    for label, (policy, way) in WAYS.items():
        ran = simulate_hidden_steps(problem, step, way, policy, chosen[0].known)
        barrier = ran.seconds if not found else barrier
        found[label] = {
            "seconds": round(ran.makespan, 1),
            "of_barrier": round(ran.makespan / found["fcfs, barrier"]["seconds"], 3) if found else 1.0,
            # A last step has no next in which what is left could go on; 0 where the steps are others.
            "but_last": round(float(ran.seconds[:-1].sum() / barrier[:-1].sum()), 3)
            if 1 < len(ran.seconds) == len(barrier)
            else 0.0,
            "stale_share": round(ran.stale_share, 4),
            "staleness": round(ran.staleness, 4),
            "kept_bias": round(ran.kept_bias(truth), 4),
            "early_bias": round(ran.early_bias(truth), 4),
            "lost_tokens": ran.lost,
        }
    return found


def intervals(name: str, policy: str, orders: int, most: int | None) -> dict[str, Any]:
    """
    Return on how many steps, in several orders each, the interval holds that the other steps give.

    ``score`` is the root of the mean square of what came out, each step in the file's order as a normal
    score among the makespans drawn for it: 1 if intervals are as wide as they should be, less if they are
    too wide. ``scores`` are the limits within which it is by chance 9 times in 10, with so many steps.
    """
    slots, read = DATASETS[name]
    steps = read()
    held, rows, scores = [], {}, []
    for at, step in enumerate(steps[:most]):
        history = History(tuple(other.workload for other in steps[:at] + steps[at + 1 :]))
        problem = Problem(step.workload, CostModel.paper(), slots)
        drawn = np.sort(list(drawn_makespans(problem, history, policy, step.known.longest)))
        expected = Interval.of(drawn.tolist())
        for order in range(orders):
            served = Problem(step.shuffled(order).workload, CostModel.paper(), slots)
            known = history.known(served, step.known.longest)
            seconds = simulate_hidden(served, policy, known).makespan
            held.append(expected.low <= seconds <= expected.high)
            rows[f"{step.name}/{order}"] = [round(each, 1) for each in (expected.low, seconds, expected.high)]
            if not order:
                rank = (np.searchsorted(drawn, seconds) + np.searchsorted(drawn, seconds, side="right")) / 2
                scores.append(float(ndtri((rank + 0.5) / (len(drawn) + 1))))
    return {
        "held": int(np.sum(held)),
        "of": len(held),
        "score": round(float(np.sqrt(np.mean(np.square(scores)))), 2),
        "scores": [round(float(np.sqrt(chi2.ppf(p, len(scores)) / len(scores))), 2) for p in (0.05, 0.95)],
        "low, seconds, high": rows,
    }


KINDS: Mapping[str, Mapping[str, float]] = {
    "plain": {"groups": 32, "samples": 4, "apart": 0.1, "alike": 0.1, "spread": 0.4, "cap": 16_000},
    "alike": {"groups": 16, "samples": 8, "apart": 0.15, "alike": 0.9, "spread": 0.7, "cap": 1_500},
    "runaways": {
        "groups": 32,
        "samples": 8,
        "apart": 0.03,
        "alike": 0.1,
        "spread": 0.3,
        "runaway": 0.003,
        "cap": 16_000,
    },
    "wide": {"groups": 32, "samples": 8, "apart": 0.0, "alike": 0.05, "spread": 1.0, "cap": 20_000},
    "steps apart": {"groups": 32, "samples": 4, "apart": 0.4, "alike": 0.3, "spread": 0.6, "cap": 16_000},
}
"""Kinds of drawn traces: how far steps lie apart (log), groups' share of the variance, its root (log)."""

EARLIER = (1, 2, 4, 8)
"""Earlier steps of drawn traces."""


def drawn_step(kind: Mapping[str, float], rng: np.random.Generator) -> Workload:
    """Return a step of a drawn trace; runaways are Pareto distributed with an exponent of 0.8."""
    group = np.repeat(np.arange(int(kind["groups"])), int(kind["samples"]))
    score = np.sqrt(kind["alike"]) * rng.standard_normal(int(kind["groups"]))[group]
    score += np.sqrt(1 - kind["alike"]) * rng.standard_normal(len(group))
    lengths = np.exp(5.5 + kind["apart"] * rng.standard_normal() + kind["spread"] * score)
    lost = rng.random(len(group)) < kind.get("runaway", 0.0)
    lengths[lost] = np.exp(5.5 + kind["spread"]) * (1 - rng.random(int(lost.sum()))) ** -1.25
    lengths = np.clip(np.rint(lengths), 1, kind["cap"]).astype(np.int64)
    names = np.array([f"{rng.integers(2**62)}-{k}" for k in range(len(group))])
    return Workload(names, np.full(len(group), 50), lengths, group=group)


def drawn_intervals(times: int, numbers: Sequence[int]) -> dict[str, dict[str, int]]:
    """Return on how many of so many drawn traces of each kind the interval holds, by earlier steps."""
    found: dict[str, dict[str, int]] = {}
    for name, kind in KINDS.items():
        found[name] = {}
        for earlier in numbers:
            held = 0
            for seed in range(times):
                rng = np.random.default_rng([seed, earlier])
                steps = [drawn_step(kind, rng) for _ in range(earlier + 1)]
                problem = Problem(steps[-1], CostModel.paper(), 16)
                history = History(tuple(steps[:-1]))
                drawn = list(drawn_makespans(problem, history, "fcfs-ski", int(kind["cap"]), seed=seed))
                expected = Interval.of(drawn)
                held += expected.low <= simulate_hidden(problem, "fcfs-ski").makespan <= expected.high
            found[name][str(earlier)] = held
    return found


CUT = (0.16, 0.07, 0.02, 0.001)
"""Shares of the completions of drawn jobs that are cut at the cap."""


def drawn_moves(times: int) -> dict[str, dict[str, float]]:
    """Return drawn jobs' time with KV caches moved beside that without, as we do and whatever is cut."""
    found = {}
    for alike, cut in ((alike, cut) for alike in (0.4, 0.85) for cut in CUT):
        cap = float(np.exp(5.5 + 0.7 * ndtri(1 - cut)))
        kind = {"groups": 16, "samples": 8, "apart": 0.0, "alike": alike, "spread": 0.7, "cap": cap}
        rows = []
        for seed in range(times):
            step = drawn_step(kind, np.random.default_rng([seed, round(1000 * cut)]))
            problem = Problem(step, CostModel.paper(), 32)
            known = Known(longest=int(cap))
            stay = simulate_hidden(problem, "learned", known).makespan
            ours = simulate_hidden(problem, "learned", known, SWAP).makespan
            with patch.object(learned, "LEAST_CUT", 0.0):
                always = simulate_hidden(problem, "learned", known, SWAP).makespan
            rows.append((ours / stay - 1, always / stay - 1))
        ours, always = np.mean(rows, axis=0).round(4).tolist()
        found[f"ICC {alike}, {cut:.1%} cut"] = {"ours": ours, "always": always}
    return found


def several_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return a line for each way to serve several steps."""
    lines = [
        "| | of FCFS's time | but the last step | stale | kept longer by | tokens lost |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {label} | {row['of_barrier']:.3f} | {row['but_last'] or '-'} |"
        f" {row['stale_share']:.1%} | {row['kept_bias']:+.1%} | {row['lost_tokens']:,} |"
        for label, row in found.items()
    ]
    return "\n".join(lines)


def table(report: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each policy: what it recovers, its worst step, how many are worse."""
    kinds = [
        (data, kind) for data, row in report.items() for kind in ("given order", "all orders") if kind in row
    ]
    lines = [
        "| | " + " | ".join(f"{data}, {kind}" for data, kind in kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    cells: dict[str, list[str]] = {}
    for data, kind in kinds:
        for policy, row in report[data][kind].items():
            recovered = "none lost" if row["recovered"] is None else f"{row['recovered']:.0%}"
            text = (
                f"{row['loss']:.1%}"
                if policy == BASELINE
                else f"{recovered} ({row['worst']:+.1%}, {row['worse']:.0%})"
            )
            cells.setdefault(policy, []).append(text)
    return "\n".join([*lines, *(f"| {policy} | " + " | ".join(row) + " |" for policy, row in cells.items())])


def draw(report: Mapping[str, Mapping[str, Any]], path: str) -> None:
    """Draw each policy's mean loss on each data set."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(report), figsize=(2.6 * len(report) + 1.5, 3.2), squeeze=False)
    for axis, (data, row) in zip(axes[0], report.items(), strict=True):
        means = row.get("all orders", row["given order"])
        names = list(means)[::-1]
        values = [100 * means[name]["loss"] for name in names]
        colours = ["#2a6f97" if name.startswith("learned") else "#b0b7bd" for name in names]
        axis.barh(names, values, color=colours)
        axis.set_title(data)
        axis.set_xlabel("% above the bound")
        if axis is not axes[0][0]:
            axis.set_yticks([])
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Print the table of every policy on every data set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1] if __doc__ else None)
    parser.add_argument("--data", nargs="*", choices=list(DATASETS), default=list(DATASETS))
    parser.add_argument("--orders", type=int, default=1, help="of each step (default %(default)s)")
    parser.add_argument("--most", type=int, help="steps of each data set, at most (default: all)")
    parser.add_argument("--several", action="store_true", help="also serve all steps of a trace in a row")
    parser.add_argument("--intervals", action="store_true", help="also hold intervals against what came out")
    parser.add_argument(
        "--interval-policy", default="learned", choices=HIDDEN, help="whose time (default %(default)s)"
    )
    parser.add_argument(
        "--drawn", type=int, default=0, metavar="N", help="also hold intervals against N drawn traces a kind"
    )
    parser.add_argument(
        "--earlier",
        type=int,
        nargs="+",
        default=EARLIER,
        metavar="N",
        help="steps those know (default 1 2 4 8)",
    )
    parser.add_argument(
        "--moves", type=int, default=0, metavar="N", help="also move the KV caches of N drawn jobs a kind"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--picture", metavar="FILE", help="draw the mean losses")
    args = parser.parse_args()
    report = {}
    for name in args.data:
        report[name] = evaluated(name, args.orders, args.most)
        if args.several and name in TRACES:
            report[name]["several"] = several(name, args.most)
        if args.intervals:
            orders = args.orders if name in TRACES else 1
            report[name]["intervals"] = intervals(name, args.interval_policy, orders, args.most)
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1))
    print(table(report))
    for name, row in report.items():
        if "several" in row:
            print(f"\n{name}, steps in a row:\n\n{several_table(row['several'])}")
        if "intervals" in row:
            held, count = row["intervals"]["held"], row["intervals"]["of"]
            print(f"\n{name}: the 90 % interval of {args.interval_policy} holds on {held} of {count}")
            low, high = row["intervals"]["scores"]
            print(f"scores of what came out: {row['intervals']['score']}, by chance {low} to {high} around 1")
    for kind, row in drawn_intervals(args.drawn, args.earlier).items() if args.drawn else ():
        held = ", ".join(f"{count} of {args.drawn} after {earlier}" for earlier, count in row.items())
        print(f"{kind}: the interval holds on {held} steps")
    for kind, row in drawn_moves(args.moves).items() if args.moves else ():
        print(f"{kind}: moves take {row['ours']:+.1%} of the time, {row['always']:+.1%} whatever is cut")
    if args.picture:
        draw(report, args.picture)


if __name__ == "__main__":
    main()
