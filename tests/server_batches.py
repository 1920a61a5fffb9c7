"""Batches of completions for the fake server, and the rows that come back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_server import FakeServer


def write_batch(path: Path, lengths: Sequence[int], **extra: object) -> Path:
    with path.open("w") as stream:
        for number, tokens in enumerate(lengths):
            body = {"model": "fake", "prompt": f"r{number}", "max_tokens": tokens, **extra}
            stream.write(json.dumps({"custom_id": f"r{number}", "body": body}) + "\n")
    return path


def run_words(batch: Path, server: FakeServer, *more: str) -> list[str]:
    out = [] if "-o" in more else ["-o", str(batch.parent / "answers.jsonl")]
    trace = ["--trace", str(batch.parent / "trace.jsonl")]
    return ["run", str(batch), "--server", server.url, *out, *trace, "--json", *more]


def rows_of(batch: Path) -> dict[str, dict[str, Any]]:
    lines = (batch.parent / "answers.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    names = [row["custom_id"] for row in rows]
    assert len(set(names)) == len(names)
    return dict(zip(names, rows, strict=True))
