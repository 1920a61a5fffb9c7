"""The benchmarks that the docs show run to their end: as shown, with what is large in them made small."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from public_data import public_data
from scripts import ended
from test_docs import BENCHMARKS, NEEDS, ROOT
from vllm_server import save_tiny_llama

SMALL: dict[str, str] = {
    "ablation.py": "--cells 1 --requests 30 --slots 4 --seconds 0.1 --regimes paper",
    "answers_picture.py": "picture.png --seconds 0.2",
    "backends.py": "--share 0.05 --seconds 0.2 --backends highs ortools-cp-sat",
    "baton.py": "--small --set free mixed --slots 2 --scale-short 0.02 --scale-mixed 0.0005 --tries 3"
    " --repeats 1",
    "baton_lengths.py": "--seeds 1 --tries 500",
    "deployments.py": "",
    "econoserve": "--minutes 0.05 --traces alpaca --seeds 1 --steps 1 --seconds 0.2 --queued 200",
    "econoserve/kv_pipelining.py": "--requests 4 --slots 4 --blocks 16",
    "engine_speed.py": "--small --workload 0 --requests 8 --slots 4 --repeats 1",
    "evaluation_engines.py": "--model tiny:speller --questions 4 --max-tokens 8 --slots 2 --batches 1"
    " --examples? 1 --samples? 2",
    "exegpt/exegpt_searches.py": "--requests 0 --tasks S --devices 1",
    "exegpt/exegpt_study.py": "--task S --points 1 --devices 2",
    "exegpt/exegpt_run.py": "--scale 0.05 --requests 60 --points 2 2 --passes 1 --repeats 1",
    "exegpt/exegpt_figures.py": "--machine opt-13b --trace mine=lengths.csv",
    "fleet.py": "--requests 200 --seeds 1",
    "gsm8k.py": "--slots 4 --time-limit 0.2",
    "instance_library.py": "--suites paper --seconds 0.1 --folder library",
    "judge_rules.py": "",
    "kv_capacity.py": "--requests 60 --capacity 30000 --slots 16 --time-limit 0.2",
    "lawrinenko.py": "--seconds 0.2 --items 40",
    "mico.py": "--draws 1 --largest 3",
    "mooncake_batch.py": "--requests 300 --kv-tokens 400000",
    "mutation_score.py": "--every 40",
    "plan_grid.py": "--seconds 0.1 --requests 30 --slots 4",
    "predictors.py": "--epochs 1",
    "prefix_orders.py": "--jobs 2",
    "progress.py": "--runs 1 --requests 12 --slots 4",
    "rollout_limits.py": "--data dapo --most 1 --draws 1",
    "rollouts.py": "--data dapo --most 1 --orders 1 --drawn? 1 --earlier 1 --moves? 1",
    "rollouts_plan.py": "--seconds 0.1 --every 4",
    "roofline_error.py": "",
    "server_beginnings.py": "--vllm vllm --scale 0.1 --kinds documents --parts 1 --tidy 1 --ways file auto",
    "server_clients.py": "--rows 60 --slots 4",
    "server_orders.py": "--jobs 1 --repeats 1",
    "small_jobs.py": "--instances 3 --seconds 0.1",
    "stage_seconds.py": "--jobs gsm8k --turns 1",
    "table3.py": "--seeds 1 --plan 0.1",
    "tiny_completions.py": "--jobs 5",
    "tiny_instances.py": "--instances 5",
    "tiny_trees.py": "--jobs 5",
    "train_speller.py": "--steps 3 --each 1 -o speller.safetensors",
    "trl_rounding.py": "--hidden 32 --layers 1",
    "two_runs.py": "--model tiny:speller --prompts 4 --cap 6 --slots 2",
    "uncertain.py": "--seeds 1 --time-limit 0.1 --only 0.2",
}
"""What each script's own options make small; one with a question mark only where it is shown."""

