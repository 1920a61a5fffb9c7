"""Devices on offer: their rates and prices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..data.files.disk import InputError, read_toml
from ..data.files.record import Positive, record, refuse_unknown
from ..models.exegpt.roofline import ROOFLINE_DEVICES, RooflineDevice
from ..options.option import PathText

_HINT = "Write a table for each device: [h100-80gb], then price = 2.5."


_LEAST_RATE = 1e9
"""Least rate of a device in operations or bytes; a smaller one is in another unit."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Device that can be had.

    price: Money for a device-hour; None if unknown.
    most: Most devices.
    startup: Seconds until a replica serves; None for an estimate.
    flops, bandwidth, memory, flops_8bit, flops_4bit: Rates as :class:`.RooflineDevice`; zero for a known one.
    """

    name: str
    price: float | None = None
    most: Positive = 64
    startup: float | None = None
    flops: float = 0.0
    bandwidth: float = 0.0
    memory: float = 0.0
    flops_8bit: float = 0.0
    flops_4bit: float = 0.0

    def __post_init__(self) -> None:
        for name in ("price", "startup"):
            if not 0 <= (getattr(self, name) or 0.0) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name, usual in (("flops", 989e12), ("bandwidth", 3.35e12), ("memory", 80e9)):
            if 0 < (rate := getattr(self, name)) < _LEAST_RATE:
                unit = {"flops": "operations a second", "bandwidth": "bytes a second"}.get(name, "bytes")
                raise ValueError(f"{name} is {rate:g}; give {unit}, as {usual:g}")
        _ = self.device

    @property
    def device(self) -> RooflineDevice:
        """The device's rates."""
        rates = self.flops, self.bandwidth, self.memory, self.flops_8bit, self.flops_4bit
        return RooflineDevice(self.name, *rates) if any(rates) else ROOFLINE_DEVICES[self.name]


def read_offers(names: Sequence[str], prices: PathText | None) -> tuple[Offer, ...]:
    """Return the named devices with their prices, or all that have one.

    Raises InputError for an unknown device, or one without a price in a file of prices.
    """
    if not names and prices is None:
        raise InputError("no device is named", hint="Give --devices h100,l40s, or --prices FILE.")
    tables = {name: {} for name in names} if prices is None else read_toml(prices)
    offers = {}
    for name, table in tables.items():
        stated = table if isinstance(table, dict) else {"price": table}
        refuse_unknown(Offer, stated, file=prices, within=name, hint=_HINT)
        own = stated.keys() & {"flops", "bandwidth", "memory"}
        known = name if own else _matching(name, ROOFLINE_DEVICES, prices)
        offers[known] = record(Offer, {**stated, "name": known}, file=prices, within=name, hint=_HINT)
    if not offers:
        raise InputError("names no device", file=prices, hint=_HINT)
    chosen = [offers[_matching(name, offers, prices)] for name in names] or list(offers.values())
    unpriced = [offer.name for offer in chosen if offer.price is None]
    if 0 < len(unpriced) < len(chosen):
        raise InputError("has no price, while others have", file=prices, where=unpriced[0], hint=_HINT)
    return tuple(dict.fromkeys(chosen))


def _matching(name: str, known: Collection[str], file: PathText | None) -> str:
    """Return the device with a name, or the only one whose name begins with it."""
    begun = [name] if name in known else [device for device in known if device.startswith(name.lower())]
    if len(begun) == 1:
        return begun[0]
    unknown = "no device with known rates" if known is ROOFLINE_DEVICES else "no device with a price"
    what = f"{name!r} names {'several devices' if begun else unknown}"
    hint = f"Did you mean {' or '.join(begun)}?" if begun else f"There are {', '.join(known)}."
    raise InputError(what, file=file, hint=hint)
