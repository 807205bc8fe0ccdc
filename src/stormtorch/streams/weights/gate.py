"""The gate of a unit's home memory: a lane waits there for the unit's last update."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...memory.lanes.flags import Flag
from ...memory.lanes.lane import Event, Lane


@dataclass(eq=False)
class HomeGate:
    """What may still write the unit's weights and states at home, or read its gradients there. The updater sets it."""

    runs: list[tuple[Flag, int]] = field(default_factory=list)  # of the worker; the flag's value says that one is done
    stored: Event | None = None  # the store of weights that were updated on the device

    def hold(self, lane: Lane) -> None:
        """Make ``lane`` wait until the update is done and at home."""
        self.runs = [(flag, value) for flag, value in self.runs if not flag.at(value).reached()]
        for flag, value in self.runs:
            lane.wait_flag(flag, value)
        if self.stored is not None:
            lane.wait(self.stored)

    def join(self) -> None:
        """Block until the update is done and at home."""
        for flag, value in self.runs:
            flag.wait(value)
        self.runs = []
        if self.stored is not None:
            self.stored.synchronize()
            self.stored = None
