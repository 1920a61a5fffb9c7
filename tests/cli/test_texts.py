"""Texts of a table go through the model's chat template, unless they are sent as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from tiny_checkpoint import write_checkpoint

pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.cli import main
from batchbound.data.readers.completions import BatchCompletion, read_completions
from batchbound.screen.run import note_empty

TEXTS = ["--prompt-column", "text", "--slots", "2", "--longest-completion", "3"]
SAID = "each text is sent as a user's message"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template writes each message and a space, and a table of texts."""
    folder = tmp_path_factory.mktemp("texts")
    write_checkpoint(folder / "model")
    settings = folder / "model" / "chat_template.jinja"
    settings.write_text("{% for message in messages %}w9 {{ message['content'] }} w8 {% endfor %}")
    (folder / "texts.csv").write_text("text,other\nw3 w4,a\nw5 w6,b\n")
    return folder


def prompt_tokens(output: str) -> list[int | None]:
    return [one.prompt_tokens for one in read_completions(output)]


def test_a_text_is_a_users_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["run", "texts.csv", *TEXTS, "--model", "model", "-o", "chat.jsonl"]) == 0
    assert f"{SAID}, by the chat template of model; --raw sends texts as they are" in capsys.readouterr().err
    assert prompt_tokens("chat.jsonl") == [4, 4]
    first = json.loads(Path("chat.jsonl").read_text().splitlines()[0])
    assert first["response"]["body"]["object"] == "chat.completion"
    # Its plan keeps that, and with --raw it is another job.
    assert main(["run", "texts.csv", *TEXTS, "--model", "model", "-o", "chat.jsonl"]) == 0
    assert main(["run", "texts.csv", *TEXTS, "--model", "model", "-o", "chat.jsonl", "--raw"]) == 2
    assert "was planned with another --prompt-column" in capsys.readouterr().err


def test_raw_texts_are_sent_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["run", "texts.csv", *TEXTS, "--model", "model", "-o", "raw.jsonl", "--raw"]) == 0
    assert SAID not in capsys.readouterr().err
    assert prompt_tokens("raw.jsonl") == [2, 2]


def test_a_tokenizer_without_a_template_completes_texts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["run", "texts.csv", *TEXTS, "--model", "tiny:llama", "-o", "tiny.jsonl"]) == 0
    assert SAID not in capsys.readouterr().err
    assert prompt_tokens("tiny.jsonl") == [6, 6]  # bytes, and a token that begins each prompt


@pytest.mark.parametrize(("words", "field"), [((), "messages"), (("--raw",), "prompt")])
def test_a_server_gets_texts_at_the_endpoint_of_their_kind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], field: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "capped.csv").write_text("text,max_tokens\nw3 w4,2\nw5 w6,2\n")
    table = ["capped.csv", "--prompt-column", "text", *words, "-o", "sent.jsonl", "--overwrite"]
    with FakeServer(2) as server:
        assert main(["run", *table, "--server", server.url, "--slots", "2"]) == 0
        assert [field in body for body in server.bodies.values()] == [True, True]


def test_most_completions_without_text_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    empty: Any = BatchCompletion("a", completion="", finish_reason="stop", completion_tokens=1)
    whole = BatchCompletion("b", completion="yes", finish_reason="length", completion_tokens=1)
    note_empty([empty, empty, whole], raw=True)
    assert "2 of 3 completions are empty: the model ended them at once; texts were sent as they are" in (
        capsys.readouterr().err
    )
    note_empty([empty, whole], raw=True)
    assert not capsys.readouterr().err
