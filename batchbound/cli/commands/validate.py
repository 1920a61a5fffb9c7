"""``batchbound validate``: print the simulator's error against a measured run."""

from __future__ import annotations

from ...options.judging import ValidateOptions

OPTIONS = ValidateOptions


def run(options: ValidateOptions) -> int:
    """Simulate the run, and print the errors."""
    from ...checking import validate
    from ...screen.checks import show_validated

    return show_validated(validate.of(options), options)
