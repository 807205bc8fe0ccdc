"""Composes the plan in force from what each part of a session has decided. Costs nothing until it is asked for."""

from __future__ import annotations

from dataclasses import replace

from ..core.plan import Activations, DiskUse, GradientRing, Limit, OptimizerShare, Origin, Part, Plan, UnitPlan
from ..core.tags import Tier
from ..memory.books.ledger import Ledger
from ..streams.settings import Settings
from ..streams.units.unit import Unit
from .build import Parts


def plan_in_force(parts: Parts, settings: Settings) -> Plan:
    ground, pool = parts.ground, parts.tuning.placement
    if parts.inference is not None and (chosen := parts.inference.choice) is not None:
        pool = replace(pool, reason=chosen.reason, origin=chosen.origin)
    return Plan(
        vram=_limit(ground.ledger, Tier.DEVICE),
        ram=_limit(ground.ledger, Tier.HOST),
        disk=_disk(parts),
        pool=pool,
        division=ground.division,
        units=_units(parts, all_resident=pool.is_whole),
        gradients=_gradients(parts, settings),
        step=None if parts.optimizer is None else settings.step_mode,
        optimizer=_optimizer(parts),
        activations=_activations(parts, settings),
    )


def _disk(parts: Parts) -> DiskUse | None:
    budget, on_disk = parts.ground.ledger.budgets.get(Tier.DISK), parts.ground.homes.on_disk
    if budget is None:
        return None
    in_files, count = parts.ground.homes.in_files, len(parts.ground.units)
    why = f"the states of {len(on_disk.layouts)} of {count} units" if on_disk.layouts else ""
    if on_disk.weights:
        why += f", the weights of {len(on_disk.weights)}"
    if in_files.units:
        why += f"{' and ' if why else ''}frozen weights of {len(in_files.units)}{'' if why else f' of {count} units'}"
    why = f"{why}, because RAM has no room for all" if why else "RAM has room for all states"
    given = f"{budget.given}: {budget.reason}" if budget.reason else budget.given
    return DiskUse(
        limit_bytes=budget.limit_bytes,
        states_bytes=on_disk.states_bytes,
        trained_bytes=sum(on_disk.weights.values()),
        ram_bytes=on_disk.ram_bytes + in_files.ring_bytes,
        weights_bytes=sum(unit.image_bytes - unit.file_at for unit in in_files.units),
        reason=f"{why}; {given}",
        origin=Origin.PLANNED,
    )


def _limit(ledger: Ledger, tier: Tier) -> Limit:
    budget = ledger.budgets[tier]
    return Limit(
        limit_bytes=budget.limit_bytes,
        reason=f"{budget.given}: {budget.reason}" if budget.reason else budget.given,
        origin=Origin.PLANNED if budget.reason else Origin.FORCED,
    )


def _units(parts: Parts, *, all_resident: bool) -> tuple[UnitPlan, ...]:
    updater, memory = parts.schedule.updater, parts.schedule.gradients.memory
    kept, weights_kept = updater.there.kept_units, parts.parameters.residency.kept

    def planned(unit: Unit) -> UnitPlan:
        index, states = unit.index, 8 * unit.state_count + unit.master_bytes
        home = Tier.DISK if index in parts.ground.homes.on_disk.layouts else Tier.HOST
        return UnitPlan(
            name=unit.name,
            weights=Part(
                bytes=unit.image_bytes,
                home=Tier.HOST if unit.home_bytes == unit.image_bytes else Tier.DISK,
                resident=all_resident or index in weights_kept,
            ),
            gradients=_part(memory.home_bytes_of(unit), index in kept) if unit.trained else None,
            states=_part(states, index in kept, home) if unit.trained and updater.keeps_states else None,
        )

    return tuple(map(planned, parts.ground.units))


def _gradients(parts: Parts, settings: Settings) -> GradientRing | None:
    mode, ring_bytes = settings.step_mode, parts.ground.homes.ring_bytes
    why = f"RAM has no room for all of them, and {mode.reason} needs a unit's until its update, which follows at once"
    return GradientRing(ring_bytes=ring_bytes, reason=why, origin=Origin.PLANNED) if ring_bytes else None


def _part(size: int, resident: bool, home: Tier = Tier.HOST) -> Part:
    return Part(bytes=size, home=home, resident=resident)


def _optimizer(parts: Parts) -> OptimizerShare | None:
    if parts.optimizer is None or parts.tuning.share is not None:
        return parts.tuning.share
    how = "unit by unit" if parts.schedule.updater.by_unit else "on all parameters at once"
    name = type(parts.optimizer.optimizer).__name__
    return OptimizerShare(device_share=0.0, reason=f"{name}'s own step on the CPU, {how}", origin=Origin.PLANNED)


def _activations(parts: Parts, settings: Settings) -> Activations:
    if parts.schedule.saving is not None:
        return parts.schedule.saving.planning.choice
    forced = settings.activations != "auto"
    return Activations(
        mode="keep",
        blocks=(),
        outside="keep",
        reason=f"activations={settings.activations!r}" if forced else "all of them: the device is RAM as well",
        origin=Origin.FORCED if forced else Origin.PLANNED,
    )
