"""When STORM's plans for activations have settled, so that steps are alike."""

from __future__ import annotations

from typing import Any


def planning_of(session: Any) -> Any:
    """None where there is none to wait for, as on the CPU device."""
    return None if session is None or session.saving is None else session.saving.planning


def is_settled(session: Any) -> bool:
    planning = planning_of(session)
    return planning is None or (planning.comparisons > 0 and planning._comparison is None)
