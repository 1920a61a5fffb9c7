"""Figures as text: numbers, seconds and shares."""

from __future__ import annotations


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


def percentage(share: float | None) -> str | None:
    """Return a share in per cent, or None."""
    return None if share is None else f"{share:.2%}"


def seconds(value: float | None) -> str | None:
    """Return seconds with their unit, or None."""
    return None if value is None else f"{value:,.4g} s"
