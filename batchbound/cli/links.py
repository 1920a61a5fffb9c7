"""Options for the link between the devices of a model."""

from __future__ import annotations

import argparse

from ..data.costs.link import LINKS, Link, usual_link
from ..data.files.disk import InputError
from .inputs import at_least_zero, seconds
from .output import note
from .parser import Group, Parser

LINK_OPTIONS = ("link", "link_bandwidth", "link_latency")


def add_link(parser: Parser | Group) -> None:
    """Add the options that :func:`link_of` reads."""
    parser.add_argument(
        "--link",
        choices=sorted(LINKS),
        help="link between the devices (default: the usual link of the profile's device)",
    )
    parser.add_argument(
        "--link-bandwidth",
        type=seconds,
        metavar="GB/S",
        help="one-way bandwidth of the link in 10^9 bytes per second (default: that of --link)",
    )
    parser.add_argument(
        "--link-latency",
        type=at_least_zero,
        metavar="US",
        help="latency of a small collective operation in microseconds (default: that of --link)",
    )


def link_of(args: argparse.Namespace, device: str) -> Link | None:
    """Return the link of the options, or the device's usual one."""
    known = LINKS[args.link] if args.link else usual_link(device)
    bandwidth, latency = args.link_bandwidth, args.link_latency
    if bandwidth is None and latency is None:
        return known
    if known is None and (bandwidth is None or latency is None):
        missing = "--link-bandwidth" if bandwidth is None else "--link-latency"
        hint = "Give both, or name a --link."
        raise InputError(f"the link of {device} is not known", where=missing, hint=hint)
    return Link(
        "given",
        known.bandwidth if known and bandwidth is None else float(bandwidth) * 1e9,
        known.latency if known and latency is None else float(latency) * 1e-6,
        "as given",
    )


def say_link(link: Link) -> None:
    """Note the link on stderr."""
    note(f"link {link.name}: {link.bandwidth / 1e9:g} GB/s, {link.latency * 1e6:g} us ({link.source})")
