"""Builds the C kernels. Everything else about the package is in pyproject.toml.

The library is loaded with ctypes, so it needs no Python headers and one build serves every Python from 3.11 on. It is
optional: without a compiler the package installs all the same and runs on the torch fallback.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup  # type: ignore[import-untyped]

SOURCES = Path("src/stormtorch/native/csrc")

setup(
    ext_modules=[
        Extension(
            "stormtorch.native._storm",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            # The order of roundings is a specification (adamw.h): no contraction, and no fast-math that a user's CFLAGS
            # may ask for. Without errno and traps square roots vectorise; neither changes a result.
            extra_compile_args=[
                "-std=c11",
                "-O3",
                "-g0",
                "-fno-fast-math",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fvisibility=hidden",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
