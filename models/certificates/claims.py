"""Claims of certificates: whole numbers in range, bounded work."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

MOST_STEPS = 100_000_000
"""Steps of plain code that a check may take, 0.3 us each."""


class RefutedError(Exception):
    """Error of a claim that does not hold: rule and message."""


class Work:
    """Steps that a check may still take."""

    def __init__(self, steps: int = MOST_STEPS) -> None:
        self.allowed = self.left = steps

    def spend(self, steps: int = 1) -> None:
        """Count steps before they are done."""
        self.left -= steps
        if self.left < 0:
            raise RefutedError("a certificate is small", f"its check takes more than {self.allowed:,} steps")


def whole(claim: Mapping[str, Any], name: str, rule: str, least: int = 0) -> int:
    """Return a whole number of a claim."""
    return _whole(claim.get(name), name, rule, least)


def wholes(claim: Mapping[str, Any], name: str, rule: str, least: int = 0) -> list[int]:
    """Return the whole numbers that a claim lists."""
    return [_whole(value, name, rule, least) for value in entries(claim, name)]


def fullest_slot(decode_steps: list[int], slots: int, claim: Mapping[str, Any]) -> int:
    """Return the decode steps of the fullest slot, by a claim."""
    heaviest = sorted(decode_steps, reverse=True)[: whole(claim, "heaviest", "decode_steps")]
    group = whole(claim, "machines", "decode_steps", least=1)
    if group > slots:
        raise RefutedError("decode_steps", f"{group} of {slots} slots cannot be chosen")
    # The fullest `group` slots hold this many of the heaviest: spread evenly is the least they can hold.
    requests = group * (len(heaviest) // slots) + min(group, len(heaviest) % slots)
    return -(-sum(sorted(heaviest)[:requests]) // group)


def entries(claim: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list of a claim; raise RefutedError if it is none."""
    value = claim.get(name)
    if not isinstance(value, list):
        raise unreadable(name, value, "a list")
    return value


def unreadable(name: str, value: object, expected: str) -> RefutedError:
    """Return the error of a field with an unexpected value."""
    return RefutedError("a certificate is readable", f"{name} is {reprlib.repr(value)}, not {expected}")


def prices(claim: Mapping[str, Any], rule: str) -> dict[int, int]:
    """Return a claim's price of each length."""
    lengths, listed = wholes(claim, "lengths", rule), wholes(claim, "prices", rule)
    price = dict(zip(lengths, listed, strict=False))
    if len(price) != len(lengths) or len(listed) != len(lengths):
        what = f"{len(listed)} prices for {len(lengths)} lengths, {len(set(lengths))} of them different"
        raise RefutedError(rule, what)
    return price


def _whole(value: object, name: str, rule: str, least: int) -> int:
    if type(value) is not int:
        raise unreadable(name, value, "a whole number")
    if value < least:
        raise RefutedError(rule, f"{name} is {value}, less than {least}")
    return value
