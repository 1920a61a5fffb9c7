"""``batchbound compare``: run solvers and policies on the same instances."""

from __future__ import annotations

from ...options.compare import CompareOptions

OPTIONS = CompareOptions


def run(options: CompareOptions) -> int:
    """Run every solver on every instance, and print the table."""
    from ...comparing.files import compare
    from ...screen.studies import show_comparison

    return show_comparison(compare.of(options), options)
