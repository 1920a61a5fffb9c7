"""``batchbound profile``: measure a model on this machine."""

from __future__ import annotations

from ...options.profile import ProfileOptions

OPTIONS = ProfileOptions


def run(options: ProfileOptions) -> int:
    """Measure the model and write its costs."""
    from ...profiling import profile
    from ...screen.profile import show

    return show(profile.of(options), options)
