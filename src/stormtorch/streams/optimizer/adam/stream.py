"""Adam and AdamW over units: one fused pass per unit, on the CPU worker or on the device, with the same bits.

A *run* is a stretch of neighbouring parameters of a unit that share their hyperparameters and their step count; a unit
is usually one or two runs. Each run is one job of the worker, ordered by flags: it begins when the gradients have
arrived at home, and the unit's next load waits until all its runs are done. The unit that forward needs first is the
most urgent.

Where a unit is updated on the device (device_states.py), the same arithmetic updates weights and states there, and the
weights are stored home; they are already on the device for their next use. With step="forward" that happens just before
the next forward uses the unit; with step="backward" as soon as its gradients exist.

One file of more than 400 lines: both ways share the jobs, flags and factors of a run, and must give the same bits."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container
from typing import Any

import torch

from ....core.errors import OutOfBudget, StormError
from ....core.tags import Tag
from ....memory.disk.stored import StoredTensor
from ....memory.host.arena import HostArena
from ....memory.lanes.build import Lanes
from ....memory.lanes.flags import Flags
from ....memory.lanes.lane import Event, Lane
from ....memory.lanes.waits import WaitMeter
from ....native.adamw import adamw_
from ....native.worker.jobs import UpdateMeter, Worker
from ...bridge.lock import locked
from ...bridge.torch_private import in_backward
from ...gradients.home import GradHome, GradState
from ...home.parameter import Access
from ...units.unit import Place, Unit
from ...weights.residency import Residence, Stay
from ..param_groups import ParamGroups
from ..updater import MASTER, Conductor, Snapshot, Updater
from .ahead import Ahead
from .clipping import Scaling
from .device_states import DeviceStates
from .disk_home import DiskHome
from .home import AdamHome, AdamState, Buffers, Run, Staged, Waiting, bind, bound, runs_of
from .masters import Masters
from .settings import refuse_unknown
from .shown import AdamStates
from .state_home import StateHome, States

_EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)


class AdamStream(Updater):
    """Runs Adam or AdamW for the units of a session."""

    there: DeviceStates
    takes_sparse, keeps_states = False, True

    def __init__(
        self,
        homes: list[AdamHome],
        state_home: StateHome,
        *,
        images: list[torch.Tensor],
        worker: Worker,
        meter: UpdateMeter,
        board: Flags,
        lanes: Lanes,
        schedule: Conductor,
        waits: WaitMeter,
        factors: torch.Tensor,
        take: Callable[[list[int]], HostArena],
        disk: DiskHome | None,
        in_backward_mode: bool,
        poison: Lane | None,
    ) -> None:
        """``factors``: fp32 words in home memory for clip factors, used in turns. ``take``: RAM for updates ahead.
        ``disk``: the state home, if it keeps states of units in files."""
        self.homes, self.state_home, self._images = homes, state_home, images
        self._worker, self._meter, self._board, self._lanes = worker, meter, board, lanes
        self._disk = disk
        for home in homes:
            if disk is not None and disk.holds(home.unit):
                home.state = AdamState.DISK
        self.ahead = Ahead(homes, state_home, images=images, worker=worker, board=board, take=take)
        self._schedule, self._parameters, self._gradients = schedule, schedule.weights, schedule.gradients
        self._factor_words, self._words, self._words_given = itertools.cycle(factors), len(factors), 0
        residency = schedule.weights.residency
        self.there = DeviceStates(homes, state_home, lanes=lanes, residency=residency, waits=waits, poison=poison)
        self._masters, self.lock = Masters(homes, state_home, self), schedule.weights.lock
        self._in_backward_mode = in_backward_mode
        self._kept = deque[torch.Tensor](maxlen=len(factors))  # on the device; the store lane reads them later
        self._factor: torch.Tensor | None = None
        self._device_factor: torch.Tensor | None = None
        self._scaling: Scaling | None = None  # by user code, gradient by gradient; there is no factor then

    def states(self, groups: ParamGroups, access: Access, snapshot: Snapshot) -> AdamStates:
        return AdamStates(self.homes, self.state_home, self, self._masters, self._gradients, groups, access, snapshot)

    def check(self, optimizer: torch.optim.Optimizer, streamed: Container[int]) -> None:
        refuse_unknown(optimizer, streamed)

    def emit(self) -> None:
        self._meter.emit()
        if self._disk is not None:
            self._disk.emit()

    # --- clipping

    def clip(self, norms: list[torch.Tensor], max_norm: float) -> torch.Tensor | None:
        if self._scaling is not None:
            return None  # torch's clipping came first: its factors are numbers on the CPU
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
        if self._device_factor is not None:
            total = total * self._device_factor
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0).to(torch.float32)
        if self._device_factor is not None:
            factor = factor * self._device_factor
        self._store_factor(factor)
        return total

    def _store_factor(self, factor: torch.Tensor) -> None:
        """Bring a factor, an fp32 number on the device, to the next word in home memory."""
        store = self._lanes.store
        self._words_given += 1
        if self._words_given % (self._words // 2) == 0:
            for home in self.homes:
                home.gate.hold(store)  # an update that a slow disk holds up may still read a word that comes next
        self._factor, self._device_factor = next(self._factor_words), factor
        self._kept.append(factor)
        store.wait(self._lanes.compute.record())
        store.copy(self._factor, factor.reshape(1), Tag.GRADIENTS)

    @locked
    def scale(self, grads: GradHome, index: int, factor: torch.Tensor) -> bool:
        if self._in_backward_mode or self._factor is not None:
            return False
        if self._scaling is None and factor.dtype in _EXACT_IN_FP32:
            self._scaling = Scaling(factor)
        scaling, place = self._scaling, grads.unit.places[index]
        dtype = place.wide_dtype if grads.is_wide else place.dtype
        if scaling is None or not (scaling.is_one or dtype is torch.float32):
            return False  # the kernel would not round to the gradient's dtype
        return scaling.takes(factor, (grads.unit.index, index))

    def is_scaled(self) -> bool:
        return self._factor is not None or self._scaling is not None

    @locked
    def settle_factor(self) -> None:
        self.ahead.step_begins()
        is_clipped = self._settle_scaling()
        if not is_clipped and self._factor is not None and any(home.ahead is not None for home in self.homes):
            self._lanes.store.synchronize()
            is_clipped = float(self._factor) != 1.0
            if not is_clipped:
                self.forget_factor()  # updates ahead are right without it
        if is_clipped:
            self.ahead.give_up()
        self.ahead.step_is_decided()

    def _settle_scaling(self) -> bool:
        """Make one factor of what user code has multiplied gradients by; whether that is known to change them."""
        scaling = self._scaling
        if scaling is None:
            return False
        homes = self._gradients.homes
        if not all((home.unit.index, index) in scaling.places for home in homes for index in home.present):
            self.apply_factor()
            return False
        self._scaling = None
        if scaling.is_one:
            return False
        self._store_factor(scaling.factor.to(self._lanes.device, torch.float32))
        return True

    @locked
    def apply_factor(self) -> None:
        scaling, self._scaling = self._scaling, None
        if scaling is not None and not scaling.is_one:
            self._multiply(scaling.factor, scaling.places)
        if self._factor is not None:
            self._lanes.store.synchronize()
            factor, self._factor, self._device_factor = self._factor, None, None
            self._multiply(factor)

    def _multiply(self, factor: torch.Tensor, places: Container[tuple[int, int]] | None = None) -> None:
        """Scale the gradients of these ``places``, or of all, on the host."""
        for home in self._gradients.homes:
            indices = [i for i in home.present if places is None or (home.unit.index, i) in places]
            if indices:
                home.join()
                self.join(home.unit)  # an update may still read them
            for index in indices:
                gradient = home.view(home.unit.places[index])
                (gradient if gradient.dim() else gradient.expand_as(factor)).mul_(factor)
                home.forget_norm(index)

    @locked
    def forget_factor(self) -> None:
        self._factor = self._device_factor = self._scaling = None

    # --- updating

    def update(self, grads: GradHome, hyper: dict[int, dict[str, Any]]) -> None:
        """Queue an update of the unit's parameters that have a gradient and are in ``hyper`` (by index)."""
        home = self.homes[grads.unit.index]
        residence = self._parameters.residences[grads.unit.index]
        if home.waiting is not None:
            self.finish(home.unit)  # the previous update, which no use of the unit has triggered yet
        runs = list(runs_of(home, grads, hyper))
        self.ahead.step_asks(home)
        begun, home.ahead, home.taken = home.ahead, None, None
        if not runs:
            return
        source = grads.flat()
        if grads.state is not GradState.PASSING and self.there.fits(home, source.nbytes):
            stays = grads.state is GradState.ON_DEVICE
            home.waiting = Waiting(runs, grads.is_wide, source, stays, grads.stored, grads.ready, self._device_factor)
            residence.outdated = False
            residence.updates += 1
            return
        if begun is not None and self._factor is None and begun.is_of(runs, grads, residence.version):
            self.there.unstage(home)
            self._after_loads(home, grads, residence)
            self.ahead.take_over(home, begun, grads)
            self._parameters.changed(home.unit, by_step=True)
            return
        if home.on_disk:
            assert self._disk is not None
            self._make_ready(home, grads, residence, None)
            self._disk.update(home, runs, grads, self._images[home.unit.index], self._factor)
            self._parameters.changed(home.unit, by_step=True)
            return
        if home.kept is not None:
            self.there.let_go(home)
        home.join_ahead()  # one that was dropped may still read what this update writes
        states = self.state_home.acquire(home.unit, home.whole)
        try:
            self._make_ready(home, grads, residence, states.ready)
            self.there.unstage(home)  # prefetched for an update on the device
            self._submit(home, runs, grads, Buffers(self._images[home.unit.index], states, source))
        finally:
            self.state_home.release(states, dirty=True, after=home.gate)
        self._parameters.changed(home.unit, by_step=True)

    def _make_ready(self, home: AdamHome, grads: GradHome, residence: Residence, ready: Event | None) -> None:
        """See to it that ``grads.arrived`` tells that an update may begin: the clip factor is there, and ``ready``."""
        if self._factor is not None or ready:
            self._announce(home, grads, residence, ready)
        else:
            self._after_loads(home, grads, residence)

    def _after_loads(self, home: AdamHome, grads: GradHome, residence: Residence) -> None:
        """See to it that ``grads.arrived`` tells that the worker may write weights: no load reads them any more."""
        if residence.loads != home.loads_seen or grads.arrivals == 0:
            self._announce(home, grads, residence, None)

    def _announce(self, home: AdamHome, grads: GradHome, residence: Residence, ready: Event | None) -> None:
        """Raise ``grads.arrived`` behind the loads of the weights, the clip factor, and ``ready``."""
        for event in (residence.last_load, ready):
            if event is not None:
                self._lanes.store.wait(event)
        grads.arrivals += 1
        self._lanes.store.write_flag(grads.arrived, grads.arrivals)
        home.loads_seen = residence.loads

    # --- ahead of the step

    @property
    def ahead_units(self) -> int:
        return len(self.ahead.units)

    @property
    def ahead_elements(self) -> int:
        return sum(unit.state_count for unit in self.ahead.units)

    @property
    def taken_over(self) -> int:
        return self.ahead.taken_over

    @property
    def spare_bytes(self) -> int:
        return self.ahead.spare_bytes

    def spare(self, elements: float, most_bytes: int) -> None:
        self.ahead.spare(elements, most_bytes)

    def pause_ahead(self, steps: int) -> None:
        self.ahead.rest = steps

    def stop_ahead(self) -> None:
        for unit in self.ahead.units:
            self.join_states(unit)
        self.ahead.stop()

    def never_ahead(self, unit: Unit) -> None:
        self.ahead.never(self.homes[unit.index])

    def begin_ahead(self, grads: GradHome, hyper: dict[int, dict[str, Any]], *, added: bool) -> None:
        home = self.homes[grads.unit.index]
        home.ahead = None  # of other gradients
        if self.is_scaled() or grads.present - hyper.keys() or not self.ahead.wants(home, grads, added=added):
            return
        steps = list(home.steps)
        try:
            runs = list(runs_of(home, grads, hyper))
        except (StormError, TypeError, ValueError, KeyError):
            return  # settings that the step will refuse, if they are the same then
        finally:
            home.steps = steps  # the step counts
        self.ahead.begin(home, runs, grads, self._parameters.residences[home.unit.index].version)

    def end(self) -> None:
        pending = self._worker.stats().pending
        try:
            self._worker.close()
        finally:
            if pending or self._board.is_aborted:
                self.ahead.mend()

    # --- the worker's jobs

    def _submit(self, home: AdamHome, runs: list[Run], grads: GradHome, buffers: Buffers) -> None:
        for run in runs:
            tensors = bound(run, buffers, wide=grads.is_wide, factor=self._factor)
            if tensors is None:
                continue  # the run has no elements
            flag, value = home.next_flag(run)
            self._worker.submit(
                tensors,
                run.step,
                priority=home.unit.index,
                ready=grads.arrived.at(grads.arrivals),
                done=flag.at(value),
                abort=self._board.aborted.at(1),
            )
            home.gate.runs.append((flag, value))

    # --- waiting

    def pending(self, unit: Unit) -> bool:
        home = self.homes[unit.index]
        return home.waiting is not None or home.gate.is_pending()

    @locked
    def join(self, unit: Unit) -> None:
        self.finish(unit)
        home = self.homes[unit.index]
        home.ahead = None  # user code may change what it was made from
        self.there.unstage(home)  # user code may change the states that were prefetched
        home.gate.join()
        if self._disk is not None:
            self._disk.refresh_weights(unit)

    @locked
    def join_states(self, unit: Unit) -> None:
        self.join(unit)
        self.homes[unit.index].taken = None
        self.there.write_back(self.homes[unit.index])
        self.state_home.refresh(unit)

    def join_all(self) -> None:
        for home in self.homes:
            self.join_states(home.unit)

    # --- on the device

    def prepare(self, unit: Unit, in_pass: bool) -> bool:
        home = self.homes[unit.index]
        if home.waiting is None and not (self._in_backward_mode and in_pass and in_backward()):
            return True  # nearly always
        return self.there.stage(home) if home.on_device else True

    def is_idle(self) -> bool:
        return not self._in_backward_mode and all(home.waiting is None for home in self.homes)

    def prepare_early(self) -> None:
        if not self._in_backward_mode:
            self.there.stage_early()

    def before_use(self, unit: Unit, stay: Stay) -> bool:
        home = self.homes[unit.index]
        waiting = home.waiting
        if waiting is None:
            return True
        there = self.there.can_stage(home)
        if there:
            if waiting.ready is not None:
                self._lanes.compute.wait(waiting.ready)  # backward may have run on another stream
            self._update_there(home, stay, waiting)
        else:
            self._update_at_home(home, waiting)
        home.waiting = None  # last: an update that was interrupted before it began is still to be done
        return there

    def is_on_device(self, unit: Unit) -> bool:
        return self.homes[unit.index].on_device

    def update_here(self, grads: GradHome, bucket: torch.Tensor, hyper: dict[int, dict[str, Any]]) -> bool:
        home = self.homes[grads.unit.index]
        if not self.there.can_stage(home):
            return False
        self._schedule.hold(home.unit)  # its weights must remain until they are updated
        try:
            stay = self._schedule.use(home.unit)
            if not self.there.can_stage(home):
                return False  # loading the weights has evicted states
            steps = list(home.steps)
            runs = list(runs_of(home, grads, hyper))
            waiting = Waiting(runs, grads.is_wide, bucket, there=True, stored=None, ready=None, factor=None)
            try:
                self._update_there(home, stay, waiting)
            except BaseException:
                if waiting.done:  # a partial update counts as one
                    self._parameters.residences[home.unit.index].updates += 1
                else:
                    home.steps = steps
                raise
        finally:
            self._schedule.release([home.unit])
        self._parameters.residences[home.unit.index].updates += 1
        return True

    def _update_at_home(self, home: AdamHome, waiting: Waiting) -> None:
        """Update on the CPU, and wait for it: the device has no room for this update."""
        residence = self._parameters.residences[home.unit.index]
        for event in (waiting.stored, waiting.ready, residence.last_load, home.gate.stored):
            if event is not None:
                event.synchronize()
        factor = None if waiting.factor is None else waiting.factor.to("cpu")
        states = self.state_home.acquire(home.unit, home.whole)
        try:
            if states.ready is not None:
                states.ready.synchronize()
            buffers = Buffers(self._images[home.unit.index], states, waiting.grads.to("cpu"))
            self._parameters.changed(home.unit, by_step=False)  # first: an interrupt may leave part of the update done
            for run in waiting.runs:
                tensors = bind(run, buffers, wide=waiting.wide, factor=factor, done=waiting.done)
                if tensors is not None:
                    adamw_(tensors, run.step)
                    waiting.done = run.first.state_at + run.count
        finally:
            self.state_home.release(states, dirty=True)

    @torch.no_grad()
    def _update_there(self, home: AdamHome, stay: Stay, waiting: Waiting) -> None:
        """Update weights and states on the device. After an error between two calls, the part that was done goes home;
        ``waiting.done`` says where to continue."""
        if home.gate.stored is not None:  # weights that stay: the store of the last update still reads them
            self._lanes.compute.wait(home.gate.stored)
        try:
            for staged in self.there.staged(home, waiting.done):
                try:
                    self._update_chunk(home, stay, staged, waiting)
                finally:
                    self.there.updated(home, staged)
        finally:
            self._send_home(home, stay)

    def _update_chunk(self, home: AdamHome, stay: Stay, staged: Staged, waiting: Waiting) -> None:
        chunk, grads, grads_at = staged.chunk, waiting.grads, 0
        if not waiting.there:
            grads, grads_at = staged.parts[3], chunk.gradients(wide=waiting.wide).start
        buffers = Buffers(stay.base, States(home.unit, chunk, staged.parts), grads, grads_at)
        for run in waiting.runs:
            tensors = bind(run, buffers, wide=waiting.wide, factor=waiting.factor, done=waiting.done)
            if tensors is not None:
                adamw_(tensors, run.step)
                waiting.done = min(run.first.state_at + run.count, chunk.states.stop)

    def _send_home(self, home: AdamHome, stay: Stay) -> None:
        """Store the weights that were updated on the device home, after their states."""
        lanes = self._lanes
        lanes.store.wait(lanes.compute.record())
        image = self._images[home.unit.index]
        lanes.store.copy(image, stay.memory[: image.nbytes], Tag.OPTIMIZER, home.unit.index)
        home.gate.stored = stored = lanes.store.record()
        stay.uses[:] = [*(event for event in stay.uses if not event.done()), stored]
        self._parameters.updated_in_place(home.unit, stay)

    # --- masters and checkpoints

    def before_rewrite(self, place: Place) -> None:
        self._masters.before_rewrite(place)

    def rewritten(self, place: Place) -> None:
        self._masters.rewritten(place)

    def reset_master(self, place: Place) -> None:
        self._masters.reset(place)

    def shown_states(self, place: Place) -> dict[str, torch.Tensor]:
        return self.state_home.shown(place) if place.trained else {}

    def stored_state(self, place: Place, name: str) -> StoredTensor | None:
        return self.state_home.stored_tensor(place, name) if place.trained else None

    def states_written(self, place: Place) -> None:
        if place.trained:
            self.state_home.written(place)

    def state_of(self, place: Place, shown: dict[str, Any] | None) -> dict[str, Any] | None:
        steps = self.homes[place.unit.index].steps[place.index]
        if shown is None and not steps:
            # User code may have cleared the state. The master belongs to the weight.
            ahead = place.is_split and self._masters.is_ahead(place)
            return {MASTER: self.shown_states(place)[MASTER]} if ahead else None
        # Without an entry, backward has updated it, and step() has not shown it yet.
        return {**(self.shown_states(place) if shown is None else shown), "step": torch.tensor(float(steps))}

    def forget(self) -> None:
        """Release memory: graphs that outlive the session keep this object alive."""
        self.homes.clear()  # shown states and masters have the same list
        self.state_home.forget()
        self._images = []
        self._kept.clear()
        self.there.forget()
        self.ahead.forget()

    def finish(self, unit: Unit) -> None:
        """Do a deferred update now: on the device, or at home if the device has no room for the weights, e.g. because a
        graph that user code keeps holds other weights there."""
        home = self.homes[unit.index]
        if home.waiting is None:
            return
        try:
            self._schedule.use(unit)
        except OutOfBudget:
            if home.waiting is not None:
                self.there.unstage(home)  # the prefetched states are about to be out of date
                self.there.write_back(home)
                self._update_at_home(home, home.waiting)
                home.waiting = None
