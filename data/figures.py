"""Figures as text: numbers, seconds and shares."""

from __future__ import annotations

EXACT = 1e-9
"""Largest gap that counts as none: rounding of floating point."""


def number(value: float) -> str:
    """Return a number with two digits after the point, fewer for a large one."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def clock_text(seconds: float) -> str:
    """Return seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def duration(seconds: float) -> str:
    """Return seconds in ms or s, long ones also as h:mm:ss."""
    if seconds < 60:
        return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * 1e3)} ms"
    return f"{number(seconds)} s ({clock_text(seconds)})"


def short_duration(seconds: float) -> str:
    """Return seconds with three digits, from 100 s on as h:mm:ss."""
    if seconds >= 99.95:
        return clock_text(seconds)
    unit, value = ("s", seconds) if seconds >= 0.9995 else ("ms", 1e3 * seconds)
    return f"{value:#.3g}".rstrip(".") + f" {unit}"


def exact_duration(seconds: float) -> str:
    """Return seconds to the millisecond, from one minute on also as h:mm:ss."""
    text = f"{seconds:,.3f} s"
    return text if seconds < 60 else f"{text} ({clock_text(seconds)})"


def percent(share: float, digits: int = 1) -> str:
    """Return a share in per cent."""
    return f"{100 * share:z.{digits}f} %"


def signed_percent(share: float) -> str:
    """Return a share in per cent with its sign."""
    return f"{100 * share:+z.1f} %"


def gap_text(gap: float) -> str:
    """Return a gap to a bound in per cent; only an exact one is 0%."""
    if gap <= EXACT:
        return "0%"
    if gap < 0.001:
        return "under 0.1%"
    return f"{gap:.1%}" if gap < 0.01 else f"{gap:.0%}"


def percentage(share: float | None) -> str | None:
    """Return a share in per cent, or None."""
    return None if share is None else f"{share:.2%}"


def seconds(value: float | None) -> str | None:
    """Return seconds with their unit, or None."""
    return None if value is None else f"{value:,.4g} s"
