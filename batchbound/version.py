"""Version of the package, and those that a bug report needs."""

from __future__ import annotations

__version__ = "0.2.0"

LIBRARIES = (
    "numpy", "scipy", "pandas", "highspy", "pyarrow", "torch", "transformers", "ortools", "pyscipopt", "ray",
    "trl", "lm-eval", "vllm",
)  # fmt: skip
"""Libraries whose versions matter in a bug report."""


class Versions(dict[str, str]):
    """Versions by name, printed a line each."""

    def __repr__(self) -> str:
        return "\n".join(f"{name:<16} {version}" for name, version in self.items())


def show_versions() -> Versions:
    """Return the versions of the package, the machine and installed libraries, for a bug report."""
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from .solvers.search.core.compiled import compiled_core

    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    versions = Versions(batchbound=__version__, Python=platform.python_version(), machine=machine)
    versions["compiled search"] = "not installed" if compiled_core() is None else "installed"
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
