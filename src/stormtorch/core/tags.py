"""Where bytes live (tiers) and their purpose (tags). Every reservation has one of each."""

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
    """The purpose of a reservation; reports break peaks down by it."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    DATA = "data"
    CHECKPOINT = "checkpoint"  # copies of tensors that a background save has not written yet and that training changes
    STAGING = "staging"  # small rings and flag words that exist only to move bytes
