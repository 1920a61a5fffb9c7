"""What the paper served: its models on its machine, and its traces."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from prediction import PredictorErrors

from batchbound.data.costs.iteration_cost import MixedCost, read_distserve_cost

FORWARD = 1024
"""Target forward size: 85 % of the greatest rate at DistServe's prefill costs, 0.12 s an iteration."""
PCIE, ETHERNET = 25e9, 12.5e9
"""Bytes per second, to the host and between machines (100 Gb/s)."""


@dataclass(frozen=True, slots=True)
class Served:
    """
    A model on the paper's machine: its name and devices in DistServe's file, its shape and KV memory.

    ``weights`` are those of the linear layers. A model that the file lacks names no fit of its own.
    ``orca_batch`` is the paper's for ORCA.
    """

    name: str | None
    devices: int
    layers: int
    width: int
    weights: float
    kv_memory: float
    orca_batch: int = 8

    @property
    def kv_bytes(self) -> int:
        """Of one token: keys and values, two bytes each."""
        return 2 * self.layers * self.width * 2

    @property
    def capacity(self) -> int:
        """Tokens of keys and values."""
        return int(self.kv_memory / self.kv_bytes)

    def cost(self, data: Path) -> MixedCost:
        """Return the cost of its iterations."""
        moves = {
            "swap_per_token": self.kv_bytes / (PCIE * self.devices),
            "transfer_per_token": self.kv_bytes / ETHERNET,
        }
        file = data / "distserve" / "profiler-a100-80g.distserve.json"
        if self.name is not None:
            return read_distserve_cost(file, self.name, self.devices, **moves)
        return replace(self._scaled(file), **moves)

    def _scaled(self, file: Path) -> MixedCost:
        """
        Return OPT-66B's cost on as many devices, scaled.

        What reads keys and values or pairs tokens goes by layers times width. All else goes by a power of the
        weights: that between OPT-13B and OPT-66B, coefficient by coefficient, at the greatest number of
        devices, of no more than ours, that the file has for both.
        """
        common = min(self.devices, 4)
        small, large = MODELS["opt-13b"], MODELS["opt-66b"]
        assert small.name is not None
        assert large.name is not None
        from_ = asdict(read_distserve_cost(file, small.name, common))
        to = asdict(read_distserve_cost(file, large.name, common))
        base = asdict(read_distserve_cost(file, large.name, self.devices))
        scaled = {}
        for name, value in base.items():
            if name.endswith(("kv_token", "pair")):
                scaled[name] = value * (self.layers * self.width) / (large.layers * large.width)
            elif value:
                power = math.log(to[name] / from_[name]) / math.log(large.weights / small.weights)
                scaled[name] = value * (self.weights / large.weights) ** power
            else:
                scaled[name] = value
        return MixedCost(**scaled)


def _opt(layers: int, width: int) -> float:
    return 12.0 * layers * width**2


MODELS = {
    "opt-13b": Served("facebook/opt-13b", 1, 40, 5120, _opt(40, 5120), 12e9),
    "llama-33b": Served(None, 2, 60, 6656, 60 * (4.0 * 6656**2 + 3 * 6656 * 17920), 19.2e9),
    "opt-175b": Served(None, 8, 96, 12288, _opt(96, 12288), 264e9, 16),
    "opt-66b": Served("facebook/opt-66b", 4, 64, 9216, _opt(64, 9216), 185e9),
}
"""The paper's three, with its memory for keys and values, and OPT-66B with the memory DistServe found for it
(78,496 tokens)."""


@dataclass(frozen=True, slots=True)
class Trace:
    """
    A trace's settings in the paper, and what it reports of the errors of predicted lengths.

    ``longest`` is what max-allocation promises, ``minutes`` what is simulated unless said otherwise.
    """

    rate: float
    longest: int
    reserved: float
    buffer: float
    errors: PredictorErrors
    minutes: float


TRACES = {
    "alpaca": Trace(36.0, 2048, 0.02, 0.15, PredictorErrors(0.10, 0.775, 0.0262, 0.0930), 3.0),
    "sharegpt": Trace(28.0, 2048, 0.03, 0.15, PredictorErrors(0.15, 0.732, 0.0562, 0.1342), 5.0),
    "bookcorpus": Trace(1.2, 3089, 0.04, 0.10, PredictorErrors(0.20, 0.698, 0.0512, 0.2192), 30.0),
}
