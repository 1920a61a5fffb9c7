"""Builds the compiled search; everything else of the package is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

CORE = Path("solvers/search/core")

setup(
    ext_modules=[
        Extension(
            "batchbound.solvers.search.core._core",  # a plain library with C functions, loaded by ctypes
            [str(CORE / "core.cpp")],
            depends=[str(path) for path in sorted(CORE.glob("*.hpp"))],
            language="c++",
            # Without contracted products a plan is the same on every processor.
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden"],
            optional=True,  # without a compiler plans come from baselines and the searches in Python
        )
    ]
)
