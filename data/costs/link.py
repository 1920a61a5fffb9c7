"""Link between devices that share a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Link:
    """Connection of the devices of a group.

    name: Name in options.
    bandwidth: Bytes per second that a device sends and receives at the same time.
    latency: Seconds of a collective operation on very little data.
    source: Origin of both numbers in a sentence.
    """

    name: str
    bandwidth: float
    latency: float
    source: str

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise ValueError(
                f"link {self.name!r}: {self.bandwidth:g} bytes a second and {self.latency:g} s of latency;"
                " the bandwidth must be positive, the latency zero or more"
            )

    def text(self) -> str:
        """Return the link in a line."""
        rates = f"{self.bandwidth / 1e9:g} GB/s, {self.latency * 1e6:g} us"
        return f"link {self.name}: {rates} ({self.source})"

    def all_reduce_seconds(self, devices: int, data: float) -> float:
        """Return the seconds of a ring all-reduce."""
        if devices == 1:
            return 0.0
        return self.latency + 2 * (devices - 1) / devices * data / self.bandwidth

    def gather_seconds(self, devices: int, data: float) -> float:
        """Return the seconds of an all-gather or a reduce-scatter."""
        if devices == 1:
            return 0.0
        return self.latency + (devices - 1) / devices * data / self.bandwidth


_ASSUMED = "bandwidth one way from the data sheet; latency assumed, measure it with nccl-tests"
LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link(
            "pcie5-rtxpro6000", 16e9, 20e-6,
            "two RTX PRO 6000, PCIe 5.0 x16: the link of LLMServingSim's validation of whole vLLM runs;"
            " a step pays more around a collective than a microbenchmark (pcie5-rtxpro6000-nccl) shows",
        ),
        Link(
            "pcie5-rtxpro6000-nccl", 38.16e9, 12.7e-6,
            "NCCL all-reduce between two RTX PRO 6000, PCIe 5.0 x16, as LLMServingSim's hardware.yaml of"
            " 2026-09-26 publishes it: 12.7 us for 4 KiB, 35.54 GiB/s",
        ),
        Link("pcie4", 31.5e9, 20e-6, "PCIe 4.0 x16: " + _ASSUMED),
        Link("pcie5", 63e9, 15e-6, "PCIe 5.0 x16: " + _ASSUMED),
        Link("nvlink3", 300e9, 10e-6, "A100's NVLink: " + _ASSUMED),
        Link("nvlink4", 450e9, 10e-6, "H100's and H200's NVLink: " + _ASSUMED),
        Link("nvlink5", 900e9, 10e-6, "B200's and B300's NVLink: " + _ASSUMED),
    )
}  # fmt: skip
FREE_LINK = Link("none", float("inf"), 0.0, "a link without transfer times")
DEVICE_LINKS: Mapping[str, str] = {
    "RTXPRO6000": "pcie5-rtxpro6000",
    "RTX4090": "pcie4",
    "a40": "pcie4",
    "rtx4090": "pcie4",
    "a100-80gb": "nvlink3",
    "h100-80gb": "nvlink4",
    "h200": "nvlink4",
    "b200": "nvlink5",
    "b300": "nvlink5",
    "gb200": "nvlink5",
}
"""Usual link of a device, by name."""


def usual_link(device: str) -> Link | None:
    """Return a device's usual link; None if unknown.

    ``H100`` and ``H100-80GB-HBM3`` match h100-80gb: one name may be the other's beginning, up to a whole
    word.
    """
    beginnings = _beginnings(device)
    for name, link in DEVICE_LINKS.items():
        known = _beginnings(name)
        if beginnings and (beginnings[-1] in known or known[-1] in beginnings):
            return LINKS[link]
    return None


def _beginnings(device: str) -> list[str]:
    """Return the beginnings of a name that end with a word."""
    return list(accumulate(re.findall(r"[a-z0-9]+", device.lower())))
