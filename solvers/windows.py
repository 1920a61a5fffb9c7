"""Order of jobs that keeps the most completion windows."""

from __future__ import annotations

from collections.abc import Sequence


def keep_most(seconds: Sequence[float], windows: Sequence[float]) -> tuple[list[int], list[int]]:
    """Return the jobs kept, in an order that keeps them, and the late ones.

    By Moore and Hodgson: in order of deadline, the longest job leaves whenever one would be late. No order of
    jobs that begin together keeps more of them.

    seconds: Seconds of each job.
    windows: Seconds until each job's deadline.
    """
    kept, late, end = list[int](), list[int](), 0.0
    for job in sorted(range(len(windows)), key=lambda job: windows[job]):
        kept.append(job)
        end += seconds[job]
        if end > windows[job]:
            longest = max(kept, key=lambda other: seconds[other])
            kept.remove(longest)
            late.append(longest)
            end -= seconds[longest]
    return kept, sorted(late, key=lambda job: windows[job])
