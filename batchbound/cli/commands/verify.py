"""``batchbound verify``: check a plan's schedule and bound without the solver."""

from __future__ import annotations

from ...options.judging import VerifyOptions

OPTIONS = VerifyOptions


def run(options: VerifyOptions) -> int:
    """Check a plan, or compare two runs."""
    from ...checking import verify_file
    from ...screen.checks import show_verified

    return show_verified(verify_file.of(options), options)
