"""The only file that touches the user's modules: their calls, their parameters, their buffers.

The call of an *entry*, a module whose parameters make up units, is wrapped: its units are brought to the device,
their twins take the parameters' places as attributes of the instances, and go again when the call ends, however it
ends. User hooks run inside of that, and see the twins. The registered parameters stay registered all the time.

The outermost such call is a *pass*: inputs on the CPU are moved to the device, and autograd's saved weights are
replaced by notes (parameters.py). Twins with a graph are kept until the pass ends, without the memory of stays that
ended before (fetch.py), so that a unit that is used twice is one node of the graph, as a parameter is. Where it becomes
two, by two passes in one backward, gradients.py adds them up before anything else."""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from ..core.errors import StormError
from ..memory.device import bytes_for_graph
from . import functions
from .fetch import Fetch, Token, Twins
from .gradients import GradientStream
from .held import Held
from .home import HomeParameter, HomeView, home_view
from .lock import locked
from .optimizer import OptimizerStream
from .parameters import ParameterStream, SavedWeight, Stay
from .partition import Entry
from .saving import Saving
from .torch_private import (
    VersionProbe,
    in_backward,
    in_functorch,
    outside_functorch,
    outside_of_graphs,
    saved_tensor_hooks_active,
    without_torch_function,
)
from .unit import Place, Unit


class Passes(threading.local):
    """How deep the calling thread is inside streamed modules, and what it has installed there."""

    depth = 0

    def __init__(self) -> None:
        self.installed: list[Installed] = []
        self.lent: dict[int, tuple[Place, VersionProbe]] = {}  # twins that user code got without calling a module


class Installed:
    """Twins that stand in one entry's modules at the moment; ``graph``: whether they are part of one."""

    __slots__ = ("entry", "graph", "names", "units", "versions")

    def __init__(self, entry: Entry) -> None:
        self.entry, self.graph = entry, torch.is_grad_enabled()
        self.units: list[Unit] = []
        self.names: list[tuple[nn.Module, str]] = []
        self.versions: list[int] = []


class Call:
    """Stands in for ``module._call_impl``. A copy or pickle of the module gets the ordinary method instead."""

    def __init__(
        self, attachment: Attachment, module: nn.Module, entry: Entry | None, original: Callable[..., Any]
    ) -> None:
        self._attachment = weakref.ref(attachment)
        self._module = weakref.ref(module)
        self._entry, self._original = entry, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph that is being made ends here, and another one may begin behind
            return _run_eagerly(self, args, kwargs)
        return self.run(args, kwargs)

    def run(self, args: Any, kwargs: Any) -> Any:
        attachment = self._attachment()
        if attachment is None or attachment.closed:
            return self._original(*args, **kwargs)
        return attachment.call(self._module(), self._entry, self._original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(nn.Module._call_impl, memo[id(self._module())])

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "_call_impl")  # of the class: the instance's is being made


_run_eagerly: Any = outside_of_graphs(Call.run)


