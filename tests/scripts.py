"""Runs scripts as a shell does, in processes that begin with torch imported: that takes four CPU seconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch", "transformers.models.llama.modeling_llama", "pandas", "scipy.optimize"]
)
_CONTEXT = multiprocessing.get_context
_STREAMS = ("stdout", "stderr")
COMMAND = Path(__file__).parent / "command.py"
"""The script of ``batchbound``."""


def _context(method: str | None = None) -> BaseContext:
    """Let the workers of a script, too, begin with torch imported."""
    return FORKS if method == "spawn" else _CONTEXT(method)


def _run(
    script: Path, words: Sequence[str], folder: Path, environment: Mapping[str, str], logs: Path
) -> None:
    gc.freeze()
    vars(multiprocessing)["get_context"] = _context
    for number, name in enumerate(_STREAMS, start=1):
        os.dup2(os.open(logs / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # What a shell would find, without the folders that pytest adds.
    added = (Path(__file__).parent, Path(__file__).parents[1] / "benchmarks")
    rest = [path for path in sys.path if not any(Path(path).is_relative_to(each) for each in added)]
    begin = script if script.is_dir() else script.parent
    sys.path[:] = [str(begin), *environment.get("PYTHONPATH", "").split(os.pathsep), *rest]
    sys.argv[:] = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")


@contextmanager
def begun(
    script: Path, words: Sequence[str], folder: Path, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[BaseProcess, Path]]:
    """Begin a Python script that is given some words in a folder; yield it and the folder of its output."""
    with tempfile.TemporaryDirectory() as name:
        logs = Path(name)
        process = FORKS.Process(target=_run, args=(script, list(words), folder, dict(environment), logs))
        process.start()
        try:
            yield process, logs
        finally:
            if process.is_alive():
                process.kill()
            process.join()


def ended(
    script: Path, words: Sequence[str], folder: Path, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Return how a Python script ended that was given some words in a folder."""
    with begun(script, words, folder, environment) as (process, logs):
        process.join(900)
        if process.exitcode is None:
            process.kill()
            process.join()
        said = [(logs / stream).read_text(encoding="utf-8") for stream in _STREAMS]
    assert process.exitcode is not None
    return subprocess.CompletedProcess([str(script), *words], process.exitcode, *said)
