"""Progress on stderr, for work that takes more than a second."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..executor.reports.tables import clock_text
from .output import is_quiet

if TYPE_CHECKING:
    from ..executor.jobs.plan_clock import Standing


@contextlib.contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how much is done."""
    from tqdm import tqdm

    with tqdm(
        total=total, unit=f" {unit}", delay=1.0, file=sys.stderr, mininterval=0.2, disable=is_quiet()
    ) as bar:

        def advance(done: int) -> None:
            bar.update(done - bar.n)

        yield advance


@contextlib.contextmanager
def plan_progress(begin: Standing) -> Iterator[Callable[[Standing], None]]:
    """
    Yield a function that is told where a run stands in its plan.

    Parameters
    ----------
    begin
        Where it stands at first: the bar of a job that resumes goes on from there.
    """
    from tqdm import tqdm

    with tqdm(
        total=begin.planned,
        initial=begin.done,
        delay=1.0,
        file=sys.stderr,
        mininterval=0.2,
        bar_format="{percentage:3.0f}%|{bar:20}| {desc}",
        disable=is_quiet(),
    ) as bar:

        def advance(standing: Standing) -> None:
            bar.set_description_str(standing_text(standing, datetime.datetime.now()), refresh=False)
            # Rounded sums may pass the end by a hair, which a bar warns of.
            bar.update(min(standing.done, begin.planned) - bar.n)

        yield advance


def standing_text(standing: Standing, now: datetime.datetime) -> str:
    """Return where a run stands in its plan, in a line."""
    text = f"{standing.done:,.1f} of {standing.planned:,.1f} planned s at {standing.slowdown:.2f} x"
    end = now + datetime.timedelta(seconds=standing.left)
    day = "" if end.date() == now.date() else f"{end:%a} "
    text += f", {clock_text(standing.left)} left, done {day}{end:%H:%M:%S}"
    if standing.longer:
        text += f", {standing.longer:,} completions longer than planned"
    return text if standing.gap is None else f"{text}, gap {standing.gap:.1%}"
