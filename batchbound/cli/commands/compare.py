"""``batchbound compare``: run solvers and policies on the same instances."""

from __future__ import annotations

from ...comparing.files import compare
from ...options.compare import CompareOptions
from ...screen.studies import show_comparison

OPTIONS = CompareOptions


def run(options: CompareOptions) -> int:
    """Run every solver on every instance, and print the table."""
    return show_comparison(compare.of(options), options)
