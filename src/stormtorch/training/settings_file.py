"""Settings as YAML: read from ``--config``, printed by ``--print-config``. YAML is imported only here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ..core.errors import SettingError
from .settings import TrainSettings, known_names


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a file, by name."""
    yaml = _yaml()
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"--config {path} cannot be read: {error.strerror}. Name a YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SettingError(f"--config {path}{where} is not YAML: {reason}.") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingError(f"--config {path} holds a {type(found).__name__}. Accepted: lines of 'name: value'.")
    return known_names(found, source=str(path))


def to_yaml(settings: TrainSettings) -> str:
    """Every setting, in the order of their definition; ``read_yaml`` gives the same settings again."""
    text: str = _yaml().safe_dump(settings.as_mapping(), sort_keys=False, allow_unicode=True, width=120)
    return text


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise SettingError("YAML needs the package PyYAML. Install it: pip install pyyaml.") from None
