"""Files that the standing attack (``make attack``) damaged and that were not refused as they should be."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attack import corpus

from batchbound.cli import main


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, corpus.Kind]]:
    folder = tmp_path_factory.mktemp("sound")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        made = (corpus.workloads, corpus.costs, corpus.profiles, corpus.predictors, corpus.audits)
        kinds = [kind for make in made for kind in make(folder)]
    return folder, {kind.name: kind for kind in kinds}


def edited(place: str, value: Any, line: int = 0) -> Callable[[str], str]:
    """Return what sets a field of a JSON text, or of one of its lines."""

    def edit(text: str) -> str:
        lines = text.splitlines()
        whole = json.loads(lines[line])
        *path, last = place.split(".")
        entry = whole
        for name in path:
            entry = entry[int(name)] if isinstance(entry, list) else entry[name]
        entry[int(last) if isinstance(entry, list) else last] = value
        lines[line] = json.dumps(whole)
        return "\n".join(lines) + "\n"

    return edit


CASES: dict[str, tuple[str, Callable[[str], str], str]] = {
    "a negative time in a published profile": (
        "published profile, dense.csv",
        lambda text: text.replace(",11\n", ",-11\n", 1),
        "A100-toy-tp1/dense.csv: operation 'layernorm': a time or point is negative or not finite",
    ),
    "a time that is missing in a published profile": (
        "published profile, per_sequence.csv",
        lambda text: text.replace("sampler,1,3", "sampler,1,"),
        "A100-toy-tp1/per_sequence.csv: operation 'sampler': a time or point is negative or not finite",
    ),
    "a time beyond all times in a profile": (
        "layer profile",
        edited("operations.1.seconds.0", 1e300),
        "profile.json, field 'operations.1': operation 'decode step': a time is longer than 1e+12 s",
    ),
    "a point beyond all in a published profile": (
        "published profile, per_sequence.csv",
        lambda text: text.replace("sampler,1,3", "sampler,1e308,3"),
        "per_sequence.csv: operation 'sampler': a time is longer than 1e+12 s, or a point beyond 1e+12",
    ),
    "a point at next to nothing in a profile": (
        "layer profile",
        edited("operations.0.points.1.0", 1e-320),
        "profile.json: no costs can be fitted to it: the measured prefill stages have",
    ),
    "a weight of more bytes than any": (
        "layer profile",
        edited("shape.feed_forward_bytes", -1e308),
        "profile.json, field 'shape.feed_forward_bytes': -1e+308",
    ),
    "a time beyond all times in a measured run": (
        "measured run, requests.jsonl",
        edited("last_token_ts", 1e307, line=1),
        "A100-toy/requests.jsonl, line 2: a time is not a number of seconds",
    ),
    "an axis that decoding has not in a profile": (
        "layer profile",
        edited("operations.2.axes.1", "tokens"),
        "profile.json, field 'operations.2': operation 'keys and values': phase 'decode' has no axes",
    ),
    "a past completion longer than any": (
        "past answers (quantile)",
        edited("response.body.usage.completion_tokens", 2**31 - 1),
        "answers.jsonl, lengths 'quantile': 2147483647 tokens are beyond any completion's (100,000,000)",
    ),
    "more tokens than there are in a measured run": (
        "measured run, requests.jsonl",
        edited("input_toks", 10**400),
        "A100-toy/requests.jsonl, line 1: more tokens than any model takes (2147483647)",
    ),
    "a model without heads for keys and values": (
        "layer profile",
        edited("shape.kv_heads", 0),
        "profile.json, field 'shape.kv_heads': 0",
    ),
    "two times for one point in a profile": (
        "layer profile",
        edited("operations.0.points.0.0", 1e6),
        "profile.json, field 'operations.0': operation 'prefill stage': one point has two times",
    ),
    "a size beyond any model's": (
        "model's configuration (roofline)",
        edited("vocab_size", 10**18),
        "toy.json: field 'vocab_size': 1000000000000000000 is not a size from 1 to 1,000,000,000",
    ),
    "a constant that is true": (
        "predictor constant, predictor.json",
        edited("fields.tokens", True),
        "flat-predictor-constant: is damaged (low, tokens and high are not three numbers)",
    ),
    "a quality that is a text": (
        "predictor constant, predictor.json",
        edited("quality.log_sd", "wide"),
        "predictor.json, field 'quality.log_sd': 'wide' is not a number",
    ),
    "a block larger than all room": (
        "measured run, meta.json",
        edited("kv_cache.block_size", 16_000),
        "A100-toy/meta.json, field 'kv_cache': 2048 tokens make no block of 16000",
    ),
    "fewer tokens an iteration than sequences": (
        "measured run, meta.json",
        edited("engine_kwargs.max_num_seqs", 2**53 + 1),
        "A100-toy/meta.json, field 'engine_kwargs.max_num_batched_tokens': 256 tokens an iteration are fewer",
    ),
    "a completion beyond the room": (
        "measured run, requests.jsonl",
        edited("output_toks", 10**6, line=1),
        "A100-toy/requests.jsonl, request 'q1': 1000004 tokens of KV cache do not fit into 128 blocks",
    ),
    "an iteration's time with two points": (
        "server's log of iterations",
        lambda text: text.replace("3.0 ms", "3.0.0 ms", 1),
        "is no whole line of an iteration",
    ),
    "more tokens in an iteration than there are": (
        "server's log of iterations",
        lambda text: text.replace(" 0 context tokens", f" {10**40} context tokens", 1),
        "is of more tokens or time than an iteration can have",
    ),
    "an iteration that never ends": (
        "server's log of iterations",
        lambda text: text.replace(": 3.0 ms", f": {10**300} ms", 1),
        "is of more tokens or time than an iteration can have",
    ),
    "more sequences than there are": (
        "server's log of iterations",
        lambda text: text.replace("'max_num_seqs': 4", f"'max_num_seqs': {2**63}"),
        "vllm.log: 'max_num_seqs': 9223372036854775808 is no number of sequences",
    ),
    "a server whose room is a list": (
        "trace of a server's run",
        edited("servers.0.kv_tokens", [1]),
        "server.jsonl, line 1, field 'servers.0.kv_tokens': is not",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_file_is_refused_by_its_place(
    case: str,
    sound: tuple[Path, dict[str, corpus.Kind]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, kinds = sound
    name, damage, expected = CASES[case]
    kind = kinds[name]
    path = folder / kind.file
    before = path.read_text()
    monkeypatch.chdir(folder)
    path.write_text(damage(before))
    try:
        assert path.read_text() != before
        assert main(list(kind.words)) == 2
    finally:
        path.write_text(before)
    said = capsys.readouterr().err
    assert expected in said
    assert "Traceback" not in said


def test_a_profile_whose_times_fall_to_none_is_searched(
    sound: tuple[Path, dict[str, corpus.Kind]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, kinds = sound
    kind = kinds["layer profile"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    falling = edited("operations.1.seconds.1", 0.0)(Path(kind.file).read_text())
    Path(kind.file).write_text(falling)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        main(list(kind.words))
    assert "Warning" not in capsys.readouterr().err


def test_a_value_as_long_as_a_book_is_shown_by_its_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "lengths.csv"
    table.write_text("input_tokens,output_tokens\n5," + "x" * 100_000 + "\n")
    assert main(["plan", str(table), "-o", str(tmp_path / "plan.json")]) == 2
    said = capsys.readouterr().err
    assert "line 2, column 'output_tokens': 'xxx" in said
    assert len(said) < 2000
