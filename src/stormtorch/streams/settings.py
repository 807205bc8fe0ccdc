"""The settings of `storm.stream`, checked, and what tests inject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.errors import SettingError
from ..core.plan import Origin, StepMode
from ..memory.books.limits import check_one_device
from ..memory.cuda.device_meter import DeviceMeter
from ..memory.disk.calls import SystemCalls
from ..memory.lanes.lane import Delay

STEPS = ("auto", "backward", "forward", "serial")
ACTIVATIONS = ("auto", "keep", "offload", "recompute")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `storm.stream`; each is explained there."""

    vram: object = "auto"
    ram: object = "auto"
    disk: object = None
    disk_limit: object = None
    device: torch.device | str = "auto"
    activations: str = "auto"
    step: str = "auto"
    master_dtype: torch.dtype | None = torch.float32
    only: Sequence[str] | None = None
    leave: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.step not in STEPS:
            raise SettingError(f"step={self.step!r} is not valid. Accepted: {_listed(STEPS)}.")
        if self.activations not in ACTIVATIONS:
            raise SettingError(f"activations={self.activations!r} is not valid. Accepted: {_listed(ACTIVATIONS)}.")
        if self.master_dtype not in (None, torch.float32):
            raise SettingError(f"master_dtype={self.master_dtype!r} is not valid. Accepted: torch.float32 or None.")
        check_one_device(self.device)
        directories = self.directories
        if self.disk_limit is not None and not directories:
            raise SettingError(f"disk_limit={self.disk_limit!r} needs disk=, the directory that it limits.")
        for name, value in (("only", self.only), ("leave", self.leave)):
            if isinstance(value, str):
                raise SettingError(f"{name}={value!r} is not valid. Accepted: a list of module names.")

    @property
    def directories(self) -> list[Path]:
        """The directories of ``disk``."""
        if self.disk is None:
            return []
        given = [self.disk] if isinstance(self.disk, str | Path) else self.disk
        if not isinstance(given, list | tuple) or not all(isinstance(item, str | Path) and str(item) for item in given):
            raise SettingError(f"disk={self.disk!r} is not valid. Accepted: a directory, or a list of them.")
        return [Path(item) for item in given]

    @property
    def step_mode(self) -> StepMode:
        """When an optimizer runs, with "auto" resolved."""
        if self.step == "auto":
            return StepMode(mode="forward", reason="exact with clipping and accumulation", origin=Origin.PLANNED)
        return StepMode(mode=self.step, reason=f"step={self.step!r}", origin=Origin.FORCED)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Injections of tests: delays inside the lanes, NaN in every freed piece of the device."""

    delay: Delay | None = None
    poison: bool = False
    device_share: float | None = None  # of the optimizer's work, instead of the automatic choice
    disk_part: float = 0.0  # of the units, at least, whose states lie on disk
    weights_part: float = 0.0  # of the units, at least, whose weights lie there too; then the states of all
    calls: SystemCalls | None = None  # of scratch files
    ahead: bool = False  # all units have memory for updates ahead from the beginning
    kept: int = 0  # units whose optimizer states are kept on the device from the beginning
    activation_room: int | None = None  # device bytes that activations seem to find; None: the real ones
    meter: DeviceMeter | None = None  # for a device that does not count itself
    small_bytes: int | None = None  # smaller activations are not offloaded


def _listed(words: Sequence[str]) -> str:
    return ", ".join(repr(word) for word in words)
