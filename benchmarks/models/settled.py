"""When STORM has settled on how activations and updates are handled, so that steps are alike."""

from __future__ import annotations

from typing import Any


def planning_of(session: Any) -> Any:
    """None where there is none to wait for, as on the CPU device."""
    return None if session is None or session.saving is None else session.saving.planning


def is_settled(session: Any) -> bool:
    sparing = None if session is None else session._parts.tuning._sparing
    if sparing is not None and not sparing.is_over:
        return False
    planning = planning_of(session)
    return planning is None or (planning.comparisons > 0 and planning._comparison is None)
