"""``batchbound size``: find the cheapest machines that finish jobs in their windows."""

from __future__ import annotations

from ...options.size import SizeOptions

OPTIONS = SizeOptions


def run(options: SizeOptions) -> int:
    """Size the deployment, and print it."""
    from ...screen.size import show
    from ...sizing.files import size

    return show(size.of(options), options)
