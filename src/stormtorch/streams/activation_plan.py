"""What becomes of each block's activations until backward: decided in one place, from measurements, as data.

Two things are for free while compute runs: the link, in both directions, and what VRAM the rest leaves. What they
cannot take is computed again. The matrix products and attentions of a block are ranked by the time that a byte of their
results saves; the link and the VRAM are filled with the best."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.sizes import format_bytes
from .replay import Operation

_HIDDEN = 0.85  # of the time that compute gives the link: the rest is for what else travels, and for jitter


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block, measured."""

    forward_s: float
    input_bytes: int
    saved_bytes: int  # by autograd, if nothing is recomputed
    operations: dict[Operation, tuple[int, float]] = field(default_factory=dict)  # bytes of the result, seconds
    repeatable: bool = True  # whether it may be run a second time: it changes no buffers, and nobody is listening


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """``kind``: "keep", "offload" or "recompute". When recomputing: whether the block's inputs leave, and which results
    of its operations survive, in RAM (True) or in VRAM (False)."""

    kind: str
    inputs_away: bool = False
    results_away: dict[Operation, bool] = field(default_factory=dict)


KEEP, OFFLOAD = BlockPlan(kind="keep"), BlockPlan(kind="offload")


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """One plan for each block, and why. ``kept_bytes``: of VRAM beyond what it takes to recompute everything."""

    blocks: list[BlockPlan]
    reason: str
    kept_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Means:
    """What there is to use: VRAM beyond what it takes to recompute everything, and the link's free rates."""

    spare_bytes: int
    out_bytes_per_s: float
    in_bytes_per_s: float


def leanest(profile: BlockProfile | None) -> BlockPlan:
    """What takes least VRAM."""
    if profile is not None and not profile.repeatable:
        return OFFLOAD
    return BlockPlan(kind="recompute", inputs_away=True)


def recompute(profiles: list[BlockProfile], means: Means) -> ActivationPlan:
    """For ``activations="recompute"``: the inputs of blocks stay on the device as far as they fit, the last ones first.

    The last block is kept: backward begins with it."""
    blocks = [KEEP]
    spare, stay = means.spare_bytes, 0
    for profile in reversed(profiles[:-1]):
        plan = leanest(profile)
        if plan.kind == "recompute" and profile.input_bytes <= spare:
            spare -= profile.input_bytes
            stay += 1
            plan = BlockPlan(kind="recompute")
        blocks.insert(0, plan)
    reason = f"recomputed; the inputs of {stay} of {len(profiles)} blocks stay on the device"
    return ActivationPlan(blocks=blocks, reason=reason, kept_bytes=means.spare_bytes - spare)


def choose(profiles: list[BlockProfile], means: Means) -> ActivationPlan:
    """For ``activations="auto"``. The last block is always kept: backward begins with it."""
    early = profiles[:-1]
    saved = sum(profile.saved_bytes for profile in early)
    if saved <= means.spare_bytes:
        reason = f"kept: {format_bytes(saved)} of activations fit"
        return ActivationPlan(blocks=[KEEP] * len(profiles), reason=reason, kept_bytes=saved)
    hidden = [_hidden_bytes(profile, means) for profile in early]
    if all(profile.saved_bytes <= room for profile, room in zip(early, hidden, strict=True)):
        compute_s = sum(profile.forward_s for profile in early)
        reason = f"offloaded: {format_bytes(saved)} leave behind {compute_s * 1e3:.0f} ms of forward"
        return ActivationPlan(blocks=[OFFLOAD] * len(early) + [KEEP], reason=reason)
    return _mixed(early, hidden, means)


def _hidden_bytes(profile: BlockProfile, means: Means) -> float:
    """What the link moves out while the block computes forward, and in again while it computes backward."""
    return _HIDDEN * profile.forward_s * min(means.out_bytes_per_s, 2 * means.in_bytes_per_s)


def _mixed(early: list[BlockProfile], hidden: list[float], means: Means) -> ActivationPlan:
    """Recompute, but for the results that the link hides or that VRAM holds: best first, and in VRAM the last blocks'
    first, which are needed first."""
    spare, link = means.spare_bytes, list(hidden)
    inputs_away: list[bool] = []
    for index, profile in reversed(list(enumerate(early))):
        away = profile.input_bytes <= link[index] or profile.input_bytes > spare
        inputs_away.insert(0, away)
        link[index] -= profile.input_bytes * away
        spare -= profile.input_bytes * (not away)
    ranked = sorted(
        (size / max(seconds, 1e-9), -index, operation)
        for index, profile in enumerate(early)
        for operation, (size, seconds) in profile.operations.items()
    )
    results: list[dict[Operation, bool]] = [{} for _ in early]
    for _, negative, operation in ranked:
        size = early[-negative].operations[operation][0]
        if size <= link[-negative]:
            link[-negative] -= size
            results[-negative][operation] = True
        elif size <= spare:
            spare -= size
            results[-negative][operation] = False
    blocks = [
        BlockPlan(kind="recompute", inputs_away=away, results_away=kept) if profile.repeatable else OFFLOAD
        for profile, away, kept in zip(early, inputs_away, results, strict=True)
    ]
    return ActivationPlan(blocks=[*blocks, KEEP], reason=_why(early, results), kept_bytes=means.spare_bytes - spare)


def _why(early: list[BlockProfile], results: list[dict[Operation, bool]]) -> str:
    survive = {True: 0, False: 0}
    saved_s = 0.0
    for profile, kept in zip(early, results, strict=True):
        for operation, away in kept.items():
            survive[away] += profile.operations[operation][0]
            saved_s += profile.operations[operation][1]
    whole_s = sum(seconds for profile in early for _, seconds in profile.operations.values())
    return (
        f"recomputed, but for {saved_s * 1e3:.1f} of {whole_s * 1e3:.1f} ms of products and attention: "
        f"{format_bytes(survive[True])} of results in RAM, as the link hides, {format_bytes(survive[False])} in VRAM"
    )
