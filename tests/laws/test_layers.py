"""Law: device and page-locked memory are taken inside memory/ only, where the ledger sees them; core is pure data."""

from __future__ import annotations

import re
from pathlib import Path

import stormtorch

SOURCE = Path(stormtorch.__file__).parent


def test_no_bare_device_or_pinned_memory_outside_the_memory_room() -> None:
    taking = re.compile(
        r"pin_memory\s*=|\.pin_memory\(|\.cuda\(|torch\.(empty|zeros|ones|full|rand\w*)\([^)]*device\s*="
    )
    for path in SOURCE.rglob("*.py"):
        if SOURCE / "memory" not in path.parents:
            found = taking.search(path.read_text())
            assert found is None, f"{path.name} takes memory that the ledger does not see: {found and found[0]}"


def test_core_imports_neither_torch_nor_us() -> None:
    for path in (SOURCE / "core").glob("*.py"):
        text = path.read_text()
        assert not re.search(r"^\s*(import|from)\s+(torch|numpy|\.\.)", text, re.MULTILINE), path.name
