"""A retry of cut completions on a server raises caps and lowers none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_server import FakeServer
from killing import Killed, kill_at
from server_batches import rows_of, run_words, write_batch

from batchbound.cli import main

CAPS = [8, 24, 48, 96]


def words_of(batch: Path, server: FakeServer, *more: str) -> list[str]:
    return run_words(batch, server, "--slots", "4", *more)


def tokens_of(batch: Path) -> list[int]:
    return [row["response"]["body"]["usage"]["completion_tokens"] for row in rows_of(batch).values()]


def test_only_rows_whose_cap_rises_are_sent_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = write_batch(tmp_path / "in.jsonl", CAPS)
    with FakeServer(4) as server:
        assert main(words_of(batch, server)) == 0
        capsys.readouterr()
        assert main(words_of(batch, server, "--retry", "cut", "--longest-completion", "32")) == 0
        said = " ".join(capsys.readouterr().err.split())
        assert [server.attempts[f"r{k}"] for k in range(4)] == [2, 2, 1, 1]
    assert tokens_of(batch) == [32, 32, 48, 96]
    assert "2 cut completions have 32 tokens or more, or such a cap: kept as they are" in said
    # Both rows are sent under one cap, which orders nothing.
    assert "order: file order" in said
    assert "larger caps" not in said


def test_a_retry_of_cut_rows_keeps_the_order_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = tmp_path / "in.jsonl"
    bodies = {
        f"{kind}-{k}": {"prompt": f"{kind}-{k}", "max_tokens": 2}
        for kind in ("word", "essay")
        for k in range(10)
    }
    batch.write_text("".join(json.dumps({"custom_id": name, "body": bodies[name]}) + "\n" for name in bodies))
    with FakeServer(2) as server:
        words = run_words(batch, server, "--slots", "2")
        assert main(words) == 0
        assert "2 kinds of prompts" in capsys.readouterr().err
        assert main([*words, "--retry", "cut", "--longest-completion", "4"]) == 0
        told = capsys.readouterr()
    assert "kinds of prompts" not in told.err
    assert json.loads(told.out)["order"] == "file order"


def test_a_cut_completion_stays_where_its_retry_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", CAPS)
    with FakeServer(4) as server:
        assert main(words_of(batch, server)) == 0
        server.faults["r0"] = ["hang", 400]
        capsys.readouterr()
        assert main(words_of(batch, server, "--retry", "cut", "--longest-completion", "32")) == 0
        said = " ".join(capsys.readouterr().err.split())
    assert tokens_of(batch) == [8, 32, 48, 96]
    assert "a cut completion is kept, as its retry failed: HTTP 400: fault 400" in said


def test_the_screen_names_the_largest_cap_after_a_retry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", CAPS)
    with FakeServer(4) as server:
        words = [word for word in words_of(batch, server) if word != "--json"]
        assert main(words) == 0
        assert main([*words, "--retry", "cut", "--longest-completion", "200"]) == 0
        capsys.readouterr()
        # A row that is added has its own cap; the others keep theirs of the retry.
        write_batch(batch, [*CAPS, 9])
        assert main(words) == 0
        assert "5 of 5 completions were cut at a cap of at most 200 tokens" in capsys.readouterr().out
        assert main([*words, "--retry", "cut", "--longest-completion", "199"]) == 0
    assert tokens_of(batch) == [200, 200, 200, 200, 199]


def test_a_cap_that_raises_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = write_batch(tmp_path / "in.jsonl", CAPS)
    with FakeServer(4) as server:
        words = words_of(batch, server)
        assert main(words) == 0
        before = (tmp_path / "answers.jsonl").read_bytes()
        capsys.readouterr()
        assert main([*words, "--retry", "cut", "--longest-completion", "8"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "--longest-completion 8 raises no cap: 4 cut completions have at least 8 tokens" in said
        assert "Give more than 8 tokens; 192 raises each." in said
        assert main([*words, "--retry", "cut", "--longest-completion", "192", "--overwrite"]) == 2
        other = words_of(batch, server, "-o", str(tmp_path / "other.jsonl"))
        assert main([*other, "--retry", "cut", "--longest-completion", "192"]) == 2
        assert "no finished run" in capsys.readouterr().err
        assert sum(server.attempts.values()) == 4
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    assert not list(tmp_path.glob("*.journal*"))


def test_failed_rows_of_a_retry_keep_a_larger_cap(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "in.jsonl", CAPS)
    with FakeServer(4, faults={"r0": [400], "r3": [400]}) as server:
        assert main(words_of(batch, server)) == 1
        more = ["--retry", "cut", "--retry", "failed", "--longest-completion", "32"]
        assert main(words_of(batch, server, *more)) == 0
    assert tokens_of(batch) == [32, 32, 48, 96]


@pytest.mark.parametrize("own", [True, False])
def test_rows_of_several_completions_are_raised_by_the_cap_of_each(tmp_path: Path, own: bool) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [8, 48], n=3)
    if not own:
        rows = [json.loads(line) for line in batch.read_text().splitlines()]
        for row in rows:
            del row["body"]["max_tokens"]
        batch.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with FakeServer(8) as server:
        first = [] if own else ["--longest-completion", "16"]
        assert main(words_of(batch, server, *first)) == 0
        assert tokens_of(batch) == ([24, 144] if own else [48, 48])
        assert main(words_of(batch, server, "--retry", "cut", "--longest-completion", "20")) == 0
        assert tokens_of(batch) == ([60, 144] if own else [60, 60])
        assert main(words_of(batch, server, "--retry", "cut", "--longest-completion", "18")) == 2
    assert tokens_of(batch) == ([60, 144] if own else [60, 60])


def test_a_retry_continues_its_own_journal_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", CAPS)
    with FakeServer(1) as server:
        words = words_of(batch, server)
        more = [*words, "--retry", "cut", "--longest-completion", "64"]
        assert main(words) == 0
        with monkeypatch.context() as patch:
            kill_at(5, patch)
            with pytest.raises(Killed):
                main(more)
        capsys.readouterr()
        assert main(words) == 2
        assert "differs in: retry" in " ".join(capsys.readouterr().err.split())
        assert main(more) == 0
        assert [server.attempts[f"r{k}"] for k in range(4)] == [2, 2, 2, 1]
    assert tokens_of(batch) == [64, 64, 64, 96]
