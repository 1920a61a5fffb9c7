"""Commands that pages show in passing, beside README and tutorials: they run on small inputs."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from public_data import public_data
from test_docs import ROOT, shown
from test_readme import RECIPES
from test_tutorials import TUTORIALS, blocks, commands, inputs

from batchbound.cli import main
from batchbound.data.lengths.history import LengthHistory

RECIPES_AND_TUTORIALS = {
    shlex.join(command)
    for page in TUTORIALS
    for kind, text in blocks(page)
    if kind == "console"
    for command in commands(text)
} | {line for recipe in RECIPES for line in recipe.splitlines()}
ELSEWHERE = {
    "batchbound run plan.json --replan PROFILE": "executor/test_layer_profiling.py",
    "batchbound validate RUN --profile FOLDER": "executor/test_validate.py",
    "batchbound --print-completion bash >> ~/.bashrc": "cli/test_completion.py",
    "batchbound profile --model MODEL --dtype float32 --slots 16 --prompt-tokens 256 --points 3 --repeats 1"
    " -o costs.json": "test_readme.py",
    "batchbound profile --model MODEL -o cost.json": "test_readme.py",
    "batchbound replay data/instances/arena/gsm8k-kv-total.json --server http://localhost:8000"
    " --policy sorted-f -o mine.json": "cli/test_replay.py",
    'batchbound run prompts.jsonl --server "$URL" --slots 256': "cli/test_run_server.py",
    "batchbound report --gantt gantt.png": "cli/test_run.py",
    "batchbound report --gantt gantt.svg": "cli/test_run.py",
    "batchbound run prompts.jsonl --model MODEL": "cli/test_run_prompts.py",
    "batchbound run prompts.jsonl --model MODEL --slots 16": "cli/test_run_prompts.py",
    "batchbound size ROWS --model config.json --by 07:00 --devices h100,l40s"
    " --prices FILE": "planning/test_sizing.py",
    "batchbound verify mine.json": "cli/test_replay.py",
    "batchbound verify ONE.trace.jsonl --same-as OTHER.trace.jsonl": "cli/test_repeatable.py",
}
COMMANDS = [
    command
    for command in shown("batchbound ")
    # A bare name says which command it is, not what to type.
    if not command.endswith("--help")
    and len(command.split()) > 2
    and command not in RECIPES_AND_TUTORIALS | ELSEWHERE.keys()
]
SMALLER = {
    "table3:0:1000000": "table3:0:500",
    "sharegpt:0:1000": "sharegpt:0:30",
    "alpaca:0:48": "alpaca:0:6",
    "DATA/distserve/": "",
}
"""In place of what is large, or lies elsewhere."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands take from elsewhere: rollouts of a few steps, prompts, their lengths, costs."""
    pytest.importorskip("transformers", reason="the engine extra is not installed")
    data, mine = public_data(tmp_path_factory.mktemp("public")), tmp_path_factory.mktemp("commands")
    inputs(mine)
    shutil.copy(data / "distserve" / "profiler-a100-80g.distserve.json", mine)
    table = (data / "rollouts" / "dapo_qwen32b.csv").read_text(encoding="utf-8")
    head, *lines = table.splitlines()
    cost = {"prefill_base": 0.02, "prefill_per_token": 1e-4, "decode_base": 0.03, "decode_per_slot": 1e-4}
    (mine / "costs.json").write_text(json.dumps({"batchbound_cost": 2, "cost": cost}), encoding="utf-8")
    for name, steps in (
        ("rollouts", "012345"),
        ("steps", "01"),
        ("step5", "3"),
        ("step6", "4"),
        ("step7", "5"),
    ):
        kept = [line for line in lines if line[0] in steps]
        (mine / f"{name}.csv").write_text("\n".join([head, *kept, ""]), encoding="utf-8")
    rows = [json.loads(line)["body"] for line in (mine / "prompts.jsonl").read_text("utf-8").splitlines()]
    history = LengthHistory()
    history.saw((row["messages"], row["max_tokens"]) for row in rows)
    history.save(mine / "lengths.jsonl")
    return mine


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_runs_on_small_inputs(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name, value in SMALLER.items():
        command = command.replace(name, value)
    assert main(shlex.split(command)[1:]) == 0


def test_what_is_run_elsewhere_is_shown_and_has_its_test() -> None:
    assert ELSEWHERE.keys() <= shown("batchbound ").keys()
    assert [name for name in ELSEWHERE.values() if not (ROOT / "tests" / name).exists()] == []
