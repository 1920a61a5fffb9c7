"""The benchmarks that the docs show run to their end: as shown, with what is large in them made small."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from public_data import public_data
from test_docs import BENCHMARKS, ROOT

SMALL: dict[str, str] = {
    "answers_picture.py": "picture.png --seconds 0.2",
    "baton_lengths.py": "--seeds 1",
    "bound_or_schedule.py": "--requests 6 --slots 2 --seeds 1 --seconds 0.1",
    "econoserve": "--minutes 0.05 --traces alpaca --seeds 1 --steps 1 --seconds 0.2",
    "exegpt.py": "--requests 0 --tasks S --devices 1",
    "exegpt_figures.py": "--machine opt-13b --trace mine=lengths.csv",
    "fleet.py": "--requests 200 --seeds 1",
    "gsm8k.py": "--time-limit 0.2",
    "kv_capacity.py": "--requests 60 --capacity 30000 --slots 16 --time-limit 0.2",
    "lawrinenko.py": "--seconds 0.2 --items 40",
    "mico.py": "--draws 1",
    "plan_grid.py": "--seconds 0.1 --requests 30 --slots 4",
    "progress.py": "--runs 1 --requests 12 --slots 4",
    "rollouts.py": "--data dapo --most 1",
    "rollouts_plan.py": "--seconds 0.1 --every 4",
    "roofline_error.py": "",
    "schedule_search.py": "--case small-10x3 --seeds 1 --seconds 0.1",
    "table3.py": "--seeds 1 --plan 0.1",
    "tiny_instances.py": "--instances 5",
    "uncertain.py": "--seeds 1 --time-limit 0.1 --only 0.2",
}
"""What each script's own options make small: a minute and a half of CPU time in all."""

ELSEWHERE = {
    "attack": "test_attack.py",
    "engine_peers.py": "test_engine_peers.py",
    "gpu_day.py": "test_gpu_day.py",
}
NOT_RUN = {
    "backends.py": "run by hand: 28 CPU seconds at its smallest (--seconds 0.5)",
    "baton.py": "run by hand: 25 CPU seconds a command at its smallest (--scale-short 0.05)",
    "engine_speed.py": "run by hand: 22 CPU seconds at its smallest (--workload 0 --only ragged window)",
    "exegpt_run.py": "run by hand: 55 CPU seconds at its smallest (--scale 0.05 --requests 200)",
    "exegpt_study.py": "run by hand: 120 CPU seconds a command on the smallest profiles",
    "gpu_decode.py": "is for a GPU; gpu_day.py runs its parts",
    "econoserve/kv_pipelining.py": "run by hand: 24 CPU seconds at its smallest (--requests 8)",
    "predictors.py": "run by hand: 8 CPU seconds at its smallest, training",
    "train_speller.py": "run by hand: 10 CPU seconds at its smallest; test_speller.py scores what it made",
    "earlier_search.py": "needs a checkout of an earlier commit",
    "server_orders.py": "starts vLLM",
    "mutation_score.py": "runs the tests of the judges, for minutes a judge",
    "judge_rules.py": "runs the tests of the judges, for minutes a judge",
}
STANDS_FOR = {
    "PROFILES": "PROFILE_TP1 PROFILE_TP2",
    "PROFILE_TP1": "PUBLIC/layer_profiles/RTX4090-Toy-tp1",
    "PROFILE_TP2": "PUBLIC/layer_profiles/RTX4090-Toy-tp2",
    "FILE": "PUBLIC/aiconfigurator/measured_points.csv",
    "mine=lengths.csv": "mine=PUBLIC/lengths.csv",
}


def merged(shown: str, small: str) -> str:
    """Return a command whose options are replaced by those of the small setting, where both have one."""
    ours = set(re.findall(r"--[a-z-]+", small))
    groups = re.split(r" (?=--)", shown)
    return " ".join([*(group for group in groups if group.split()[0] not in ours), small]).strip()


def made_small() -> list[str]:
    """Return each command of the docs with its script's small setting, and bare scripts that none shows."""
    shown = [command.removeprefix("benchmarks/") for command in BENCHMARKS]
    shown += sorted(SMALL.keys() - {command.split()[0] for command in shown})
    return sorted({merged(command, SMALL.get(command.split()[0], "")) for command in shown})


COMMANDS = [each for each in made_small() if each.split()[0] in SMALL]


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = public_data(tmp_path_factory.mktemp("public"))
    rows = "".join(f"{k},{20 + k},{5 + 3 * k % 40}\n" for k in range(60))
    (folder / "lengths.csv").write_text(f"id,input_tokens,output_tokens\n{rows}", encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_runs_to_its_end(command: str, public: Path, tmp_path: Path) -> None:
    script, *words = shlex.split(command)
    for name, value in STANDS_FOR.items():
        words = [part for word in words for part in (value.split() if word == name else [word])]
    words = [word.replace("PUBLIC", str(public)) for word in words]
    environment = os.environ | {
        "BATCHBOUND_DATA": str(public),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d", done.stdout), "it prints no figure"


def test_every_benchmark_is_run_somewhere() -> None:
    benchmarks = ROOT / "benchmarks"
    found = [file for file in benchmarks.rglob("*.py") if "__main__" in file.read_text(encoding="utf-8")]
    scripts = {str(file.relative_to(benchmarks)).removesuffix("/__main__.py") for file in found}
    assert scripts == SMALL.keys() | ELSEWHERE.keys() | NOT_RUN.keys()
    assert all((ROOT / "tests" / "benchmarks" / name).exists() for name in ELSEWHERE.values())
