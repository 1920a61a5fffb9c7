"""``batchbound search``: find the fastest configuration under a latency bound."""

from __future__ import annotations

from ...options.search import SearchOptions

OPTIONS = SearchOptions


def run(options: SearchOptions) -> int:
    """Search, print the table and write the plan."""
    from ...screen.search import show
    from ...searching import search

    return show(search.of(options), options)
