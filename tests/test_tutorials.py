"""Each tutorial from nothing to its result: its snippets and commands run as they stand."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_server import FakeServer

from batchbound.cli import main

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SERVER = "http://127.0.0.1:8000"
MODEL = "Qwen/Qwen3-0.6B"
NEEDS = {"grpo": "trl", "lm_eval": "lm_eval", "table": "ray"}
MOST_COMMANDS = 5
ELSEWHERE = {
    "openrlhf_rollout.py": "test_openrlhf.py",
    "own_loop.py": "test_llm.py",
    "trl_grpo.py": "test_trl.py",
    "trl_smollm.py": "test_trl.py",
    "verl_rollout.py": "test_verl_rollout.py",
}
"""Examples, and the tests that run them."""


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(text: str) -> list[list[str]]:
    return [
        shlex.split(line.removeprefix("$ "), comments=True)
        for line in text.splitlines()
        if line.startswith("$ ")
    ]


def inputs(folder: Path) -> None:
    """Write what a reader brings along: a batch for a server, a model's configuration."""
    rows = [
        {
            "custom_id": f"r{k}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"r{k}"}],
                "max_tokens": 3 + k,
            },
        }
        for k in range(12)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(sizes | heads), encoding="utf-8")


def small_model(folder: Path) -> Path:
    """Write what stands for a model of a hub: the one that the example of GRPO trains."""
    trl_example = runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"))
    tokenizer = trl_example["make_tokenizer"]()
    tokenizer.save_pretrained(folder)
    trl_example["make_model"](tokenizer, 0).save_pretrained(folder)
    return folder


def quick(arguments: list[str]) -> list[str]:
    """Return a command's words with half a second for a search that takes ten, or what a page says."""
    if arguments[0] not in ("plan", "compare"):
        return arguments
    at = arguments.index("--time-limit") if "--time-limit" in arguments else len(arguments)
    return [*arguments[:at], *arguments[at + 2 :], "--time-limit", "0.5"]


def carry_out(command: list[str]) -> None:
    program, *arguments = command
    if program == "batchbound":
        arguments = quick(arguments)
        assert main(arguments) == 0, shlex.join(command)
    elif program == "python":
        if arguments[0] == "-m":
            subprocess.run([sys.executable, *arguments], check=True, timeout=300)
        else:
            assert Path(arguments[0]).name in ELSEWHERE
    else:
        assert program == "pip"  # What is installed is the tests' own matter.


@pytest.mark.slow
# What TRL sets by default, transformers calls deprecated.
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_stranger_gets_through(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(NEEDS.get(page.stem, "batchbound")) is None:
        pytest.skip(f"needs {NEEDS[page.stem]}")
    inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with ExitStack() as running:
        server = (
            running.enter_context(FakeServer(slots=256)).url
            if SERVER in page.read_text(encoding="utf-8")
            else ""
        )
        stands_for = {SERVER: server or SERVER}
        if MODEL in page.read_text(encoding="utf-8"):
            stands_for |= {MODEL: str(small_model(tmp_path / "model"))}
        for kind, text in blocks(page):
            for name, value in stands_for.items():
                text = text.replace(name, value)
            if kind == "python":
                exec(compile(text, str(page), "exec"), names)
            else:
                for command in commands(text):
                    carry_out(command)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_it_takes_at_most_five_commands(page: Path) -> None:
    asked = [command for kind, text in blocks(page) if kind == "console" for command in commands(text)]
    assert 1 <= len(asked) <= MOST_COMMANDS
