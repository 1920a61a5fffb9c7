"""Cache of costs that earlier runs measured."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .data.costs.cost import CalibratedCost
from .data.costs.iteration_rates import IterationRates
from .data.files.disk import InputError
from .data.trace import Trace


@dataclass(frozen=True, slots=True)
class CostCache:
    """Folder of measured costs, by model, machine and slots.

    least_prefill_stages, least_decode_steps: Least size of a run that replaces kept costs.
    """

    folder: Path
    least_prefill_stages: int = 6
    least_decode_steps: int = 50

    @classmethod
    def of_user(cls) -> CostCache:
        """Return the cache in ``BATCHBOUND_COST_CACHE``, ``XDG_CACHE_HOME`` or ``~/.cache``."""
        named = os.environ.get("BATCHBOUND_COST_CACHE")
        if named:
            return cls(Path(named))
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls(Path(root) / "batchbound" / "costs")

    def keep(self, model: str, slots: int, costs: CalibratedCost) -> bool:
        """Save a long enough run's costs; return whether they were saved."""
        error = costs.error
        if error is None or error.prefill_stages < self.least_prefill_stages:
            return False
        if error.decode_steps < self.least_decode_steps:
            return False
        return _saved(costs, self._folder_of(model) / f"{_digest(_conditions(costs))}-{slots}.json")

    def find(self, model: str, slots: int, threads: int | None = None) -> CalibratedCost | None:
        """Return a model's costs: those with as many threads, the nearest slots, the newest.

        threads: CPU threads of the coming run; None if unknown.
        """
        costs: list[CalibratedCost] = []
        for _, _, path in sorted(self._kept(model), key=lambda entry: (abs(entry[0] - slots), -entry[1])):
            try:
                costs.append(CalibratedCost.load(path))
            except InputError:
                continue  # written by another version: the next run writes it again
        # The name of a processor ends with the threads of the run.
        of_threads = f" {threads} threads)"
        return min(
            costs,
            key=lambda cost: threads is not None and not str(cost.engine.get("device")).endswith(of_threads),
            default=None,
        )

    def keep_server(self, url: str, models: Sequence[str], rates: IterationRates) -> bool:
        """Save a server's costs of an iteration; return whether they were saved."""
        return _saved(rates, self._server(url, models))

    def find_server(self, url: str, models: Sequence[str]) -> IterationRates | None:
        """Return the costs of an iteration that an earlier run on a server measured."""
        path = self._server(url, models)
        try:
            return IterationRates.load(path) if path.is_file() else None
        except InputError:
            return None  # written by another version: the next run writes it again

    def _server(self, url: str, models: Sequence[str]) -> Path:
        return self.folder / "servers" / f"{_digest('|'.join([url, *models]))}.json"

    def _kept(self, model: str) -> Iterator[tuple[int, float, Path]]:
        for path in self._folder_of(model).glob("*-*.json"):
            slots = path.stem.rpartition("-")[2]
            if slots.isdecimal():
                yield int(slots), path.stat().st_mtime, path

    def _folder_of(self, model: str) -> Path:
        named = os.path.abspath(model) if Path(model).is_dir() else model
        return self.folder / f"{_digest(named)}-{_digest(platform.node())}"


def costs_of(trace: Trace) -> CalibratedCost | None:
    """Return costs fitted to a run's stages; None if too few."""
    from .executor.profiling.calibrate import calibrate

    try:
        return calibrate(trace.stages, engine=trace.engine, date=datetime.date.today().isoformat())
    except ValueError:
        return None


def _saved(costs: CalibratedCost | IterationRates, path: Path) -> bool:
    """Return whether costs could be saved: an unwritable cache must not fail the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        costs.save(path)
    except OSError:
        return False
    return True


def _conditions(costs: CalibratedCost) -> str:
    """Return a key of device, threads, dtype and KV layout."""
    return "|".join(str(costs.engine.get(name)) for name in ("device", "dtype", "tier"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
