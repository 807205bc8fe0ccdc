"""Where a loader stands, as plain numbers and words that any checkpoint format can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import SettingError

VERSION = 2
_MEANING = {
    "data": "other data: its rows, shards or fields differ",
    "rows": "another number of rows",
}


def fingerprint(shards: Sequence[int], fields: Sequence[tuple[str, str, tuple[int, ...]]]) -> str:
    """A short name for the layout of the data, by which a state finds out that it is not the one it was made with."""
    text = repr((list(shards), [(name, dtype, list(shape)) for name, dtype, shape in fields]))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a state that another order made: the exact next batch could not be told."""
    if not isinstance(state, Mapping) or not {"version", "epoch", "batch", "run_epoch"} <= state.keys():
        raise SettingError("This is no state of a DataLoader. Give what its state_dict() returned.")
    if state["version"] != VERSION:
        raise SettingError(f"The state has version {state['version']!r}, this STORM reads version {VERSION}.")
    for name, value in expected.items():
        if state.get(name) != value:
            meaning = _MEANING.get(name, f"{name}={state.get(name)!r}, this loader has {name}={value!r}")
            raise SettingError(f"The state belongs to {meaning}. Make the loader as it was, or begin without a state.")
