"""Shows the states that our own Adam keeps in home memory as ``optimizer.state``.

Entries have torch's names and shapes and are views of home memory; reading one waits for a running update. Changes that
user code makes to the entries (it clears them, or sets other tensors or step counts) take effect before the next
update. When an entry is replaced or moved to another parameter, tensors that user code still holds become copies with
the old values.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ....core.errors import StorageError
from ....memory.disk.buffers import bytes_of
from ....memory.disk.stored import StoredTensor
from ...bridge.torch_private import without_torch_function
from ...gradients.stream import GradientStream
from ...home.parameter import Access, HomeView, home_view, joined, plain
from ...units.unit import Place, Unit
from ..param_groups import ParamGroups
from ..updater import MASTER, ShownStates, Snapshot, Updater
from .home import AdamHome
from .masters import Masters
from .state_home import MOMENTS, StateHome

_AT_ONCE = 2 << 20  # elements of a file that are converted together


class AdamStates(ShownStates):
    """``optimizer.state`` of the parameters that our own kernels update."""

    def __init__(
        self,
        homes: list[AdamHome],
        state_home: StateHome,
        updater: Updater,
        masters: Masters,
        gradients: GradientStream,
        groups: ParamGroups,
        access: Access,
        snapshot: Snapshot,
    ) -> None:
        self._homes, self._state_home, self._updater = homes, state_home, updater
        self._masters, self._gradients = masters, gradients
        self._groups, self._access, self._snapshot = groups, access, snapshot
        self._optimizer = groups.optimizer
        self._place = {id(place.parameter): place for home in homes for place in home.unit.places}
        self._taken: dict[nn.Parameter, dict[str, Any]] = {}  # kept while torch loads the other states
        self._not_written: set[int] = set()  # parameters without later writes, as a state dict is about to be loaded
        self._is_discarded = False
        self._shown: dict[int, dict[str, Any]] = {}  # the entries we have put into optimizer.state, by parameter

    def take_over(self) -> None:
        if self._optimizer.state:
            self._take_all({p: dict(entry) for p, entry in self._optimizer.state.items()})

    def _take_all(self, states: dict[Any, dict[str, Any]]) -> None:
        """Take over states that torch or an earlier session made; a parameter without one starts from zero."""
        self._take([(place, states.get(place.parameter) or {}) for home in self._homes for place in home.unit.trained])

    def before_loading(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hide our states from ``load_state_dict``: torch would cast them to the parameters' dtype and device."""
        self._not_written = self._masters.loading()
        rest, self._taken = self._groups.without(state_dict, self._place)
        return rest

    def after_loading(self) -> None:
        states = {parameter: dict(state) for parameter, state in self._taken.items()}
        self._taken = {}
        for parameter, state in states.items():
            if not self._place[id(parameter)].trained:
                self._optimizer.state[parameter] = state
        self._take_all(states)
        brought = (p for p, state in states.items() if MASTER in state and not self._is_live(state[MASTER]))
        self._masters.loaded([self._place[id(parameter)] for parameter in brought], self._not_written)

    def heed(self, unit: Unit | None = None) -> None:
        changed: list[tuple[Place, dict[str, Any]]] = []
        for home in self._homes if unit is None else [self._homes[unit.index]]:
            if self._gradients.homes[home.unit.index].consumed:
                continue  # updated already; the entry's step count is still the old one
            for number, place in enumerate(home.unit.trained):
                state, shown = self._optimizer.state.get(place.parameter), self._shown.get(id(place.parameter))
                if not state and not shown:
                    continue
                if state and shown and all(state.get(name) is shown[name] for name in MOMENTS):
                    home.steps[number] = int(state["step"])
                    continue
                self._updater.join_states(home.unit)
                self._snapshot.before_change(home.unit.index, by_step=True)  # a save may still read them
                changed.append((place, state or {}))
        self._take(changed)

    def count(self) -> None:
        """Write step counts after an update, and make entries for parameters that have none yet."""
        for home in self._homes:
            for number, place in enumerate(home.unit.trained):
                if home.steps[number]:
                    if "step" not in self._optimizer.state[place.parameter]:
                        self._show(place)
                    self._optimizer.state[place.parameter]["step"].fill_(home.steps[number])

    def replace(self, states: dict[Any, dict[str, Any]]) -> None:
        """Take the step counts out of ``states``; moments and masters are in home memory already."""
        self._shown.clear()  # entries that user code holds show the loaded states, which are written already
        for home in self._homes:
            for number, place in enumerate(home.unit.trained):
                state = states.pop(place.parameter, None)
                if state is None:
                    self._take([(place, {})])
                else:
                    home.steps[number] = int(state["step"])
                    self._show(place, state)

    def after_release(self) -> None:
        """Replace the views by ordinary tensors of the parameters' dtypes, converted within their own memory: a second
        copy may not fit."""
        try:
            self._updater.end()
        finally:
            self._narrow_all()

    def _narrow_all(self) -> None:
        """Those that a disk has lost are dropped: an optimizer must not go on with what is left."""
        error: StorageError | None = None
        for home in self._homes:
            try:
                self._narrow_unit(home)
            except StorageError as lost:
                error = error or lost
                for place in home.unit.trained:
                    self._optimizer.state.pop(place.parameter, None)
        if error is not None:
            raise error

    def discard(self) -> None:
        self._is_discarded = True

    def _narrow_unit(self, home: AdamHome) -> None:
        if self._is_discarded:  # to read and write states on disk once more would take a minute for 80 GB
            for place in home.unit.trained:
                self._optimizer.state.pop(place.parameter, None)
            return
        self._state_home.refresh(home.unit)
        for place in home.unit.trained:
            state = self._optimizer.state.get(place.parameter)
            if state and "exp_avg" in state:
                state.pop(MASTER, None)
                mine = self._state_home.shown(place)
                for name in MOMENTS:
                    stored = self._state_home.stored_tensor(place, name)
                    state[name] = _narrow(mine[name], place, stored)

    def _show(self, place: Place, before: Mapping[str, Any] | None = None) -> None:
        """Make our entry for a parameter; additional items of ``before`` remain in it."""
        home = self._homes[place.unit.index]
        state: dict[str, Any] = {"step": torch.tensor(float(home.steps[home.unit.trained.index(place)]))}
        for name, tensor in self._state_home.shown(place).items():
            state[name] = home_view(tensor, self._access, place, "state")
        more = {key: value for key, value in (before or {}).items() if key not in ("step", MASTER, *MOMENTS)}
        self._optimizer.state[place.parameter] = {**state, **more}
        self._shown[id(place.parameter)] = state

    def _take(self, states: list[tuple[Place, dict[str, Any]]]) -> None:
        """Install these states. They may be views of each other's home memory: all are read before one is written."""
        for place, state in states:
            shown = self._shown.get(id(place.parameter))
            if shown is None or any(state.get(name) is not shown[name] for name in MOMENTS):
                self._let_go(place)
        sources = [self._sources(place, state) if "exp_avg" in state else {} for place, state in states]
        for (place, state), source in zip(states, sources, strict=True):
            mine = self._state_home.shown(place)
            self._homes[place.unit.index].steps[place.index] = int(state["step"]) if "exp_avg" in state else 0
            if "exp_avg" not in state:
                self._optimizer.state.pop(place.parameter, None)
                for name in MOMENTS:
                    mine[name].zero_()
            for name, value in source.items():
                if name in mine:
                    mine[name].copy_(value)
            self._state_home.written(place)
            if "exp_avg" in state:
                self._show(place, state)

    def _sources(self, place: Place, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Tensors to write, by name: not those in place already, nor a master that views another's state."""
        sources, shown = {}, self._shown.get(id(place.parameter), {})
        for name in MOMENTS:
            value = plain(joined(state[name]))
            if state[name] is not shown.get(name):
                sources[name] = value.clone() if self._is_live(state[name]) else value
        if MASTER in state and not self._is_live(state[MASTER]):
            sources[MASTER] = plain(joined(state[MASTER]))
        return sources

    def _is_live(self, value: torch.Tensor) -> bool:
        """Whether it is a view of our home memory, which an update changes."""
        return isinstance(value, HomeView) and value._storm[0] is self._access and value._storm_kind == "state"

    def _let_go(self, place: Place) -> None:
        """Turn views that user code holds into copies: the moments are about to change."""
        shown = self._shown.pop(id(place.parameter), {})
        held = {name: weakref.ref(shown[name]) for name in MOMENTS if name in shown}
        shown.clear()
        for name, reference in held.items():
            view = reference()
            if view is not None:
                with without_torch_function():
                    view.data = self._state_home.shown(place)[name].clone()
                view._storm_kind = "past"


def _narrow(wide: torch.Tensor, place: Place, stored: StoredTensor | None) -> torch.Tensor:
    if place.dtype == torch.float32:
        return wide
    target = place.view(wide.as_strided((place.count,), (1,)).view(torch.uint8), 0, place.dtype)
    if stored is None:
        target.copy_(wide.to(place.dtype))
        return target
    buffer = torch.empty(min(place.count, _AT_ONCE), dtype=torch.float32)
    for at in range(0, place.count, _AT_ONCE):
        part = buffer[: place.count - at]
        stored.read(bytes_of(part), 4 * at)
        stored.write(bytes_of(part.to(place.dtype)), place.dtype.itemsize * at)  # never ahead of what is read
    return target
