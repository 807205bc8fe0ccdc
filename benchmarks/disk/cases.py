"""What can be measured. Imports no torch: the process that starts the cases must not hold a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """``part``: of the units whose states lie on disk, at least; None: there is no disk."""

    way: str  # the module that runs it
    part: float | None = None
    weights_on_disk: bool = False  # DeepSpeed only
    beside: str = ""  # the case without a disk whose time a step needs at least

    @property
    def is_peer(self) -> bool:
        return self.way == "zero_infinity"


CASES = {
    "ram": Case(way="by_hand"),
    "needed": Case(way="by_hand", part=0.0, beside="ram"),
    "30%": Case(way="by_hand", part=0.3, beside="ram"),
    "all": Case(way="by_hand", part=1.0, beside="ram"),
    "trainer-ram": Case(way="through_trainer"),
    "trainer-all": Case(way="through_trainer", part=1.0, beside="trainer-ram"),
    "ds-states": Case(way="zero_infinity", part=1.0),
    "ds-all": Case(way="zero_infinity", part=1.0, weights_on_disk=True),
}
DEFAULT = ("ram", "30%", "all")
