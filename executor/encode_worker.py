"""The process that encodes prompts for another one that decodes (ExeGPT's WAA)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Self

from .faults import RunStoppedError
from .ray_fleet import EngineSpec

if TYPE_CHECKING:
    from .handover import Parcel

_PATIENCE = 5.0
"""Seconds that a worker is given to end by itself."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """
    A batch that was encoded.

    Parameters
    ----------
    requests
        Their positions in the workload.
    parcel
        Their keys, values and first tokens.
    begun, ended
        When its encoding began, and when its parcel was ready, on the system's monotonic clock, seconds.
    cpu_seconds
        Of the worker's process, on it.
    """

    requests: tuple[int, ...]
    parcel: Parcel
    begun: float
    ended: float
    cpu_seconds: float


class EncodeWorker:
    """
    A process with a copy of the model that encodes the batches it is sent, in order.

    Parameters
    ----------
    spec
        What it loads, and on which device.
    most_prompts
        Of a batch.
    most_tokens
        Of a prompt.

    Raises
    ------
    RunStoppedError
        If it cannot load the model.
    """

    def __init__(self, spec: EngineSpec, most_prompts: int, most_tokens: int) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, spec, most_prompts, most_tokens),
            daemon=True,
            name="batchbound-encode",
        )
        self._process.start()
        theirs.close()
        self._underway = 0
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_id(self) -> int:
        """Of the worker."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, requests: Sequence[int], names: Sequence[str], prompts: Sequence[Sequence[int]]) -> None:
        """
        Have a batch encoded.

        Parameters
        ----------
        requests
            Positions in the workload.
        names
            Their names, for their random streams.
        prompts
            Token ids of each.

        Raises
        ------
        RunStoppedError
            If the worker is gone.
        """
        try:
            self._connection.send((tuple(requests), tuple(names), tuple(map(tuple, prompts))))
        except OSError as error:
            raise self._gone() from error
        self._underway += 1

    def receive(self, *, wait: bool) -> list[Encoded]:
        """
        Return the batches that are ready; with ``wait`` at least one, if any is under way.

        Raises
        ------
        RunStoppedError
            If the worker is gone, or could not encode a batch.
        """
        ready: list[Encoded] = []
        while self._underway and ((wait and not ready) or self._poll()):
            ready.append(self._receive())
            self._underway -= 1
        return ready

    def close(self) -> None:
        """End the worker, and give back what it has sent and nobody has taken."""
        from .handover import discard

        try:
            self._connection.send(None)
            while self._underway and self._connection.poll(_PATIENCE):
                discard(self._receive().parcel)
                self._underway -= 1
        except (OSError, RunStoppedError):
            # It is gone already: nothing is left to be told, or to come.
            self._underway = 0
        self._connection.close()
        self._process.join(_PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _poll(self) -> bool:
        try:
            return self._connection.poll()
        except OSError as error:
            raise self._gone() from error

    def _receive(self) -> Encoded:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if isinstance(answer, str):
            raise RunStoppedError(f"the encoding worker failed: {answer}")
        assert isinstance(answer, Encoded)
        return answer

    def _gone(self) -> RunStoppedError:
        self._process.join(_PATIENCE)
        return RunStoppedError(f"the encoding worker is gone (exit status {self._process.exitcode})")


def _serve(connection: Connection, spec: EngineSpec, most_prompts: int, most_tokens: int) -> None:
    """Encode what comes until nothing does; the worker's whole life."""
    import torch

    from .handover import Parcel, discard, pack
    from .model_source import load_model
    from .sampling import Sampler
    from .tiers import choose_tier

    parcel = None
    try:
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        model = load_model(
            spec.model,
            load_format=spec.load_format,  # type: ignore[arg-type]
            dtype=spec.dtype,
            device=spec.device,
            seed=spec.seed,
        )
        sampler = Sampler(**spec.sampling)  # type: ignore[arg-type]
        batch = choose_tier(model, spec.tier).batch(model, most_prompts, most_tokens, sampler=sampler)
        # The first call allocates, and chooses kernels.
        batch.prefill([0], [[0] * most_tokens])
        batch.release(0)
        connection.send(Encoded((), Parcel("", (), (), (), ""), 0.0, 0.0, 0.0))
        while (asked := connection.recv()) is not None:
            requests, names, prompts = asked
            begun, cpu = time.perf_counter(), time.process_time()
            slots = range(len(requests))
            batch.prefill(slots, prompts, request_ids=names)
            parcel = pack([batch.take(slot) for slot in slots])
            spent = time.process_time() - cpu
            connection.send(Encoded(requests, parcel, begun, time.perf_counter(), spent))
            parcel = None
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        # The process that decodes is gone: nobody would take what is encoded.
        if parcel is not None:
            discard(parcel)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
