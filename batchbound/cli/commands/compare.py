"""``batchbound compare``: run solvers and policies on the same instances."""

from __future__ import annotations

from ...comparing.files import compare
from ...options.compare import CompareOptions
from ...screen.compare import show

OPTIONS = CompareOptions


def run(options: CompareOptions) -> int:
    """Run every solver on every instance, and print the table."""
    return show(compare.of(options), options)
