"""A small job whose every answer is known, beside files of the user's that nobody may touch."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import forked_ray
from .children import command, run

MODEL = "tiny:llama:1"
OURS = ("answers.jsonl", "trace.jsonl", "answers.jsonl.journal")
"""What a run on one machine may write."""

USERS = {
    ".answers.jsonl.original": "mine",
    ".answers.jsonl.notes.partial": "mine, too",
    "answers.jsonl.journal.old": "kept",
    "notes": "of the user",
}
"""Files that only look like ours."""


@dataclass(frozen=True)
class Work:
    """
    A job planned in a folder.

    Parameters
    ----------
    folder
        Where it stands, without any output.
    run
        The words that run it.
    answers
        Its answers without an interruption, by request.
    cpu_seconds
        What that run took, its replicas included.
    replicas
        How many serve it.
    forked
        Whether they are forks of the driver instead of Ray's actors.
    """

    folder: Path
    run: tuple[str, ...]
    answers: dict[str, Any]
    cpu_seconds: float
    replicas: int = 1
    forked: bool = False

    @property
    def ours(self) -> tuple[str, ...]:
        """What a run may write."""
        if self.replicas == 1:
            return OURS
        return (*OURS, "trace.perfetto.json", *(f"trace.{k}.jsonl" for k in range(self.replicas)))

    def call(self, *options: str) -> Callable[[], int]:
        """Return the call that runs it."""
        plain = command((*self.run, *options))

        def forked() -> int:
            forked_ray.install()
            return plain()

        return forked if self.forked else plain

    def copy(self, folder: Path) -> Path:
        """Return a fresh copy of the folder, without any output."""
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(self.folder, folder)
        return folder


def make_work(
    folder: Path, scratch: Path, *, count: int, most: int, replicas: int = 1, forked: bool = False
) -> Work:
    """Plan a job and serve it once undisturbed."""
    folder.mkdir(parents=True)
    rng = random.Random(count)
    with (folder / "prompts.jsonl").open("w") as stream:
        for number in range(count):
            text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 40)))
            body = {"prompt": text, "max_tokens": rng.randint(1, most)}
            stream.write(json.dumps({"custom_id": f"r{number}", "body": body}) + "\n")
    for name, text in USERS.items():
        (folder / name).write_text(text)
    shared = ("--replicas", str(replicas)) if replicas > 1 else ()
    words = ["plan", "prompts.jsonl", "--model", MODEL, "--slots", "4", "--work", "5", *shared]
    planned = run(command(words), folder, scratch / "said", 120)
    assert planned.status == 0, planned.said
    serve = ("run", "plan.json", "--model", MODEL, "--dtype", "float64", "--threads", "1")
    work = Work(folder, serve, {}, 0.0, replicas, forked)
    served = run(work.call(), work.copy(scratch / "reference"), scratch / "said", 600)
    assert served.status == 0, served.said
    answers = answers_of(scratch / "reference" / "answers.jsonl")
    return replace(work, answers=answers, cpu_seconds=served.cpu_seconds)


def answers_of(path: Path) -> dict[str, Any]:
    """Return the answers in a file by request, without the time at which they were written."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        value = json.loads(line)
        assert value["custom_id"] not in found, f"{value['custom_id']} twice"
        found[value["custom_id"]] = timeless(value)
    return found


def timeless(answer: Any) -> Any:
    """Return an answer without the time at which it was made."""
    copy = json.loads(json.dumps(answer))
    if copy.get("response"):
        copy["response"]["body"].pop("created", None)
    return copy


def journal_of(path: Path) -> dict[str, Any]:
    """Return the answers that stand whole in a journal, read without batchbound."""
    found = {}
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        value = json.loads(line)
        if "id" in value:
            assert value["id"] not in found, f"{value['id']} twice in the journal"
            found[value["id"]] = timeless(value["answer"])
    return found


def digests(folder: Path, but: tuple[str, ...] = OURS) -> dict[str, str]:
    """Return the digest of each file in a folder that is not an output."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in but
    }
