"""Costs that earlier runs measured, kept in the user's cache folder for the next plan and run."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .data.costs.calibration import CalibratedCost
from .data.files.disk import InputError
from .data.trace import Trace


@dataclass(frozen=True, slots=True)
class CostCache:
    """
    A folder of measured costs, a file for each model, machine, device, dtype and number of slots.

    folder: Made when the first costs are kept.
    least_prefill_stages, least_decode_steps: A run with fewer of either does not replace what is kept; larger
        values keep costs longer.
    """

    folder: Path
    least_prefill_stages: int = 6
    least_decode_steps: int = 50

    @classmethod
    def of_user(cls) -> CostCache:
        """Return the user's cache: ``BATCHBOUND_COST_CACHE``, else in ``XDG_CACHE_HOME`` or ``~/.cache``."""
        named = os.environ.get("BATCHBOUND_COST_CACHE")
        if named:
            return cls(Path(named))
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls(Path(root) / "batchbound" / "costs")

    def keep(self, model: str, slots: int, found: CalibratedCost) -> bool:
        """Keep the costs of a run unless it was too short; return whether they were kept."""
        error = found.error
        if error is None or error.prefill_stages < self.least_prefill_stages:
            return False
        if error.decode_steps < self.least_decode_steps:
            return False
        path = self._folder_of(model) / f"{_digest(_conditions(found))}-{slots}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path)
        except OSError:
            # A home that cannot be written costs the next plan its costs, and this run nothing.
            return False
        return True

    def find(self, model: str, slots: int) -> CalibratedCost | None:
        """Return what was kept of a model on this machine: nearest in slots, then newest; None if nothing."""
        kept = sorted(self._kept(model), key=lambda one: (abs(one[0] - slots), -one[1]))
        for _, _, path in kept:
            try:
                return CalibratedCost.load(path)
            except InputError:
                continue  # written by another version: the next run writes it again
        return None

    def _kept(self, model: str) -> Iterator[tuple[int, float, Path]]:
        """Yield the slots, the time and the path of each file of a model."""
        for path in self._folder_of(model).glob("*-*.json"):
            slots = path.stem.rpartition("-")[2]
            if slots.isdecimal():
                yield int(slots), path.stat().st_mtime, path

    def _folder_of(self, model: str) -> Path:
        named = os.path.abspath(model) if Path(model).is_dir() else model
        return self.folder / f"{_digest(named)}-{_digest(platform.node())}"


def costs_of(trace: Trace) -> CalibratedCost | None:
    """Return the costs that a run's own stages show; None where they are too few to fit."""
    from .executor.profiling.calibrate import calibrate

    try:
        return calibrate(trace.stages, engine=trace.engine, date=datetime.date.today().isoformat())
    except ValueError:
        return None


def _conditions(found: CalibratedCost) -> str:
    """Return what else decides the costs: device with its threads, dtype and layout of the KV cache."""
    return "|".join(str(found.engine.get(name)) for name in ("device", "dtype", "tier"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
