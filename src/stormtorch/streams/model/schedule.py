"""The schedule: calls weights, gradients and updater in order. The streams do not know each other's order.

A unit is *used* when a module with its parameters is entered, when backward asks for a saved weight, and when user code
computes with a parameter (`use`). Its gradients are *complete* when its nodes of the graph have run (`collect`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ...core.errors import OutOfBudget, StaleGraph
from ...memory.lanes.build import Lanes
from ...memory.lanes.waits import WaitMeter
from ..activations.runner import Saving
from ..bridge.lock import locked
from ..bridge.torch_private import at_end_of_backward, in_backward, outside_functorch
from ..gradients.home import GradHome
from ..gradients.stream import GradientStream
from ..home.fetch import Token
from ..home.meta import Unwritten
from ..home.torch_grad import has_sparse_grad
from ..optimizer.stream import OptimizerStream
from ..optimizer.updater import NoUpdater, Snapshot, Updater
from ..optimizer.user_gradients import UserGradients, used_up
from ..units.unit import Unit
from ..weights.residency import Residence, Stay, WeightState
from ..weights.stream import ParameterStream, SavedWeight, version_of


class Tuner(Protocol):
    """Changes where work runs, from measurements of earlier steps. The schedule calls it around each step."""

    def before_step(self, gradients: GradientStream) -> None:
        """The schedule is about to update the units that have gradients."""

    def after_step(self, gradients: GradientStream, activations: Saving | None) -> None:
        """The schedule has updated those units, or has queued their updates."""


class Witness(Protocol):
    """Observes every call of the model, before the call takes memory."""

    def begin(self, *, training: bool, whole: bool) -> None:
        """User code calls the model, or one of its modules alone; ``training``: gradients may follow."""

    def enter(self, given: Any) -> None:
        """A block is about to run with the arguments ``given``."""

    def end(self) -> None:
        """The call returns to user code."""


class Schedule:
    """The order in which a session's streams work. Used by one thread at a time."""

    def __init__(
        self,
        weights: ParameterStream,
        gradients: GradientStream,
        *,
        lanes: Lanes,
        waits: WaitMeter,
        snapshot: Snapshot,
        tuner: Tuner,
        witness: Witness | None,
        serial: bool,
    ) -> None:
        self.weights, self.gradients = weights, gradients
        self.residency, self.lock = weights.residency, weights.lock
        self._residences, self._pool, self._compute = weights.residences, self.residency.pool, lanes.compute
        self._whole = [residence for residence in self._residences if not residence.comes_by_rows()]
        self._lanes, self._waits, self._serial = lanes, waits, serial
        self.snapshot, self._tuner, self.witness = snapshot, tuner, witness
        self.user_gradients = UserGradients(self)
        self._ending: set[int] = set()  # backward passes at whose end gradients will be complete
        # When there was no room to prefetch: the order and the pool, and the position of the use that it was for.
        self._blocked: tuple[int, int, int] | None = None
        # Set once. An updater and an optimizer use weights through this object; the others need the attached model.
        self.updater: Updater = NoUpdater()
        self.optimizer: OptimizerStream | None = None
        self.saving: Saving | None = None  # decides what becomes of activations; None: autograd keeps them
        self.unwritten: Unwritten | None = None  # parameters from the meta device that have no values yet, if any

    # --- a pass begins and ends

    def begin_pass(self, module: nn.Module | None, *, training: bool, whole: bool) -> None:
        """User code calls the model, or ``module`` alone (not ``whole``); ``training``: gradients may follow."""
        if self.unwritten is not None and module is not None and self.unwritten.check(module):
            self.unwritten = None
        self.weights.check_exposed()
        if whole:
            self._begin_order(training)
        if self.witness is not None:
            self.witness.begin(training=training, whole=whole)

    @locked
    def _begin_order(self, training: bool) -> None:
        self.residency.order.begin(training)

    def end_pass(self) -> None:
        """That call returns to user code."""
        self.weights.check_reads()
        if self.witness is not None:
            self.witness.end()

    # --- a unit is used

    @locked
    @outside_functorch
    def use(self, unit: Unit, rows: frozenset[int] | None = None, *, by_call: bool = False) -> Stay:
        """The unit's weights on the device; compute waits for them. Of fused experts only ``rows``, unless None.
        ``by_call``: of a module, in forward or to recompute. Prefetches what comes next."""
        residency, residence, backward = self.residency, self._residences[unit.index], in_backward()
        # A block that is recomputed uses its last unit twice in a row: between the two, the unit must not be evicted.
        residency.order.visit(unit.index, backward=backward and not by_call)
        before = residency.begin_use(residence)
        if residence.comes_by_rows():
            residency.by_rows = rows is not None
        stay = self._arrived(residence, rows)
        if not self.updater.before_use(unit, stay):  # the weights were updated at home, and the copy is stale
            stay = self._arrived(residence, rows)
        self._load_ahead(*([before.unit] if before is not None and before is not residence else ()))
        residency.last_use = stay, stay.loaded, backward, self._pool.returns
        return stay

    def _arrived(self, residence: Residence, rows: frozenset[int] | None) -> Stay:
        """The unit's copy, which compute has been told to wait for."""
        stay, place = self.weights.present(residence, rows), self._compute.place()
        if stay.waited != (place, stay.loaded):  # once is enough: a stream keeps its order
            cause = "updates" if self.updater.pending(residence.unit) else "weights"
            self._waits.wait(stay.loaded, cause, residence.unit.index)
            stay.places.add(place)
            stay.waited = place, stay.loaded
            self.weights.check_reads()
        return stay

    def _is_in_use(self, residence: Residence) -> bool:
        """Whether ``use`` would do nothing. `unpack` asks first, because backward asks for every weight separately."""
        stay, last = residence.stay, self.residency.last_use
        return (
            residence is self.residency.current
            and stay is not None
            and last is not None
            and last[0] is stay
            and last[1] is stay.loaded
            and last[2] == in_backward()
            and last[3] == self._pool.returns  # else prefetch may have room
            and stay.version == residence.version
            and self._compute.place() in stay.places
        )

    def unpack(self, saved: SavedWeight) -> torch.Tensor:
        """The weight that autograd has saved, wherever its unit lies now."""
        if not self._residences:
            raise StaleGraph("Cannot run backward: the session that this forward ran in was closed.")
        place = saved.place
        residence = self._residences[place.unit.index]
        if (place.trained and saved.updates != residence.updates) or (
            saved.at != residence.version and saved.version != version_of(place)
        ):
            raise StaleGraph(
                f"Cannot run backward: {place.name!r} has been modified by an optimizer step or an in-place operation "
                "after this forward. Call backward before step, or run the forward again."
            )
        stay = residence.stay  # without the lock: backward asks for every weight of a unit by itself
        if stay is None or not self._is_in_use(residence):
            stay = self.use(residence.unit)
        typed = stay.typed.get(saved.dtype)
        if typed is None:
            typed = stay.typed[saved.dtype] = stay.base.view(saved.dtype)
        return typed.as_strided(saved.shape, saved.stride, saved.offset)

    @locked
    def hold(self, unit: Unit) -> None:
        """Forbid eviction until ``release``."""
        self._residences[unit.index].installed += 1

    @locked
    def release(self, units: Sequence[Unit]) -> None:
        """Allow eviction again, once for each unit."""
        for unit in units:
            self._residences[unit.index].installed -= 1
        self._leave(units)

    def _leave(self, units: Sequence[Unit]) -> None:
        """Stop treating one of these as the unit in use: its room may serve the next."""
        self.residency.end_use(units)
        self._load_ahead(*units)

    def _load_ahead(self, *left: Unit) -> None:
        """As `load_ahead`, unless that would find no room again. ``left``: units that may be evicted now."""
        if not self._is_blocked(*left):
            self.load_ahead()
        elif in_backward():
            self.updater.prepare_early()  # which has room of its own

    def _is_blocked(self, *left: Unit) -> bool:
        """Whether the last prefetch found no room, and the next would find none: no piece came back, and units are used
        as predicted, so that all distances have become smaller alike."""
        blocked, order = self._blocked, self.residency.order
        if blocked is None or blocked[0] != order.jumps or blocked[1] != self._pool.returns:
            return False
        return not any(self.residency.may_give_way(unit.index, blocked[2] - order.at) for unit in left)

    @outside_functorch
    def load_ahead(self) -> None:
        """Prefetch the units that should be used next, into room that nothing used sooner needs."""
        if self._serial:
            return
        self._blocked = None
        self._load_units_ahead()
        if in_backward():
            self.updater.prepare_early()  # for the step that follows

    def _load_units_ahead(self) -> None:
        is_idle, by_rows = self.updater.is_idle(), self.residency.by_rows
        if is_idle and all(map(Residence.is_current, self._whole if by_rows else self._residences)):
            return  # the loop below would do nothing: worth asking, because every use of a unit comes here
        order = self.residency.order
        for index, distance, in_pass in order.upcoming():
            residence = self._residences[index]
            if (in_pass and is_idle and residence.is_current()) or (by_rows and residence.comes_by_rows()):
                continue
            if residence.outdated and order.step_comes and not in_pass:
                continue  # the step will change the weights first
            if not in_pass and in_backward() and self.updater.pending(residence.unit):
                return  # the load lane would wait for the worker here, and all later loads with it
            if not residence.is_current():
                if residence.state is WeightState.STALE:
                    if residence.installed:
                        continue
                    self.residency.drop(residence)
                if self.weights.load(residence, distance) is None:
                    self._blocked = (order.jumps, self._pool.returns, order.at + distance) if is_idle else None
                    return
            if not self.updater.prepare(residence.unit, in_pass):
                return

    # --- a unit's gradients are complete

    @locked
    def collect(
        self, token: Token, grads: Sequence[torch.Tensor | None], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Take the gradients of one use of a unit; return those that torch itself has to deliver, on the CPU.

        ``wanted``: the gradients that the running backward accumulates."""
        returned = self.gradients.collect(token, grads, wanted, self.user_gradients.fold)
        del grads
        home, now = self.gradients.homes[token.unit.index], token.passed
        if not home.awaits_more(token):
            self._complete(home, now)
        elif now not in self._ending:
            self._ending.add(now)
            at_end_of_backward(functools.partial(self._end_backward, now))
        return returned

    @locked
    def _end_backward(self, number: int) -> None:
        self._ending.discard(number)
        for home in self.gradients.homes:
            if number in home.partial:
                self._complete(home, number)

    def _complete(self, home: GradHome, number: int) -> None:
        """Store the gradients of backward pass ``number``, or update the unit with them at once."""
        partial = home.partial.pop(number, None)
        if partial is not None and partial.grads:
            optimizer = self.optimizer if self.optimizer is not None and self.optimizer.in_backward else None
            if set(partial.grads) & (home.consumed_places | (home.present if optimizer is not None else set())):
                raise used_up(home.unit.name)
            self.updater.finish(home.unit)  # the last update reads the gradients that lie there
            self.residency.end_use([home.unit])  # gradients take its room first, not that of the next unit
            is_part, added = home.awaits_outer_pass(partial), bool(home.present)
            if is_part:
                # The outer pass updates the unit when it brings the rest, or step() does if there is none.
                optimizer = None
            try:
                with torch.no_grad():
                    used = self._gather(home, partial.grads, optimizer)
                if not used and optimizer is not None:
                    optimizer.update_home(home)
                elif not used:
                    self._residences[home.unit.index].outdated = True
                    if self.optimizer is not None and not is_part:
                        self.optimizer.update_ahead(home, added=added)
            except BaseException:
                home.leave_ring()  # whose bytes other units need
                raise
        self._leave([home.unit])

    def _gather(self, home: GradHome, grads: dict[int, torch.Tensor], optimizer: OptimizerStream | None) -> bool:
        """Fill the unit's bucket and send it home; True if ``optimizer`` has used it up on the device instead."""
        gradients, unit = self.gradients, home.unit
        self.updater.apply_factor()  # of the earlier gradients, to which these are added
        try:
            to_wide = gradients.prepare_sum(home)
        except OutOfBudget:
            if not self.updater.ahead_units:
                raise
            self.updater.stop_ahead()  # RAM for speed gives way to RAM that is needed
            to_wide = gradients.prepare_sum(home)
        size = unit.wide_bytes if to_wide else unit.grad_bytes
        staying = self.updater.there.staying(unit, size)
        before = set(home.present), home.is_wide
        in_parts = gradients.goes_in_parts(home, stays=staying is not None)
        # A ring has no place for gradients that wait for the device, and in parts the device cannot take them at once.
        by_cpu = in_parts and gradients.memory.is_ring
        passing = optimizer is not None and not before[0] and optimizer.takes_at_once(home, grads, by_cpu=by_cpu)
        if in_parts:
            gradients.send_in_parts(home, grads, to_wide=to_wide, passing=passing)
            return False
        bucket = staying
        try:
            if bucket is None:
                bucket = gradients.lend(size)
            gradients.fill(home, grads, bucket, to_wide=to_wide)
            used = optimizer is not None and optimizer.update_here(home, bucket)
            gradients.end_sum(home, used=used, stays=staying is not None, passing=passing)
        except BaseException as error:
            if bucket is not None:
                gradients.undo(home, bucket, before)
            if isinstance(error, OutOfBudget) and grads and gradients.adds_in_parts(home):
                gradients.send_in_parts(home, grads, to_wide=to_wide, passing=False)
                return False
            raise
        return used

    @locked
    def abandon(self) -> None:
        """Forget the partial gradients of backward passes that failed."""
        self._ending.clear()
        for home in self.gradients.homes:
            home.partial.clear()

    # --- a step is asked for

    @locked
    def step(self) -> None:
        """Update every unit that has gradients, or queue its update."""
        self.weights.check_reads()
        self._tuner.before_step(self.gradients)
        self._update_all()
        self.end_step()

    @torch.no_grad()
    def _update_all(self) -> None:
        optimizer, homes = self.optimizer, self.gradients.homes
        assert optimizer is not None
        optimizer.check()
        for home in homes:
            for place in home.unit.trained:
                self.user_gradients.fold(place)
        optimizer.refuse_sparse([home.unit for home in homes])
        optimizer.states.heed()
        self.updater.settle_factor()
        for home in homes:
            if home.present or any(has_sparse_grad(place) for place in home.unit.trained):
                optimizer.update(home)
        optimizer.states.count()
        optimizer.update_others()
        if self._serial:
            self.updater.join_all()
        self.residency.order.end_step()
        self.load_ahead()

    @locked
    def end_step(self) -> None:
        """Count a step that is complete."""
        assert self.optimizer is not None
        self.optimizer.count()  # before the tuner's work and the user's hooks, which may save a checkpoint
        self._tuner.after_step(self.gradients, self.saving)

    # --- home memory

    def drain(self) -> None:
        """Block until all requested work is done."""
        self.updater.join_all()
        self._lanes.synchronize()

    def settle(self) -> None:
        """Bring everything home, before the streams end."""
        self.updater.apply_factor()
        self.drain()
        if self.optimizer is not None:
            self.optimizer.states.heed()  # those that user code has replaced since the last step
        self.residency.drop_all()

    def forget(self) -> None:
        """Release the optimizer: graphs that outlive the session keep this object alive."""
        self.optimizer = None

    def before_dropping(self) -> None:
        """Raise if gradients are dropped that backward has used without a step."""
        if self.optimizer is not None:
            self.optimizer.before_dropping()
