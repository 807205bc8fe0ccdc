"""Where bytes live (tiers) and what they are for (tags). Every reservation carries one of each."""

from __future__ import annotations

import enum


class Tier(enum.Enum):
    """A kind of memory. The value is the name that users read; ``setting`` is the budget that limits it."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    @property
    def setting(self) -> str:
        return {Tier.DEVICE: "vram", Tier.HOST: "ram", Tier.DISK: "disk"}[self]


class Tag(enum.Enum):
    """What a reservation is for; reports break peaks down by it."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    DATA = "data"
    CHECKPOINT = "checkpoint"  # copies of what a background save has not written yet, and training changes already
    STAGING = "staging"  # small rings and flag words that exist only so that bytes can move
