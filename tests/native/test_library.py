"""Finding the library, refusing one that does not fit, and saying so."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormtorch.native import library as module
from stormtorch.native.library import Library, describe, library


def test_description_names_the_instruction_set(native: Library) -> None:
    assert describe() == f"native kernels: {native.isa}"
    assert native.isa == list(native.isas)[-1]


def test_a_library_of_another_version_counts_as_missing(native: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native is library()
    monkeypatch.setattr(module, "ABI", 99)
    module._load.cache_clear()
    try:
        assert library() is None
        assert "needs 99; install the package again" in describe()
        assert "using the torch fallback" in describe()
    finally:
        module._load.cache_clear()


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    broken = tmp_path / "_storm.abi3.so"
    broken.write_bytes(b"not an ELF file")
    assert str(module._open(broken)).startswith("_storm.abi3.so does not load: ")


def test_no_file_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "library.py"))
    module._load.cache_clear()
    try:
        assert library() is None
        assert describe().startswith("native kernels: not in use (installed without a working C compiler)")
    finally:
        module._load.cache_clear()
