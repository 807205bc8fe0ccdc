"""The state of a loader, as plain numbers and strings that any checkpoint format can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ...core.errors import SettingError
from ..source import RowSource

VERSION = 2
_PLACE = {"version", "epoch", "batch", "run_epoch"}
_MEANING = {
    "data": "other data: its rows, shards or fields differ",
    "rows": "another number of rows",
    "content": "other data of the same form: samples of its rows differ",
}
_OPTIONAL = {"content"}  # older states do not have it


def fingerprint(source: RowSource) -> str:
    """A hash of the layout of the data, by which a state recognises its data."""
    text = repr((list(source.groups), [(field.name, str(field.dtype), list(field.shape)) for field in source.fields]))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise SettingError for a state of another order, which does not determine the next batch."""
    if not isinstance(state, Mapping) or not state.keys() >= _PLACE:
        raise SettingError("This is not a state of a DataLoader. Give what its state_dict() returned.")
    if not all(isinstance(state[name], int) for name in _PLACE):
        raise SettingError("The DataLoader's state is damaged: its place is not a number. Start without a state.")
    if state["version"] != VERSION:
        raise SettingError(f"The state has version {state['version']!r}, this STORM reads version {VERSION}.")
    for name, value in expected.items():
        found = state.get(name)
        if found is None and name in _OPTIONAL:
            continue
        if not isinstance(found, bool | int | str) or found != value:
            if not isinstance(found, bool | int | str | None):
                found = type(found).__name__
            meaning = _MEANING.get(name, f"{name}={found!r}, this loader has {name}={value!r}")
            raise SettingError(f"The state belongs to {meaning}. Make the loader as it was, or start without a state.")
