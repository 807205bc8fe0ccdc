"""Settings as YAML: read from ``--config``, printed by ``--print-config``. Only this module imports yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ...core.errors import SettingError
from ..errors import reason
from .train_settings import TrainSettings, known_names

_MAX_CHARACTERS = 1 << 20  # characters
_MAX_DEPTH = 50


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a file, by name."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        _check_plain(path, text)
        found = yaml.safe_load(text)
        twice = _first_named_twice(yaml.compose(text, Loader=yaml.SafeLoader))
    except OSError as error:
        raise SettingError(f"--config {path} cannot be read: {error.strerror}. Name a YAML file.") from None
    except SettingError:
        raise
    except Exception as error:  # not UTF-8, not YAML, or a value, such as a date, that PyYAML cannot convert
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or reason(error)
        raise SettingError(f"--config {path}{where} is not YAML: {problem}.") from None
    if found is None:
        return {}
    if twice is not None:
        raise SettingError(f"--config {path} line {twice[1]} gives {twice[0]} a second time. Remove one of the two.")
    if not isinstance(found, dict):
        raise SettingError(f"--config {path} holds a {type(found).__name__}. Accepted: lines of 'name: value'.")
    return known_names(found, source=str(path))


def _check_plain(path: Path, text: str) -> None:
    """Refuse aliases, which can expand to more than memory holds, and deep nesting, which PyYAML parses slowly."""
    if len(text) > _MAX_CHARACTERS:
        raise SettingError(f"--config {path} has {len(text)} characters. Accepted: at most {_MAX_CHARACTERS}.")
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        name = type(token).__name__  # such as FlowSequenceStartToken, BlockEndToken
        depth += name.endswith("StartToken") - name.endswith("EndToken")
        if depth > _MAX_DEPTH:
            raise SettingError(
                f"--config {path} is nested more than {_MAX_DEPTH} deep. Accepted: lines of 'name: value'."
            )
        if isinstance(token, yaml.AliasToken):
            raise SettingError(
                f"--config {path} line {token.start_mark.line + 1} has the alias *{token.value}. Write the value out."
            )


def _first_named_twice(node: Any) -> tuple[str, int] | None:
    """The first repeated name and its line: YAML would silently take the last value. Dashes equal underscores."""
    seen: set[str] = set()
    for key, _ in node.value if getattr(node, "id", None) == "mapping" else ():
        name = str(key.value).replace("-", "_")
        if name in seen:
            return name, key.start_mark.line + 1
        seen.add(name)
    return None


def to_yaml(settings: TrainSettings) -> str:
    """Every setting, in the order of definition; ``read_yaml`` reverses it."""
    text: str = yaml.safe_dump(settings.as_mapping(), sort_keys=False, allow_unicode=True, width=120)
    return text
