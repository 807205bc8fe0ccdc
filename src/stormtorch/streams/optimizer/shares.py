"""Decides which share of the updates the device does, from measured rates. Any share gives the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

_BUSY = 0.8  # most of the time which CPU updates have that they may take: with more, they would end late
_TAKE_OVER = 4 / 26  # of an update's bytes: the weights alone, read and written, where it was made ahead of the step
_BACKWARD = 2 / 3  # what backward takes of a step's computation, with a product of matrices more for each of forward's


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured rates of the CPU worker and the link, and their times per step."""

    cpu_elements_per_s: float
    load_bytes_per_s: float
    cpu_busy_s: float  # per step
    step_s: float
    stalled_s: float | None = None  # of a step: compute waited for the ring of gradients; None: there is no ring

    @property
    def are_known(self) -> bool:
        return bool(self.cpu_elements_per_s and self.load_bytes_per_s)


def device_share(
    rates: Rates, *, mode: str, share: float, weight_bytes: float, state_bytes: float, ahead: float = 0.0
) -> tuple[float, str]:
    """The share of units to update on the device, of those that the step updates, and the reason.

    ``share`` is the present one. ``weight_bytes``: bytes per parameter that a unit loads for its next use.
    ``state_bytes``: bytes per parameter that it loads in addition to be updated on the device. ``ahead``: the part of
    the parameters that backward updates ahead of the step; the step copies their weights home."""
    if not rates.are_known:
        return share, "not measured yet"
    if mode == "forward":
        # The next forward waits for both, which run in parallel: they should take equally long.
        cpu, load, rest = 1 / rates.cpu_elements_per_s, 1 / rates.load_bytes_per_s, 1 - ahead
        first = cpu * (rest + _TAKE_OVER * ahead) - weight_bytes * load  # what the CPU has more to do without a share
        wanted = first / (rest * (cpu + state_bytes * load)) if rest > 0 else 0.0
        speeds = f"CPU {rates.cpu_elements_per_s / 1e9:.2f} G/s and link {rates.load_bytes_per_s / 1e9:.0f} GB/s"
        why = f"{speeds} then end together"
    else:
        # Only updates that the CPU cannot do in the time that it has go to the device. It has a whole step; with a ring
        # only backward, which waits when the ring is full.
        has_s, of = _BUSY * rates.step_s, "a step"
        if rates.stalled_s is not None:
            has_s, of = _BUSY * _BACKWARD * (rates.step_s - rates.stalled_s), "backward"
        wanted = 1 - (1 - share) * has_s / rates.cpu_busy_s if rates.cpu_busy_s > 0 else 0.0
        why = f"the CPU is then busy for {_BUSY:.0%} of {of}"
    wanted = min(1.0, max(0.0, wanted))
    return wanted, f"{wanted:.0%} on the device: {why}"
