"""One-line messages for errors of other packages, and for packages that are not installed."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path
from typing import Any

from ..core.errors import SettingError

_OURS = str(Path(__file__).parent.parent)
_INSTALLED = ("site-packages", "dist-packages", "<frozen")


def reason(error: BaseException) -> str:
    """The message's first line, and the second if the first only introduces it; the type's name if it is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    announced = lines[0].endswith(":") and len(lines) > 1
    return (f"{lines[0]} {lines[1]}" if announced else lines[0]).rstrip(" .:,")


def reason_and_place(error: BaseException) -> str:
    """Type, message and source line: the last one in the user's own files, if there is one."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in (_OURS, *_INSTALLED))]
    text = f"{type(error).__name__}: {reason(error)}"
    for frame in (own or frames)[-1:]:
        text += f" ({frame.filename}, line {frame.lineno})"
    return text


def require(module: str, *, extra: str, why: str) -> Any:
    """Import a package that only some runs need; raises SettingError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise SettingError(
            f"{why} needs the package {missing}. Install it: pip install 'stormtorch[{extra}]'."
        ) from None