ELSEWHERE = {
    "arena.py": "test_arena.py",
    "attack": "test_attack.py",
    "beginning_peers.py": "test_beginning_peers.py",
    "engine_peers.py": "test_engine_peers.py",
    "gpu_day.py": "test_gpu_day.py",
    "lm_eval_seconds.py": "test_lm_eval_seconds.py",
    "rollout_peers.py": "test_rollout_peers.py",
    "server_configurations.py": "test_server_configurations.py",
}
OF_TESTS = ("judge_rules.py", "mutation_score.py")
"""Run tests, in the repository's folder: pytest wants nothing imported before it."""
STANDS_FOR = {
    "PROFILES": "PROFILE_TP1 PROFILE_TP2",
    "PROFILE_TP1": "PUBLIC/layer_profiles/RTX4090-Toy-tp1",
    "PROFILE_TP2": "PUBLIC/layer_profiles/RTX4090-Toy-tp2",
    "FOLDER": "PUBLIC",
    "FILE": "PUBLIC/aiconfigurator/measured_points.csv",
    "mine=lengths.csv": "mine=PUBLIC/lengths.csv",
    "vllm": "VLLM",
    "SmolLM2": "PUBLIC/model",
}


def merged(shown: str, small: str) -> str:
    """Return a command whose options are replaced by those of the small setting, where both have one."""
    groups, smaller = re.split(r" (?=--)", shown), re.split(r" (?=--)", small)
    options = {group.split()[0] for group in groups}
    smaller = [
        each.replace("? ", " ") for each in smaller if "?" not in each or each.split("?")[0] in options
    ]
    ours = {each.split()[0] for each in smaller if each}
    return " ".join([*(group for group in groups if group.split()[0] not in ours), *smaller]).strip()


def made_small() -> list[str]:
    """Return each command of the docs with its script's small setting, and bare scripts that none shows."""
    shown = [command.removeprefix("benchmarks/") for command in BENCHMARKS]
    shown += sorted(SMALL.keys() - {command.split()[0] for command in shown})
    small = {merged(command, SMALL.get(command.split()[0], "")) for command in shown}
    # Another seed or a picture takes no other path through the rest: the longer of two such is run.
    longest = {re.sub(r" --(seed|picture|figure) \S+", "", each): each for each in sorted(small, key=len)}
    return sorted(longest.values())


COMMANDS = [each for each in made_small() if each.split()[0] in SMALL]
assert COMMANDS
RUN_HERE = {f"benchmarks/{name}" for name in SMALL}


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = public_data(tmp_path_factory.mktemp("public"))
    rows = "".join(f"{k},{20 + k},{5 + 3 * k % 40}\n" for k in range(60))
    save_tiny_llama(folder / "model")
    (folder / "lengths.csv").write_text(f"id,input_tokens,output_tokens\n{rows}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """vLLM where it is installed, else what listens and logs as it does."""
    program = tmp_path_factory.mktemp("vllm") / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/fake_vllm.py" "$@"\n', "utf-8")
    program.chmod(0o755)
    return os.environ.get("VLLM") or shutil.which("vllm") or str(program)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_benchmark_runs_to_its_end(command: str, public: Path, vllm: str, tmp_path: Path) -> None:
    script, *words = shlex.split(command)
    if find_spec(NEEDS.get(script, "batchbound")) is None:
        pytest.skip(f"needs {NEEDS[script]}")
    for name, value in STANDS_FOR.items():
        words = [part for word in words for part in (value.split() if word == name else [word])]
    words = [word.replace("PUBLIC", str(public)).replace("VLLM", vllm) for word in words]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"BATCHBOUND_DATA": str(public), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    begun = ROOT / "benchmarks" / script
    if script in OF_TESTS:
        again = [sys.executable, str(begun), *words]
        done = subprocess.run(again, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    else:
        done = ended(begun, words, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d", done.stdout), "it prints no figure"


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted({command.split()[0] for command in BENCHMARKS} - RUN_HERE))
def test_every_benchmark_that_is_not_run_here_knows_the_options_shown(script: str, tmp_path: Path) -> None:
    told = ended(ROOT / script, ["--help"], tmp_path, os.environ | {"PYTHONPATH": str(ROOT)})
    assert told.returncode == 0, told.stderr
    for command, page in BENCHMARKS.items():
        if command.split()[0] == script:
            unknown = [word for word in re.findall(r"(--[a-z-]+)", command) if word not in told.stdout]
            assert not unknown, (command, page)


def test_every_benchmark_is_run_somewhere() -> None:
    benchmarks = ROOT / "benchmarks"
    found = [file for file in benchmarks.rglob("*.py") if "__main__" in file.read_text(encoding="utf-8")]
    scripts = {str(file.relative_to(benchmarks)).removesuffix("/__main__.py") for file in found}
    assert scripts == SMALL.keys() | ELSEWHERE.keys()
    assert all((ROOT / "tests" / "benchmarks" / name).exists() for name in ELSEWHERE.values())
