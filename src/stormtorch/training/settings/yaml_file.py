"""Settings as YAML: read from ``--config``, printed by ``--print-config``. Only this module imports yaml."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from ...core.errors import SettingError
from ..errors import reason
from .suggestions import suggestion
from .train_settings import TrainSettings

_MAX_CHARACTERS = 1 << 20
_MAX_DEPTH = 50


class _Plain(yaml.SafeLoader):
    """Refuses aliases, which can expand to more than memory holds, and deep nesting, which PyYAML reads slowly."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs of PyYAML
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise SettingError(f"line {line} has the alias *{event.anchor}. Write the value out.")
        if self.depth == _MAX_DEPTH:
            raise SettingError(f"is nested more than {_MAX_DEPTH} deep. Accepted: lines of 'name: value'.")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a file, by name; raises SettingError for an unknown name, with a suggestion."""
    try:
        found = _mapping(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingError(f"--config {path} cannot be read: {error.strerror}. Name a YAML file.") from None
    except SettingError as error:
        raise SettingError(f"--config {path} {error}") from None
    except Exception as error:  # not UTF-8, not YAML, or a value, such as a date, that PyYAML cannot convert
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or reason(error)
        raise SettingError(f"--config {path}{where} is not YAML: {problem}.") from None
    names = [item.name for item in dataclasses.fields(TrainSettings)]
    for name in found:
        if name not in names:
            meant = suggestion(name, names, flags=False) or "storm train --help has all of them."
            raise SettingError(f"{path}: there is no setting {name!r}. {meant}")
    return found


def _mapping(text: str) -> dict[str, Any]:
    """The values by name, with underscores for dashes. Refuses a repeated name: YAML would take the last value."""
    if len(text) > _MAX_CHARACTERS:
        raise SettingError(f"has {len(text)} characters. Accepted: at most {_MAX_CHARACTERS}.")
    loader = _Plain(text)
    node = loader.get_single_node()
    if node is None:
        return {}
    found = loader.construct_document(node)
    if not isinstance(found, dict):
        raise SettingError(f"holds a {type(found).__name__}. Accepted: lines of 'name: value'.")
    seen: set[str] = set()
    for key, _ in node.value:
        name = str(key.value).replace("-", "_")
        if name in seen:
            raise SettingError(f"line {key.start_mark.line + 1} gives {name} a second time. Remove one of the two.")
        seen.add(name)
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def to_yaml(settings: TrainSettings) -> str:
    """Every setting, in the order of definition; ``read_yaml`` reverses it."""
    text: str = yaml.safe_dump(settings.as_mapping(), sort_keys=False, allow_unicode=True, width=120)
    return text
