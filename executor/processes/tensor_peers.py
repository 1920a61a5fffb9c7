"""The other processes that run a configuration in step with this one, each with its share of every layer."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from ...data.configuration import PlannedConfiguration
from ...data.problem import Problem
from ...heuristics.exegpt.configured import rra_policy
from ...heuristics.loop import execute
from ..engines.huggingface import HuggingFaceEngine
from ..models.faults import RunStoppedError
from .engine_spec import EngineSpec

_PATIENCE = 5.0
"""Seconds that a process is given to end by itself."""


class TensorPeers:
    """
    Processes that make the same calls as this one, so that the model's layers can be shared with them.

    While it is open, :func:`~.tensor_parallel.share_layers` finds them.

    Parameters
    ----------
    spec
        The model each of them loads, whole, on a device of its own.
    degree
        Processes, with this one.
    problem, configuration, prompts, options
        The job, an RRA configuration, and what :class:`~.huggingface.HuggingFaceEngine` takes besides; the
        sampler is that of ``spec``.

    Raises
    ------
    RunStoppedError
        If one of them cannot load the model; and, as it is left, if one of them is gone.
    """

    def __init__(
        self,
        spec: EngineSpec,
        degree: int,
        problem: Problem,
        configuration: PlannedConfiguration,
        prompts: Sequence[Sequence[int]],
        options: Mapping[str, Any],
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._places = [_place(rank, degree, port) for rank in range(degree)]
        context = get_context("spawn")
        self._processes = []
        waiting = []
        with ExitStack() as undo:
            undo.callback(self._end)
            for rank in range(1, degree):
                ours, theirs = context.Pipe()
                work = (problem, configuration, list(prompts), dict(options))
                process = context.Process(
                    target=_follow,
                    args=(
                        theirs,
                        self._places[rank],
                        replace(spec, device=_device(spec, rank)),
                        degree,
                        work,
                    ),
                    daemon=True,
                    name=f"batchbound-peer-{rank}",
                )
                process.start()
                self._processes.append(process)
                theirs.close()
                waiting.append(ours)
            for connection in waiting:
                self._loaded(connection)
            undo.pop_all()
        self._before = {name: os.environ.get(name) for name in self._places[0]}

    def __enter__(self) -> Self:
        os.environ.update(self._places[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        import torch

        for process in self._processes:
            process.join(_PATIENCE)
        gone = [process.exitcode for process in self._processes if process.exitcode]
        self._end()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if isinstance(error, RuntimeError) and gone:
            message = f"a process that shares the model's layers is gone (exit status {gone[0]})"
            raise RunStoppedError(message) from error

    def _loaded(self, connection: Connection) -> None:
        try:
            problem = connection.recv()
        except (EOFError, OSError) as error:
            message = "a process that was to share the model's layers is gone before it loaded them"
            raise RunStoppedError(message) from error
        finally:
            connection.close()
        if problem:
            raise RunStoppedError(f"a process that was to share the model's layers failed: {problem}")

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _place(rank: int, degree: int, port: int) -> dict[str, str]:
    """Return what `torchrun` would put into a process's environment."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": degree, "LOCAL_WORLD_SIZE": degree}
    return {name: str(value) for name, value in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _device(spec: EngineSpec, rank: int) -> str:
    return f"cuda:{rank}" if spec.device.startswith("cuda") else spec.device


def _follow(
    connection: Connection, place: dict[str, str], spec: EngineSpec, degree: int, work: tuple[Any, ...]
) -> None:
    """Make the first process's calls; its whole life."""
    os.environ.update(place)
    import torch

    from .tensor_parallel import share_layers

    try:
        model = spec.load()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send("")
    connection.close()
    problem, configuration, prompts, options = work
    shared, decoding = share_layers(model, degree), replace(options.pop("decoding"), sampler=spec.sampler)
    engine = HuggingFaceEngine(problem, shared, prompts, decoding=decoding, **options)
    execute(problem, rra_policy(configuration), engine)
    torch.distributed.destroy_process_group()
