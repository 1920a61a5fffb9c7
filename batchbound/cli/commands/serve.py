"""``batchbound serve``: run a serving policy on arriving requests."""

from __future__ import annotations

from ...options.serve import ServeOptions
from ...screen.serve import show
from ...serving import serve

OPTIONS = ServeOptions


def run(options: ServeOptions) -> int:
    """Simulate or serve, and print the figures."""
    return show(serve.of(options), options)