class Attachment:
    """Ties streams to a model, in place. Implements `home.Access` for user code."""

    def __init__(
        self,
        model: nn.Module,
        entries: list[Entry],
        units: list[Unit],
        *,
        device: torch.device,
        parameters: ParameterStream,
        gradients: GradientStream,
    ) -> None:
        self.device, self.closed = device, False
        self.lock = parameters.lock
        self._model, self._entries, self._units = model, entries, units
        self._parameters, self._gradients = parameters, gradients
        self.optimizer: OptimizerStream | None = None
        self.saving: Saving | None = None  # what becomes of activations; None: they are kept
        self.before_change: Callable[[Unit | None], None] = lambda _unit: None  # somebody may still be saving it
        self.durable: Any = None  # what of the session is saved and loaded, for load_weights
        self._passes = Passes()
        self._twins = Twins(bytes_for_graph(0, device))  # with a graph, for this pass
        self._place = {id(place.parameter): place for unit in units for place in unit.places}
        self._held: dict[int, weakref.WeakValueDictionary[int, HomeView]] = {}
        self._moved_buffers: list[tuple[nn.Module, str]] = []
        self._calls: list[tuple[nn.Module, str, Any]] = []
        parameters.on_drop = self._forget_twins

    # --- attaching and detaching

    def attach(self, images: list[torch.Tensor]) -> None:
        """Make every parameter a view of its home image and wrap the calls."""
        for unit, image in zip(self._units, images, strict=True):
            for place in unit.places:
                view = place.in_image(image)
                parameter: Any = place.parameter
                with torch.no_grad():
                    if not parameter.is_meta:
                        view.copy_(parameter.data)
                    parameter.data = view
                parameter.__class__ = HomeParameter
                parameter._storm = (self, place)
        functions.attach(self)
        wrapped = {id(entry.module): entry for entry in self._entries}
        for entry in self._entries:
            self._wrap(entry.module, entry)
        if id(self._model) not in wrapped:
            self._wrap(self._model, None)
        if self.device.type != "cpu":
            for module in self._model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.device != self.device and not buffer.is_meta:
                        module._buffers[name] = buffer.to(self.device)
                        self._moved_buffers.append((module, name))

    def _wrap(self, module: nn.Module, entry: Entry | None) -> None:
        for name in ("_call_impl", "_compiled_call_impl"):
            original = getattr(module, name)
            if original is None:
                continue
            had = vars(module).get(name)
            self._calls.append((module, name, had))
            module.__dict__[name] = Call(self, module, entry, original)

    def detach(self) -> None:
        """Make the modules and parameters ordinary again."""
        if self.closed:
            return
        self.closed = True
        self._clean()
        self._unwrap()
        functions.detach(self)
        for unit in self._units:
            for place in unit.places:
                grad = None
                home = self._gradients.homes[unit.index]
                if place.trained:
                    if place.index not in home.consumed_places:
                        self._gradients.fold(place)
                    if place.index in home.present:
                        home.join()
                        grad = home.view(place).to(place.dtype).clone()
                parameter: Any = place.parameter
                vars(parameter).pop("_storm", None)
                parameter.__class__ = nn.Parameter
                if place.trained:
                    parameter.grad = grad
        for module, name in self._moved_buffers:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = buffer.to("cpu")

    def _unwrap(self) -> None:
        for module, name, had in reversed(self._calls):
            if not isinstance(module.__dict__.get(name), Call):
                continue  # somebody has put something over ours, which does nothing any more
            if had is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = had

    # --- the call of a module

    def call(
        self, module: nn.Module | None, entry: Entry | None, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        passes = self._passes
        outermost = passes.depth == 0
        hooks: AbstractContextManager[Any] = nullcontext()
        in_graph = in_backward()
        if outermost and not in_graph:
            self._clean()
            self._begin(module, entry)
            if not saved_tensor_hooks_active():
                hooks = self._hooks()
            if self.device.type != "cpu":
                args, kwargs = _pytree.tree_map_only(torch.Tensor, self._moved, (args, kwargs))
        installed = Installed(entry) if entry is not None else None
        kept = len(passes.installed)
        depth = passes.depth
        try:
            passes.depth = depth + 1
            with hooks:
                if installed is not None:
                    passes.installed.append(installed)
                    self._install(installed, in_graph)
                result = original(*args, **kwargs)
                if installed is not None:
                    self._refuse_writes(installed)
                if outermost and passes.lent:
                    self._refuse_writes_to_lent()
                return result
        finally:
            self._end_call(depth, kept, outermost and not in_graph)

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        """Autograd's saved tensors go through us: weights become notes, activations are arranged."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            if self.saving is None or not torch.is_grad_enabled():
                yield
            else:
                with self.saving.passing(self._pack):
                    yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        weight = self._parameters.pack(tensor)
        if weight is not None:
            return weight
        return Held(tensor) if self.saving is None else self.saving.pack(tensor)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, SavedWeight):
            return self._parameters.unpack(saved)
        if isinstance(saved, Held):
            return saved.get()
        assert self.saving is not None
        return self.saving.unpack(saved)

    @locked
    def _end_call(self, depth: int, kept: int, ends_pass: bool) -> None:
        passes = self._passes
        passes.depth = depth
        while len(passes.installed) > kept:
            self._uninstall(passes.installed.pop())
        if ends_pass:
            self._twins.clear()
            passes.lent.clear()

    def _begin(self, module: nn.Module | None, entry: Entry | None) -> None:
        order = self._parameters.order
        training = torch.is_grad_enabled()
        if module is self._model or (entry is not None and order.starts_with(entry.units[0].index)):
            self._parameters.begin_pass(training)

    def _clean(self) -> None:
        """Undo what a pass that was cut off has left: a Ctrl-C, or a backward that raised."""
        while self._passes.installed:
            self._uninstall(self._passes.installed.pop())
        self._twins.clear()
        self._passes.lent.clear()
        self._gradients.abandon()

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or isinstance(tensor, (HomeParameter, HomeView)):
            return tensor
        return tensor.to(self.device, non_blocking=not tensor.is_pinned())  # a pinned one may be refilled at once

    @locked
    def _install(self, installed: Installed, in_graph: bool) -> None:
        entry = installed.entry
        tensors: dict[int, torch.Tensor] = {}
        for unit in entry.units:
            stay = self._parameters.use(unit)
            installed.units.append(unit)
            self._parameters.hold(unit)
            for index, twin in self._twins_of(unit, stay, in_graph).items():
                tensors[id(unit.places[index].parameter)] = twin
        for use in entry.uses:
            if isinstance(use.module, nn.RNNBase):
                continue  # they would keep the twins in a list of their own
            if use.module._parameters.get(use.name) is not use.parameter:
                # Somebody has put another tensor there: functional_call, or a user's own parameter. A transformation
                # of torch.func wraps home memory without a word.
                if in_functorch():
                    self.join(self._place[id(use.parameter)], "weight")
                continue
            twin = use.module.__dict__[use.name] = tensors[id(use.parameter)]
            installed.names.append((use.module, use.name))
            installed.versions.append(twin._version)

    def _refuse_writes(self, installed: Installed) -> None:
        """A forward that has changed a weight in place has changed the copy on the device, which will be dropped."""
        for (module, name), version in zip(installed.names, installed.versions, strict=True):
            twin = module.__dict__.get(name)
            if twin is not None and not twin.is_inference() and twin._version != version:
                raise StormError(
                    f"The forward of a {type(module).__name__} has changed its parameter {name!r} in place, and the "
                    "change would be lost. Give that module's name to storm.stream as leave=[...]."
                )

    def _refuse_writes_to_lent(self) -> None:
        """Writes to a parameter are seen, and go home; those to a part of it, taken in forward, do not."""
        for place, probe in self._passes.lent.values():
            if probe.changed:
                raise StormError(
                    f"A forward has changed a view of the parameter {place.name!r}, or of one that is streamed with "
                    "it, in place, and the change would be lost. Write to the parameter itself (p.copy_(x), p[0] = x), "
                    "or give the name of its module to storm.stream as leave=[...]."
                )

    @locked
    def _uninstall(self, installed: Installed) -> None:
        for module, name in installed.names:
            module.__dict__.pop(name, None)
        try:
            # An outer call may have the same parameters installed: a root with parameters of its own, say.
            for outer in self._passes.installed:
                if any(a is b for a in outer.units for b in installed.units):
                    self._reinstall(outer)
        finally:
            self._parameters.release(installed.units)

    def _reinstall(self, outer: Installed) -> None:
        for use in outer.entry.uses:
            if use.name not in use.module.__dict__ and (use.module, use.name) in outer.names:
                use.module.__dict__[use.name] = self._another_twin(self._place[id(use.parameter)], outer)

    def _renew(self, unit: Unit) -> None:
        """A forward has written the weights of ``unit`` at home, and modules compute with it: with the new ones now."""
        for installed in self._passes.installed:
            if unit not in installed.units:
                continue
            self._refuse_writes(installed)  # to twins, before they go
            numbers = [
                number
                for number, (module, name) in enumerate(installed.names)
                if (place := self._place.get(id(module._parameters.get(name)))) is not None and place.unit is unit
            ]
            for number in numbers:
                module, name = installed.names[number]
                module.__dict__.pop(name, None)  # all of them, or the old ones keep the room that the new ones need
            for number in numbers:
                module, name = installed.names[number]
                parameter: Any = module._parameters[name]
                twin = module.__dict__[name] = self._another_twin(self._place[id(parameter)], installed)
                installed.versions[number] = twin._version

    def _another_twin(self, place: Place, installed: Installed) -> torch.Tensor:
        with torch.set_grad_enabled(installed.graph):  # whatever the mode is just now
            return self.twin(place)

    # --- twins

    @outside_functorch
    def _twins_of(self, unit: Unit, stay: Stay, in_graph: bool) -> dict[int, torch.Tensor]:
        """The tensors that stand in for the unit's parameters, by index."""
        views = stay.views
        if not views:
            with torch.inference_mode(False):  # views for good: a later pass may train with them
                views.update({place.index: place.in_image(stay.base) for place in unit.places})
        if not torch.is_grad_enabled():
            return views
        known = self._twins.find(unit.index, views) if not in_graph else None
        if known is not None:
            return {**views, **known}
        with without_torch_function():
            leaves = [place for place in unit.places if place.parameter.requires_grad]
        if not leaves:
            return views
        token = Token(unit, [place.index for place in leaves])
        self._gradients.homes[unit.index].expect(token)
        made = Fetch.apply(  # type: ignore[no-untyped-call]
            token,
            self._gradients.collect,
            [views[place.index] for place in leaves],
            *(place.parameter for place in leaves),
        )
        twins = {place.index: twin for place, twin in zip(leaves, made, strict=True)}
        if not in_graph and self._passes.depth:
            self._twins.add(unit.index, twins)
        return {**views, **twins}

    def _forget_twins(self, unit: Unit) -> None:
        """The unit's stay ends: we must not keep its bytes, but the node, for another use in this pass."""
        self._twins.let_go(unit.index)

    # --- home.Access, for user code

    def in_forward(self) -> bool:
        return not self.closed and self._passes.depth > 0

    @locked
    def twin(self, place: Place) -> torch.Tensor:
        stay = self._parameters.use(place.unit)
        return self.lend(place, self._twins_of(place.unit, stay, in_backward())[place.index])

    def lend(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        lent = self._passes.lent
        if self._passes.depth == 0 or id(tensor) in lent or in_backward():
            return tensor
        if not torch.is_inference_mode_enabled() and not in_functorch():
            lent[id(tensor)] = place, VersionProbe(tensor)
        return tensor

    @locked
    def join(self, place: Place, kind: str) -> None:
        if self.closed or kind == "past":
            return
        if kind == "grad":
            if self.optimizer is not None:
                self.optimizer.apply_factor()
            home = self._gradients.homes[place.unit.index]
            if place.index in home.consumed_places:
                raise StormError(
                    f'The gradient of {place.name!r} is gone: step="backward" updates units as their gradients arrive. '
                    'Use step="forward" (what "auto" takes) to read, clip or change gradients.'
                )
            home.join()
        elif self.optimizer is not None:
            self.optimizer.join(place.unit, states=kind == "state")

    @locked
    def before_write(self, place: Place, kind: str) -> None:
        if self.closed or kind == "past":
            return
        if kind != "grad":
            self.before_change(place.unit)
        if kind == "weight":
            last = self._parameters.residences[place.unit.index].last_load
            if last is not None:
                last.synchronize()  # a load may still be reading
            if self.optimizer is not None:
                self.optimizer.masters.before_rewrite(place)
        elif kind == "grad" and self.optimizer is not None:
            self.optimizer.join(place.unit)  # an update may still be reading

    @locked
    def after_write(self, place: Place, kind: str) -> None:
        if self.closed:
            return
        if kind == "weight":
            self._parameters.changed(place.unit, by_step=False)
            if self.optimizer is not None:
                self.optimizer.masters.rewritten(place)
            if self._passes.installed:
                self._renew(place.unit)
        elif kind == "grad":
            self._gradients.homes[place.unit.index].norms.pop(place.index, None)

    @locked
    def grad(self, place: Place) -> torch.Tensor | None:
        return None if self.closed else self._gradients.grad(place, self.watch)

    @locked
    def set_grad(self, place: Place, value: torch.Tensor | None) -> None:
        if value is not None and self.optimizer is not None:
            self.optimizer.apply_factor()
        self._gradients.set_grad(place, value)
        if value is None and self.optimizer is not None and not any(home.present for home in self._gradients.homes):
            self.optimizer.forget_factor()

    def held(self, place: Place) -> MutableMapping[int, HomeView]:
        return self._held.setdefault(id(place), weakref.WeakValueDictionary())

    def watch(self, tensor: torch.Tensor, place: Place, kind: str) -> HomeView:
        return home_view(tensor, self, place, kind)
