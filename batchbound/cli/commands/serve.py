"""``batchbound serve``: run a serving policy on arriving requests."""

from __future__ import annotations

from ...options.serve import ServeOptions

OPTIONS = ServeOptions


def run(options: ServeOptions) -> int:
    """Simulate or serve, and print the figures."""
    from ...screen.studies import show_serving
    from ...serving import serve

    return show_serving(serve.of(options), options)
