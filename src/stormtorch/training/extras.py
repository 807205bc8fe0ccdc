"""Packages that only some runs need: imported when they are, and asked for in one line where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from ..core.errors import SettingError


def require(module: str, *, extra: str, why: str) -> Any:
    """The module; raises SettingError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise SettingError(
            f"{why} needs the package {missing}. Install it: pip install 'stormtorch[{extra}]'."
        ) from None
