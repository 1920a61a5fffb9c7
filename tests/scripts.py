"""Runs scripts as a shell does, in processes that begin with torch imported: that takes four CPU seconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Listener
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
_CALL = f"""#!{sys.executable} -IS
import os, sys
from multiprocessing.connection import Client
with Client(os.path.join(os.path.dirname(__file__), "calls")) as calls:
    calls.send((os.getcwd(), dict(os.environ), sys.argv[1:]))
    code, *said = calls.recv()
sys.stdout.write(said[0])
sys.stderr.write(said[1])
sys.exit(code)
"""


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


@contextmanager
def program(folder: Path) -> Iterator[None]:
    """Make a program ``batchbound`` in a folder for shell scripts; a search of ``plan`` takes a second."""
    (folder / "batchbound").write_text(_CALL, encoding="utf-8")
    (folder / "batchbound").chmod(0o755)
    address = str(folder / "calls")

    def answer() -> None:
        with Listener(address) as calls:
            ready.set()
            while True:
                with calls.accept() as call:
                    if (asked := call.recv()) is None:
                        return
                    place, environment, words = asked
                    more = ["--time-limit", "1"] if words[0] == "plan" else []
                    done = ended(COMMAND, [*words, *more], Path(place), environment)
                    call.send((done.returncode, done.stdout, done.stderr))

    ready = threading.Event()
    thread = threading.Thread(target=answer)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        with Client(address) as last:
            last.send(None)
        thread.join()
