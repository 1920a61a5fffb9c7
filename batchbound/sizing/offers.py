"""Devices on offer: their rates and prices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..data.files.disk import InputError, read_toml
from ..data.files.record import Positive, record, refuse_unknown
from ..models.exegpt.roofline import ROOFLINE_DEVICES, RooflineDevice
from ..options.option import PathText

MOST = 64
"""Devices of a kind that are tried by default."""

_HINT = "Write a table for each device: [h100-80gb], then price = 2.5."


@dataclass(frozen=True, slots=True)
class _Entry:
    price: float | None = None
    most: Positive = MOST
    startup: float | None = None
    flops: float | None = None
    bandwidth: float | None = None
    memory: float | None = None
    flops_8bit: float = 0.0
    flops_4bit: float = 0.0

    def __post_init__(self) -> None:
        for name in ("price", "startup"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; it must be at least 0")


@dataclass(frozen=True, slots=True)
class Offer:
    """Device that can be had.

    price: Money for a device-hour; None if unknown.
    most: Most devices.
    startup: Seconds until a replica serves; None for an estimate.
    """

    device: RooflineDevice
    price: float | None = None
    most: int = MOST
    startup: float | None = None


def read_offers(names: Sequence[str], prices: PathText | None) -> tuple[Offer, ...]:
    """Return the named devices with their prices, or all that have one.

    Raises InputError for an unknown device, or one without a price in a file of prices.
    """
    tables = {} if prices is None else read_toml(prices)
    offers = {}
    for name, table in tables.items():
        refuse_unknown(_Entry, table, file=prices, within=name, hint=_HINT)
        entry = record(_Entry, table, file=prices, within=name, hint=_HINT)
        device = (
            _own(name, entry, prices)
            if entry.flops is not None
            else ROOFLINE_DEVICES[_matching(name, ROOFLINE_DEVICES, prices)]
        )
        offers[device.name] = Offer(device, entry.price, entry.most, entry.startup)
    if not names and prices is None:
        raise InputError("no device is named", hint="Give --devices h100,l40s, or --prices FILE.")
    if prices is None:
        known = [_matching(name, ROOFLINE_DEVICES, None) for name in names]
        offers = {name: Offer(ROOFLINE_DEVICES[name]) for name in known}
    chosen = [_matching(name, offers, prices) for name in names] or list(offers)
    return tuple(offers[name] for name in dict.fromkeys(chosen))


def _own(name: str, entry: _Entry, file: PathText | None) -> RooflineDevice:
    try:
        rates = entry.flops or 0.0, entry.bandwidth or 0.0, entry.memory or 0.0
        return RooflineDevice(name, *rates, entry.flops_8bit, entry.flops_4bit)
    except ValueError as error:
        hint = "Give flops, bandwidth and memory."
        raise InputError(str(error), file=file, where=f"table [{name}]", hint=hint) from None


def _matching(name: str, known: Collection[str], file: PathText | None) -> str:
    """Return the device with a name, or the only one whose name begins with it."""
    begun = [name] if name in known else [device for device in known if device.startswith(name.lower())]
    if len(begun) == 1:
        return begun[0]
    unknown = "no device with known rates" if known is ROOFLINE_DEVICES else "no device with a price"
    what = f"{name!r} names {'several devices' if begun else unknown}"
    hint = f"Did you mean {' or '.join(begun)}?" if begun else f"There are {', '.join(known)}."
    raise InputError(what, file=file, hint=hint)
