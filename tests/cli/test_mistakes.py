"""The likeliest mistakes at each command: at most two lines name what is at fault, and nothing is written."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from batchbound.cli import COMMANDS, main

MISTAKES: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "mistakes.json").read_text(encoding="utf-8")
)
"""What is typed after each command, and the error's text."""


def write_inputs(folder: Path) -> None:
    """Write files of every kind, each under a name that no command writes by default."""
    rows = [
        {
            "custom_id": f"r{k}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"Say {k}."}], "max_tokens": 3 + k},
        }
        for k in range(8)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns, more = "id,input_tokens,output_tokens", "arrival"
    texts = {
        "lengths.csv": f"{columns}\n" + "".join(f"r{k},{20 + k},{5 + k}\n" for k in range(8)),
        "few.csv": f"{columns}\n" + "".join(f"r{k},{20 + k},{5 + k}\n" for k in range(5)),
        "arrivals.csv": f"{columns},{more}\n" + "".join(f"r{k},{20 + k},9,{k / 10}\n" for k in range(8)),
        "questions.csv": "question,budget\n" + "".join(f"What is {k}?,{5 + k}\n" for k in range(8)),
        "wrong.csv": "prompt,completion\nhello,world\n",
        "empty.csv": "",
        "served.trace": '{"batchbound_server_run": 1}\n',
        "prompts.txt": "Tell me a joke.\nName a prime.\n",
        "config.json": json.dumps(
            {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
        ),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "folder").mkdir()


def make_files(folder: Path) -> None:
    """Have the commands write a cost model, plans, completions and a trace."""
    small = "--model tiny:llama --repeats 1 --points 2 --slots 4 --prompt-tokens 64"
    for line in (
        f"profile {small} -o made.cost",
        "plan prompts.jsonl --model tiny:llama --slots 4 --work 1 -o made.json",
        "plan lengths.csv --slots 4 --work 1 -o lengths.json",
        "plan few.csv --slots 4 --work 1 -o few.json",
        "run made.json --model tiny:llama -o made.answers --trace made.trace",
    ):
        assert main(shlex.split(line)) == 0, line
    whole = (folder / "made.json").read_text(encoding="utf-8")
    (folder / "half.json").write_text(whole[: whole.index('"workload":') + 11], encoding="utf-8")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_inputs(folder)
        make_files(folder)
    return folder


@pytest.mark.parametrize(
    ("line", "said"),
    [(f"{name} {words}", said) for name, tried in MISTAKES.items() for words, said in tried.items()],
    ids=lambda text: text[:60],
)
def test_a_mistake_is_named_in_at_most_two_lines(
    line: str, said: str, inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = {path: path.stat().st_mtime_ns for path in inputs.rglob("*")}
    try:
        status = main(shlex.split(line))
    except SystemExit as ended:
        status = int(ended.code or 0)
    told = capsys.readouterr()
    assert status == 2, told
    lines = told.err.splitlines()
    assert 1 <= len(lines) <= 2
    assert said in told.err
    assert {path: path.stat().st_mtime_ns for path in inputs.rglob("*")} == before


def test_ten_are_tried_of_every_command() -> None:
    assert MISTAKES.keys() == COMMANDS.keys()
    assert {name: len(tried) for name, tried in MISTAKES.items() if len(tried) < 10} == {}
