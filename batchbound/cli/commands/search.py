"""``batchbound search``: find the fastest configuration under a latency bound."""

from __future__ import annotations

from ...options.search import SearchOptions
from ...screen.search import show
from ...searching import search

OPTIONS = SearchOptions


def run(options: SearchOptions) -> int:
    """Search, print the table and write the plan."""
    return show(search.of(options), options)
