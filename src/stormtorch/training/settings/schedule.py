"""The learning rate as a function of the step alone: a resumed run needs no state for it."""

from __future__ import annotations

import math

from .train_settings import TrainSettings


def warmup_steps(settings: TrainSettings, total: int) -> int:
    """Steps until the learning rate reaches its maximum: a number, or a share of all, then at least one."""
    warmup = settings.warmup
    if warmup == 0:
        return 0
    return math.ceil(warmup * total) if warmup < 1 else round(warmup)


def learning_rate(settings: TrainSettings, step: int, total: int) -> float:
    """The learning rate of update ``step``, from 1 to ``total``.

    It rises linearly and reaches ``lr`` in the last step of the warm-up; then it is constant, or falls towards zero,
    which the step after the last would have.
    """
    warmup = warmup_steps(settings, total)
    if step <= warmup:
        return settings.lr * step / warmup
    if settings.schedule == "constant":
        return settings.lr
    progress = (step - 1 - warmup) / max(1, total - warmup)
    if settings.schedule == "linear":
        return settings.lr * (1.0 - progress)
    return settings.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
