"""The README is a promise kept: its snippets run, its commands and files exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from fake_server import FakeServer
from test_docs import loaded
from test_tutorials import SERVER, inputs, quick

from batchbound.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_library_snippets_run() -> None:
    names: dict[str, object] = {}
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(snippet, names)


def test_the_first_python_example_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    exec(shown[1], {})
    assert capsys.readouterr().out == shown[2]


def test_the_gains_are_those_of_the_results_and_each_has_a_script() -> None:
    module = loaded("write_results")
    figures = json.loads((ROOT / "docs" / "results.json").read_text(encoding="utf-8"))
    assert module.readme(README, figures) == README, "run `python docs/write_results.py`"
    scripts = re.findall(r"^\| .*\[`(\w+\.py)`\]\(docs/results\.md#", README, re.MULTILINE)
    assert len(scripts) == len(module.GAINS)
    assert all((ROOT / "benchmarks" / script).is_file() for script in scripts)


def test_a_changed_result_changes_the_gains() -> None:
    module = loaded("write_results")
    figures = json.loads((ROOT / "docs" / "results.json").read_text(encoding="utf-8"))
    figures["lm_eval"]["rows"][0][4] = "7.7"
    assert "**8 times** less CPU time" in module.readme(README, figures)


RECIPES = [
    text for text in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if text.startswith("batchbound")
]
STANDS_FOR = {
    "MODEL": "tiny:llama",
    "--slots 64": "--slots 4",
    "--slots 256": "--slots 4",
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda text: text.splitlines()[-1][:30])
def test_a_recipe_runs_as_it_stands(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    with FakeServer(slots=4) as server:
        for name, value in (STANDS_FOR | {SERVER: server.url}).items():
            recipe = recipe.replace(name, value)
        for line in recipe.splitlines():
            assert main(quick(shlex.split(line)[1:])) == 0, line


def test_every_command_named_exists() -> None:
    shell = "".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    named = set(re.findall(r"^batchbound ([a-z]+)", shell, re.MULTILINE))
    named |= set(re.findall(r"`batchbound ([a-z]+)", README))
    assert {"plan", "run", "report"} <= named
    assert named <= set(COMMANDS)


def test_every_file_linked_exists() -> None:
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_first_command_is_a_target_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "make demo" in README
    assert re.search(r"^demo:", makefile, re.MULTILINE)


def test_it_fits_on_a_screen_or_two() -> None:
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 900
