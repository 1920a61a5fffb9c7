"""Failures of a device while a batch runs, by kind."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...data.files.disk import InputError

_LOG = logging.getLogger(__name__)

MOST_FAILURES = 16
"""Failures in a row, without a completion, that stop a run."""


class OutOfMemoryError(RuntimeError):
    """Error of a full memory, after the last whole decode step.

    Shapes: tokens (decode steps, slots).
    """

    def __init__(self, reason: str, tokens: Any) -> None:
        super().__init__(reason)
        self.tokens = tokens


class NotFiniteError(RuntimeError):
    """Error of logits that are NaN or infinite."""

    def __init__(self, slot: int, step: int) -> None:
        super().__init__(f"the logits of slot {slot} are not finite after {step} decode steps")
        self.slot = slot
        self.decode_step = step


class RunStoppedError(RuntimeError):
    """Error of a run that cannot continue; finished completions are kept."""


class RequestFailedError(RunStoppedError):
    """Error of a single request; the others can be served."""

    def __init__(self, name: str, reason: str) -> None:
        # Exceptions are pickled by their arguments, so both are arguments.
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return self.reason


class TerminatedError(KeyboardInterrupt):
    """Error of SIGTERM, which ends the process."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means a full memory."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in message or "can't allocate memory" in message
    )


@contextmanager
def device_failures() -> Iterator[None]:
    """Turn errors of a device or a model into :class:`RunStoppedError`.

    After an error of the device every further call on it fails, so nothing can continue in this process.
    """
    import torch

    try:
        yield
    except (RunStoppedError, InputError):
        raise
    except Exception as error:  # errors of model code have no common base class
        message = (str(error).splitlines() or ["no reason given"])[0]
        if isinstance(error, torch.AcceleratorError) or message.startswith(("CUDA error", "HIP error")):
            raise RunStoppedError(f"the device failed ({message}); check it, then start again") from error
        _LOG.info("a stage failed", exc_info=True)
        what = f"a stage failed ({type(error).__name__}: {message}); --verbose shows where"
        raise RunStoppedError(what) from error


def available_bytes() -> int:
    """Return the host memory available to this process, in bytes."""
    import resource

    free, (limit, _) = _available(), resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return free
    try:
        with open("/proc/self/statm", encoding="ascii") as stream:
            used = os.sysconf("SC_PAGE_SIZE") * int(stream.read().split()[0])
    except OSError:
        used = 0
    return max(0, min(free, limit - used))


def _available() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            available = next((line for line in stream if line.startswith("MemAvailable:")), "")
    except OSError:
        available = ""
    if available:
        return 1024 * int(available.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Alert(str):
    """Remark that is shown even under --quiet."""

    __slots__ = ()
