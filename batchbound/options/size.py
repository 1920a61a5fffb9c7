"""Options of ``batchbound size``."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from typing import Annotated, Literal

from ..data.files.errors import InputError
from .option import Option, PathText, everyday, option
from .problem import LENGTHS, PromptTable
from .values import AnyPath, File, Name, TokenCount

_ROWS = "prompts or a table of lengths, as in `plan`"
_CONFIG = "config.json of the model, or its folder; no weights are read"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _duration(text: str) -> float:
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    units = [unit for _, unit in parts]
    if not seconds or "".join(map("".join, parts)) != text or len(set(units)) < len(units):
        raise ValueError(f"{text!r} is no time: write 8h, 1h30m, 90m, 3600s or 2d")
    return seconds


def _until(text: str, now: datetime) -> float:
    """Return the seconds until a time of day, or a date with a time."""
    try:
        of_day = "-" not in text
        end = datetime.fromisoformat(f"{now:%Y-%m-%d}T{text:0>5}" if of_day else text)
        end += timedelta(days=of_day and end <= now)
        left = (end - (now if end.tzinfo is None else now.astimezone())).total_seconds()
    except ValueError:
        raise ValueError(f"{text!r} is no time: write 07:00 or 2026-12-01T07:00") from None
    if left <= 0:
        raise ValueError(f"{text} is over")
    return left


@dataclass(frozen=True)
class SizeOptions(PromptTable):
    """Requests, their completion windows, the model, and devices with prices."""

    TITLE = ""

    rows: Annotated[PathText, Option(_ROWS, positional=True, metavar="ROWS")]
    more: tuple[PathText, ...] = option(
        (), "further jobs on the same deployment", positional=True, metavar="ROWS", words="*"
    )
    _: KW_ONLY
    model: Annotated[PathText, Option(_CONFIG, everyday=True, metavar="CONFIG")]
    by: tuple[str, ...] = everyday(
        (),
        "time by which a job must be done, as 07:00 or 2026-12-01T07:00; once for all jobs, or once for each",
        metavar="TIME",
        words="append",
        excludes=("within",),
    )
    within: tuple[str, ...] = everyday(
        (), "the same as a duration from now: 8h, 1h30m, 2d", metavar="DURATION", words="append"
    )
    devices: tuple[str, ...] = everyday(
        (),
        "kinds of devices, as h100,l40s (default: those of --prices)",
        metavar="NAME,NAME",
        parse=lambda text: tuple(dict.fromkeys(filter(None, text.split(",")))),
    )
    prices: File | None = everyday(
        None,
        "TOML file with a table for each device: price of a device-hour, most (devices, default 64), startup"
        " (seconds until a replica serves, assumed if not stated); for a device of your own also flops and"
        " bandwidth (a second: 989e12, 3.35e12 bytes) and memory (80e9 bytes)",
    )
    lengths: str | None = everyday(None, LENGTHS, metavar="SOURCE")
    longest_completion: TokenCount | None = everyday(None, "maximum tokens of a completion, as in `plan`")
    tokenizer: Name | None = option(
        None, "tokenizer that counts prompts: a directory or a hub name (default: a token per four bytes)"
    )
    profile: tuple[AnyPath, ...] = option(
        (),
        "layer profile of the model on one of the devices, in place of the estimate from its rates; one for"
        " each tensor-parallel degree",
        words="append",
    )
    quantization: Literal["fp8"] | None = option(None, "quantise the weights as vLLM's --quantization does")
    picture: File | None = everyday(None, "draw cost against finish time as .png or .svg", writes=True)
    overwrite: bool = option(False, "replace the picture if it exists", needs=("picture",))
    json: bool = option(False, "print one JSON object instead of tables")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("more", "by", "within", "devices"):
            # One text is one value, not its letters.
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))

    @property
    def files(self) -> tuple[PathText, ...]:
        """Files of the jobs."""
        return (self.rows, *self.more)

    def windows(self, now: datetime) -> tuple[float, ...]:
        """Return the seconds until each job's deadline."""
        try:
            seconds = [_until(text, now) for text in self.by] or [_duration(text) for text in self.within]
        except ValueError as error:
            raise InputError(str(error), where="--by" if self.by else "--within") from None
        if len(seconds) not in (1, len(self.files)):
            what = f"{len(seconds)} windows for {len(self.files)} jobs" if seconds else "no window"
            raise InputError(what, hint="Give --by 07:00 or --within 8h once, or once for each job.")
        return tuple(seconds * len(self.files) if len(seconds) == 1 else seconds)
