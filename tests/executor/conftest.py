"""Fixtures shared by the tests of the executor."""

from __future__ import annotations

import pytest
from scripts import FORKS


@pytest.fixture
def processes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin the engine's processes from one that has torch imported."""
    for name in ("encode_worker", "tensor_peers"):
        monkeypatch.setattr(f"batchbound.executor.processes.{name}.get_context", lambda _: FORKS)
