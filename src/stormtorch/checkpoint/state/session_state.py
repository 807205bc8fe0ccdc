"""The durable state of a session: weights, optimizer states and masters in home memory.

`settle` brings home memory up to date; plain reads are right from then until the next change, which `Still` announces.
Inside `rewriting`, no stream reads or writes home memory, and the caller writes straight into its tensors. Afterwards
every device copy is stale."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...core.errors import StormError
from ...memory.disk.mapped import FileTensor, Span
from ...memory.disk.stored import StoredTensor
from ...streams.bridge.handlers import inside_step, undisturbed
from ...streams.bridge.torch_private import in_backward, without_torch_function
from ...streams.home.parameter import plain
from ...streams.model.access import UserAccess
from ...streams.optimizer.updater import MASTER
from ...streams.units.unit import Place
from .snapshot import Still


class Durable:
    """A session's home memory, for saving and loading."""

    def __init__(self, access: UserAccess) -> None:
        self._access, self._schedule = access, access.schedule
        self._parameters, self._updater = self._schedule.weights, self._schedule.updater
        assert isinstance(self._schedule.snapshot, Still)
        self._optimizer, self.still = self._schedule.optimizer, self._schedule.snapshot
        self._units = [residence.unit for residence in self._parameters.residences]
        self._place = {id(place.parameter): place for unit in self._units for place in unit.places}

    def check_idle(self, *, loading: bool) -> None:
        """Raise if a hook or a signal handler calls inside a backward or a step; for loading, also inside a forward."""
        what = "load" if loading else "save"
        if self._access.is_interrupted(forward=loading):
            raise inside_step(what)
        if in_backward():
            raise StormError(
                f'Cannot {what} inside a backward pass: with step="backward" some weights are updated already. Call it '
                "after optimizer.step()."
            )
        if loading and self._access.in_forward():
            raise StormError("Cannot load inside a forward pass: it uses the weights. Call it before or after.")

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return None if self._optimizer is None else self._optimizer.optimizer

    @property
    def has_masters(self) -> bool:
        return self._optimizer is not None and self._optimizer.has_masters

    @property
    def has_unused_gradients(self) -> bool:
        """Whether a backward has left gradients that no step has used."""
        return any(residence.outdated for residence in self._parameters.residences)

    def unit_of(self, tensor: torch.Tensor) -> int | None:
        """The index of the unit whose home memory holds a parameter; None for tensors that are not streamed."""
        place = self._place.get(id(tensor))
        return None if place is None else place.unit.index

    def is_frozen(self, tensor: torch.Tensor) -> bool:
        """Whether it is a streamed parameter that no step changes."""
        place = self._place.get(id(tensor))
        return place is not None and not place.trained

    def in_file(self, tensor: torch.Tensor) -> FileTensor | None:
        """The bytes of a parameter that the session reads from a file; None for others."""
        place, files = self._place.get(id(tensor)), self._parameters.files
        if place is None or not place.in_file or place.span is None or files is None:
            return None
        return FileTensor(files.file_of(place), place.span.offset, place.span.size)

    def spans(self, named: Mapping[str, torch.Tensor]) -> dict[str, Span]:
        """Where the session reads parameters from files, by name: their values cannot be written."""
        places = {name: self._place.get(id(tensor)) for name, tensor in named.items()}
        return {name: p.span for name, p in places.items() if p is not None and p.in_file and p.span is not None}

    # --- saving

    def settle(self) -> None:
        """Block until home memory is up to date, including states that are kept on the device. Raises if the model's
        files were changed."""
        if self._parameters.files is not None:
            self._parameters.files.check_all()
        if self._optimizer is not None:
            self._optimizer.settle()
        self._schedule.drain()
        if self._access.device.type == "cuda":
            torch.cuda.synchronize(self._access.device)  # user code may compute unstreamed tensors on any stream

    def states(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """The optimizer's state of each parameter that has one, with its master if there is one. Copies no tensor."""
        if self._optimizer is None:
            return
        states: dict[Any, dict[str, Any]] = dict(self._optimizer.optimizer.state)
        # In the optimizer's order also before step() has shown them.
        places = {place.parameter: place for unit in self._units for place in unit.trained}
        listed = [p for group in self._optimizer.optimizer.param_groups for p in group["params"] if p in places]
        for place in (places[parameter] for parameter in listed):
            state = self._updater.state_of(place, states.get(place.parameter))
            if state is not None:
                states[place.parameter] = state
        for parameter, state in states.items():
            yield parameter, {key: plain(v) if isinstance(v, torch.Tensor) else v for key, v in state.items()}

    # --- loading

    @contextlib.contextmanager
    def rewriting(self, parameters: Iterable[nn.Parameter], *, with_states: bool) -> Iterator[None]:
        """Allow the caller to write to the home memory of these parameters inside the block.

        With ``with_states`` the caller writes masters too; otherwise they are made from the new weights."""
        places = [self._place[id(p)] for p in parameters if id(p) in self._place]
        self._begin(places)
        try:
            yield
        finally:
            self._end(places, with_states)

    @undisturbed
    def _begin(self, places: list[Place]) -> None:
        self.settle()
        for index in {place.unit.index for place in places}:
            self.still.before_change(index)
            last_load = self._parameters.residences[index].last_load
            if last_load is not None:
                last_load.synchronize()

    @undisturbed
    def _end(self, places: list[Place], with_states: bool) -> None:
        if self._access.device.type == "cuda":
            # The reading threads wrote unstreamed tensors on their own streams.
            torch.cuda.synchronize(self._access.device)
        for unit in {place.unit.index: place.unit for place in places}.values():
            self._parameters.changed(unit, by_step=False)
        with without_torch_function():
            torch.autograd.graph.increment_version([place.parameter for place in places])
        for place in places:
            if place.stored is not None:
                place.stored.sync()
            if with_states:
                self._updater.states_written(place)
            else:
                self._updater.reset_master(place)

    def note_written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark these as written; they were among those of ``rewriting``."""
        for tensor in tensors:
            if (place := self._place.get(id(tensor))) is not None:
                place.written = True

    def room_for(self, parameter: nn.Parameter, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Any]:
        """Tensors for a parameter's state, for the caller to fill: existing ones if they fit, else new ones."""
        assert self._optimizer is not None
        place = self._place.get(id(parameter))
        mine = self._updater.shown_states(place) if place is not None else {}
        found: dict[str, Any] = {}
        present = self._optimizer.optimizer.state.get(parameter, {})
        for key, (shape, dtype) in shapes.items():
            room = mine.get(key)
            if room is None and key == MASTER and place is not None:
                room = self._updater.new_master(place)
            if room is None:
                room = present.get(key)
                room = plain(room) if isinstance(room, torch.Tensor) else None
            if room is None or room.shape != shape or room.dtype != dtype:
                if key in mine:
                    raise TypeError(key)
                device = "cpu" if place is not None else parameter.device
                room = torch.empty(shape, dtype=dtype).to(device)
            found[key] = room
        return found

    def has_home(self, parameter: torch.Tensor, key: str) -> bool:
        """Whether this state of the parameter lies in the session's home memory."""
        place = self._place.get(id(parameter))
        if place is None or not place.trained:
            return False
        return self.has_masters and place.is_split if key == MASTER else key in self._updater.shown_states(place)

    def stored_weight(self, tensor: torch.Tensor) -> StoredTensor | None:
        """A parameter that lies in a scratch file, to be read and written there; None: it does not."""
        place = self._place.get(id(tensor))
        return place.stored if place is not None and place.is_contiguous else None

    def stored(self, parameter: torch.Tensor, key: str) -> StoredTensor | None:
        """A state of the parameter that lies in a file, to be read and written there; None: it is in RAM."""
        place = self._place.get(id(parameter))
        return None if place is None else self._updater.stored_state(place, key)

    def install(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Replace all of the optimizer's states. The tensors are those of ``room_for``, filled."""
        assert self._optimizer is not None
        for unit in self._units:
            for place in unit.trained:
                if MASTER not in states.get(place.parameter, {}):
                    self._updater.reset_master(place)
        own = {p: {key: v for key, v in state.items() if key != MASTER} for p, state in states.items()}
        self._optimizer.replace_states({p: state for p, state in own.items() if state})

    def forget_gradients(self) -> None:
        """Drop the gradients: they belong to other weights."""
        self._schedule.user_gradients.clear()
        if self._optimizer is not None:
            self._updater.forget_factor()
            self._optimizer.zero_grad()  # the session's; user code calls that of its own optimizer


def durable_of(model: nn.Module) -> Durable | None:
    """The `Durable` of the session that streams ``model``, or None."""
    for parameter in model.parameters():
        access = getattr(parameter, "_storm", (None,))[0]
        if isinstance(access, UserAccess) and not access.closed:
            return Durable(access)
    return None
