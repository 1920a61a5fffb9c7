"""Options of the link between the devices of a model."""

from __future__ import annotations

from dataclasses import dataclass

from ..data.costs.link import LINKS, Link, usual_link
from ..data.files.disk import InputError
from .option import Options, option
from .values import AtLeastZero, Seconds

LINK = ("link", "link_bandwidth", "link_latency")
"""Names of the options."""


@dataclass(frozen=True, kw_only=True)
class LinkOptions(Options):
    """Link between the devices of a model."""

    link: str | None = option(
        None,
        "link between the devices (default: the usual link of the profile's device)",
        choices=tuple(sorted(LINKS)),
    )
    link_bandwidth: Seconds | None = option(
        None,
        "one-way bandwidth of the link in 10^9 bytes per second (default: that of --link)",
        metavar="GB/S",
    )
    link_latency: AtLeastZero | None = option(
        None,
        "latency of a small collective operation in microseconds (default: that of --link)",
        metavar="US",
    )

    def link_of(self, device: str) -> Link | None:
        """Return the link of the options, or the device's usual one."""
        known = LINKS[self.link] if self.link else usual_link(device)
        bandwidth, latency = self.link_bandwidth, self.link_latency
        if bandwidth is None and latency is None:
            return known
        if known is None and (bandwidth is None or latency is None):
            missing = "--link-bandwidth" if bandwidth is None else "--link-latency"
            hint = "Give both, or name a --link."
            raise InputError(f"the link of {device} is not known", where=missing, hint=hint)
        return Link(
            "given",
            known.bandwidth if known and bandwidth is None else float(bandwidth or 0.0) * 1e9,
            known.latency if known and latency is None else float(latency or 0.0) * 1e-6,
            "as given",
        )
