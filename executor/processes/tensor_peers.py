"""Peer processes that share a model's layers with this one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from ...data.configuration import PlannedConfiguration
from ...data.problem import Problem
from ...heuristics.exegpt.round_robin import RoundRobinAllocation
from ...heuristics.loop import execute
from ..engines.huggingface import HuggingFaceEngine
from ..models.faults import RunStoppedError
from .engine_spec import EngineSpec

_PATIENCE = 5.0
"""Seconds for a process to end by itself."""

_LONGEST_LOAD = timedelta(hours=2)
"""Longest time for another process to load its model."""


class TensorPeers:
    """Peer processes that make the same calls as this one.

    While it is open, :func:`~.tensor_parallel.share_layers` finds them.
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
        # Only this user can read the messages there; a port would be open to all users.
        self._folder = TemporaryDirectory(prefix="batchbound-peers-")
        self._device, self._degree = _device(spec, 0), degree
        self._places = [_place(rank, degree) for rank in range(degree)]
        context = get_context("spawn")
        self._processes = []
        waiting = []
        with ExitStack() as undo:
            undo.callback(self._end)
            for rank in range(1, degree):
                ours, theirs = context.Pipe()
                work = (self._folder.name, problem, configuration, list(prompts), dict(options))
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
        try:
            _meet(self._folder.name, 0, self._degree, self._device)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
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
        self._folder.cleanup()


def _place(rank: int, degree: int) -> dict[str, str]:
    """Return a process's environment, as `torchrun` would set it."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": degree, "LOCAL_WORLD_SIZE": degree}
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {name: str(value) for name, value in numbers.items()} | {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }


def _meet(folder: str, rank: int, degree: int, device: str) -> None:
    """Join the process group through a file in a folder."""
    import torch

    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        backend="nccl" if on_cuda else "gloo",
        store=torch.distributed.FileStore(str(Path(folder) / "store"), degree),  # type: ignore[attr-defined]
        rank=rank,
        world_size=degree,
        device_id=torch.device("cuda", rank) if on_cuda else None,
        timeout=_LONGEST_LOAD,
    )


def _device(spec: EngineSpec, rank: int) -> str:
    return f"cuda:{rank}" if spec.device.startswith("cuda") else spec.device


def _follow(
    connection: Connection, place: dict[str, str], spec: EngineSpec, degree: int, work: tuple[Any, ...]
) -> None:
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
    folder, problem, configuration, prompts, options = work
    _meet(folder, int(place["RANK"]), degree, spec.device)
    shared, decoding = share_layers(model, degree), replace(options.pop("decoding"), sampler=spec.sampler)
    engine = HuggingFaceEngine(problem, shared, prompts, decoding=decoding, **options)
    execute(problem, RoundRobinAllocation.of(configuration), engine)
    torch.distributed.destroy_process_group()
