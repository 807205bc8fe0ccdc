# ruff: noqa: ARG002  defaults ignore their arguments
"""The interface of what updates weights: our own Adam (adam/), torch's own step (torch_step.py), or nothing.

The defaults are those of an updater that is done when `update` returns, and whose states torch keeps. Our own Adam
updates behind its caller and keeps states in home memory: it overrides most of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, Protocol

import torch

from ...memory.disk.stored import StoredTensor
from ..gradients.home import GradHome
from ..gradients.stream import GradientStream
from ..home.parameter import Access
from ..units.unit import Place, Unit
from ..weights.residency import Stay
from ..weights.stream import ParameterStream
from .param_groups import ParamGroups

MASTER = "master"  # its name among the states of a parameter, in state dicts and checkpoints


class ShownStates:
    """An updater's states as user code finds them in ``optimizer.state``. By default torch keeps them there itself."""

    def take_over(self) -> None:
        """Take over states that exist when streaming begins."""

    def heed(self, unit: Unit | None = None) -> None:
        """Take over changes that user code made to the state, of one unit or of all."""

    def count(self) -> None:
        """Show step counts after an update."""

    def after_saving(self, state_dict: dict[str, Any]) -> None:
        """Complete a dict that ``state_dict`` has made."""

    def before_loading(self, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Return the dict without states that torch would cast; None if torch is to load all of it."""
        return None

    def after_loading(self) -> None:
        """Install the states that `before_loading` has left out."""

    def replace(self, states: dict[Any, dict[str, Any]]) -> None:
        """Take out of ``states`` those that a checkpoint has written to home memory, and show them."""

    def before_release(self) -> None:
        """Give states the parameters' dtypes, for torch. Called again if Ctrl-C ends it."""

    def after_release(self) -> None:
        """Give states the parameters' dtypes, in a way that works once."""

    def discard(self) -> None:
        """Nothing will use the states after the session: do not make them ordinary tensors when it ends."""


class StatesOnDevice:
    """Memory of the pool for states that are kept on the device, or pass through it. By default there are none."""

    share_now = 0.0  # updated on the device, of the units that are not kept and have no memory for updates ahead
    gave_way = False  # permanently

    @property
    def kept_units(self) -> frozenset[int]:
        """The units whose states are kept, by index."""
        return frozenset()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the pool in which states are kept."""
        return 0

    @property
    def sets_bytes(self) -> int:
        """Bytes of the pool through which states pass."""
        return 0

    def keepable(self, *, wide: bool) -> dict[int, int]:
        """The bytes that it would take to keep the states of each unit that is not kept yet, by index."""
        return {}

    def keep(self, indices: Iterable[int], *, wide: bool) -> None:
        """Keep the states of these units on the device, as far as there is room, and update them there.

        ``wide``: with room for gradients of several micro-batches, in fp32."""

    def share(self, part: float, room_bytes: int, *, early: bool) -> None:
        """Let ``part`` of the units that are not kept, evenly spread, be updated on the device from the next step on.

        ``room_bytes``: what the pool can spare for them. ``early``: whether states may come before the step is
        called."""

    def staying(self, unit: Unit, size: int) -> torch.Tensor | None:
        """The device bytes where ``size`` bytes of a kept unit's gradients remain until the update; None if not
        kept."""
        return None


class Snapshot(Protocol):
    """The values that a save in the background still has to write."""

    def before_change(self, unit: int | None, *, by_step: bool = False) -> None:
        """Copy those of the unit (None: of all), or wait until they are written; ``by_step``: an optimizer changes
        it."""


class Conductor(Protocol):
    """The order in which streams work: model/schedule.py."""

    weights: ParameterStream
    gradients: GradientStream
    snapshot: Snapshot
    updater: Updater

    def use(self, unit: Unit) -> Stay:
        """The unit's weights on the device; compute waits for them."""

    def hold(self, unit: Unit) -> None:
        """Forbid eviction until ``release``."""

    def release(self, units: Sequence[Unit]) -> None:
        """Allow eviction again, once for each unit."""

    def step(self) -> None:
        """Update every unit that has gradients, or queue its update."""

    def end_step(self) -> None:
        """Count a step that is complete."""

    def before_dropping(self) -> None:
        """Raise if gradients are dropped that backward has used without a step."""


class Updater:
    """Updates units of weights at home or on the device."""

    by_unit = True  # it can update one unit at a time
    takes_sparse = True  # gradients
    keeps_states = False  # in home memory that the session has taken for them; else torch keeps them
    there: StatesOnDevice = StatesOnDevice()

    def states(self, groups: ParamGroups, access: Access, snapshot: Snapshot) -> ShownStates:
        """The states to show in the optimizer."""
        return ShownStates()

    def check(self, optimizer: torch.optim.Optimizer, streamed: Container[int]) -> None:
        """Raise if the groups of ``streamed`` parameters (by id) have a setting that cannot be used."""

    def update(self, grads: GradHome, hyper: dict[int, dict[str, Any]]) -> None:
        """Update the unit's parameters that have a gradient and are in ``hyper`` (by index), now or later."""
        raise NotImplementedError

    def emit(self) -> None:
        """Report how long updates took on the CPU since the last call."""

    # --- waiting

    def pending(self, unit: Unit) -> bool:
        """Whether an update of the unit is queued and not done."""
        return False

    def finish(self, unit: Unit) -> None:
        """Begin a deferred update now."""

    def join(self, unit: Unit) -> None:
        """Block until the unit's home image is up to date."""

    def join_states(self, unit: Unit) -> None:
        """Block until the unit's states at home are up to date too; user code may then change them there."""

    def join_all(self) -> None:
        """Block until images and states of all units are up to date at home."""

    # --- updates on the device

    def prepare(self, unit: Unit, in_pass: bool) -> bool:
        """Prefetch what an update on the device will need; False if there is no room yet."""
        return True

    def is_idle(self) -> bool:
        """Whether `prepare` has nothing to do for any unit."""
        return True

    def prepare_early(self) -> None:
        """Prefetch states for the next step during backward, while the link has time."""

    def before_use(self, unit: Unit, stay: Stay) -> bool:
        """Do a deferred update: the unit's weights are on the device now. False if that makes ``stay`` stale."""
        return True

    def is_on_device(self, unit: Unit) -> bool:
        """Whether the unit is updated on the device."""
        return False

    def update_here(self, grads: GradHome, bucket: torch.Tensor, hyper: dict[int, dict[str, Any]]) -> bool:
        """Update the unit on the device from the gradients in ``bucket``; False if there is no room for that."""
        return False

    # --- updates ahead of the step

    @property
    def ahead_units(self) -> int:
        """How many units have memory for updates ahead."""
        return 0

    @property
    def ahead_elements(self) -> int:
        """How many parameters these have."""
        return 0

    @property
    def taken_over(self) -> int:
        """Updates ahead that steps have taken over, so far."""
        return 0

    @property
    def spare_bytes(self) -> int:
        """How much RAM updates ahead have."""
        return 0

    def spare(self, elements: float, most_bytes: int) -> None:
        """Take RAM for updates ahead, of units with so many parameters in all."""

    def pause_ahead(self, steps: int) -> None:
        """Begin no updates ahead in the next backward passes."""

    def stop_ahead(self) -> None:
        """Begin none any more, and give the RAM back."""

    def begin_ahead(self, grads: GradHome, hyper: dict[int, dict[str, Any]], *, added: bool) -> None:
        """Backward has brought the unit's gradients: perhaps begin its update, where nobody sees it until the step asks
        for it. ``added``: to those of an earlier backward."""

    def never_ahead(self, unit: Unit) -> None:
        """User code has got an array over memory of the unit: begin none of its updates ahead any more."""

    def end(self) -> None:
        """No update is asked for any more: end those that run, and leave weights and states of the same step."""

    # --- clipping

    def clip(self, norms: list[torch.Tensor], max_norm: float) -> torch.Tensor | None:
        """Scale the gradients at the next update so that their total norm is at most ``max_norm``; returns the norm.
        None if that cannot be deferred."""
        return None

    def scale(self, grads: GradHome, index: int, factor: torch.Tensor) -> bool:
        """Multiply one gradient by ``factor``, a number on the CPU, at the next update; False if that cannot be
        deferred."""
        return False

    def is_scaled(self) -> bool:
        """Whether gradients are to be scaled at the next update."""
        return False

    def settle_factor(self) -> None:
        """An update comes: scale all gradients by one factor in it, or some of them now."""

    def apply_factor(self) -> None:
        """Scale gradients now, on the host, where that was deferred, because user code reads them."""

    def forget_factor(self) -> None:
        """Forget the clip factor: its gradients were dropped."""

    # --- masters: an update reads the fp32 master of a bf16 or fp16 weight; it must follow what others write

    def before_rewrite(self, place: Place) -> None:
        """Prepare for a write of user code to a parameter."""

    def rewritten(self, place: Place) -> None:
        """Let the master follow a write of user code, where the weight has changed."""

    def reset_master(self, place: Place) -> None:
        """Make the master equal to the weight."""

    def new_master(self, place: Place) -> torch.Tensor | None:
        """Memory for a master that torch's states lack, made from the weight; None: it has none."""
        return None

    # --- checkpoints

    def shown_states(self, place: Place) -> dict[str, torch.Tensor]:
        """A parameter's states in home memory, by name, for user code and checkpoints; empty if torch keeps them."""
        return {}

    def stored_state(self, place: Place, name: str) -> StoredTensor | None:
        """A state that lies in a file, for code that moves all of its bytes."""
        return None

    def states_written(self, place: Place) -> None:
        """Take what user code or a checkpoint has written to `shown_states`."""

    def state_of(self, place: Place, shown: dict[str, Any] | None) -> dict[str, Any] | None:
        """The complete state of a trained parameter; ``shown`` is its entry in ``optimizer.state``. None: no state."""
        return shown


class NoUpdater(Updater):
    """Of a session without an optimizer: its weights change by user code alone."""
