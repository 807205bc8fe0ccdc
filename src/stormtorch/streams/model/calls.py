"""Wraps the calls of modules whose parameters are streamed.

An *entry* is a module whose parameters make up units. Its wrapped call brings the units to the device and sets device
views of the parameters (twins) as attributes of the module instances. It removes them when the call ends or raises.
User hooks run inside the wrapper and see the twins. The parameters remain registered all the time. A tensor that user
code puts in a parameter's place takes precedence over the twin (home/registration.py).

The outermost wrapped call is a *pass*: it moves inputs from the CPU to the device and replaces autograd's saved weights
by notes (weights/stream.py). The calls of the model itself and of modules that contain entries are wrapped too: user
code may call ``model.encoder`` alone, and that is one pass."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from ...core.errors import StormError
from ..activations.offloading.offloaded import Held
from ..bridge import handlers
from ..bridge.lock import locked
from ..bridge.module_calls import ModuleCall, WrappedCalls
from ..bridge.ranks import refuse_ranks
from ..bridge.torch_private import (
    current_pass,
    in_backward,
    in_functorch,
    never_traced,
    outside_of_graphs,
    saved_tensor_hooks_active,
)
from ..home.parameter import HomeParameter, HomeView, joined
from ..home.registration import take_out
from ..units.partition import Entry, Use
from ..units.unit import Unit
from ..weights.stream import SavedWeight
from .schedule import Schedule
from .turns import Turns
from .views import Twins
from .write_guard import WriteGuard


class Installed:
    """Twins that are installed in one entry's modules; ``graph``: whether autograd records them."""

    __slots__ = ("entry", "graph", "units", "versions")

    def __init__(self, entry: Entry) -> None:
        self.entry, self.graph = entry, torch.is_grad_enabled()
        self.units: list[Unit] = []
        self.versions: dict[Use, int] = {}  # of the twins, when they were installed

    def refuse_writes(self) -> None:
        """Raise if a forward has written a weight in place: it wrote to the device copy, which will be dropped."""
        for use, version in self.versions.items():
            twin = use.module.__dict__.get(use.name)
            if twin is not None and twin._version != version:
                raise StormError(
                    f"The forward of a {type(use.module).__name__} has changed its parameter {use.name!r} in place, "
                    "and the change would be lost. Pass that module's name to storm.stream: leave=[...]."
                )

    def put(self, use: Use, twin: torch.Tensor) -> None:
        """Set a twin as the module's attribute, where it hides the parameter."""
        use.module.__dict__[use.name] = twin
        self.versions[use] = twin._version


class _Stack(threading.local):
    """The calling thread's installed twins, the innermost last."""

    def __init__(self) -> None:
        self.installed: list[Installed] = []


class Call(ModuleCall["Calls"]):
    """The wrapped call of a module that is an entry, or contains some."""

    def __init__(self, calls: Calls, module: nn.Module, entry: Entry | None, original: Callable[..., Any]) -> None:
        super().__init__(calls, module, original)
        self._entry = entry

    @never_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch.compile breaks its graph here; another may begin after the call
            return _run_eagerly(self, args, kwargs)
        return self.run(args, kwargs)

    def run(self, args: Any, kwargs: Any) -> Any:
        calls = self._owner()
        if calls is None or calls.closed:
            return self._original(*args, **kwargs)
        return calls.call(self._module(), self._entry, self._original, args, kwargs)


_run_eagerly: Any = outside_of_graphs(Call.run)


class Calls:
    """The wrapped calls of one model's modules, and the twins installed in them."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        *,
        device: torch.device,
        schedule: Schedule,
        twins: Twins,
        guard: WriteGuard,
    ) -> None:
        self.closed = False  # True: calls run unwrapped
        self.lock = schedule.lock
        self._model, self._device = model, device
        self._schedule, self._weights, self._twins, self._guard = schedule, schedule.weights, twins, guard
        self._passes, self._stack = twins.passes, _Stack()
        self._place = {id(place.parameter): place for unit in units for place in unit.places}
        self._wrapped = WrappedCalls(self)
        self._inside: dict[int, set[int]] = {}  # by id of a wrapped module: the units in it
        self._turns = Turns()

    def wrap(self, module: nn.Module, entry: Entry | None) -> None:
        """Route calls of ``module`` through this object; ``entry`` names the units that they bring to the device."""
        places = (self._place.get(id(parameter)) for parameter in module.parameters())
        self._inside[id(module)] = {place.unit.index for place in places if place is not None}
        self._wrapped.wrap(module, lambda original: Call(self, module, entry, original))

    def unwrap(self) -> None:
        """Make the modules' calls ordinary again and remove installed twins."""
        self._clean()
        self._wrapped.unwrap()

    def call(
        self, module: nn.Module | None, entry: Entry | None, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        passes, stack = self._passes, self._stack.installed
        outermost, in_graph = passes.depth == 0, in_backward()
        if entry is None and not outermost:
            return original(*args, **kwargs)
        begins = outermost and not in_graph
        if begins:
            handlers.look_at_all()
            self._turns.wait_for_backward()
            self._take_turn()
            passes.handler = handlers.handler_here()
        elif handlers.state.running and handlers.handler_here() != passes.handler:
            raise handlers.inside_step("call the model")
        hooks: AbstractContextManager[Any] = nullcontext()
        installed = Installed(entry) if entry is not None else None
        depth, kept = passes.depth, 0 if begins else len(stack)
        try:
            if begins:
                self._clean()
                self._begin(module)
                self._guard.begin_pass()
                if not saved_tensor_hooks_active():
                    hooks = self._hooks()
                if self._device.type != "cpu":
                    args, kwargs = _pytree.tree_map_only(torch.Tensor, self._moved, (args, kwargs))
            passes.depth = depth + 1
            with hooks:
                if installed is not None:
                    if self._schedule.witness is not None:
                        self._schedule.witness.enter((args, kwargs))
                    rows = None if in_graph else self._rows(installed.entry, args, kwargs)
                    stack.append(installed)
                    self._install(installed, in_graph, rows)
                result = self._run(installed, in_graph, original, args, kwargs)
                if outermost and passes.lent:
                    self._twins.refuse_writes()
                if begins:
                    self._guard.end_pass()
                return result
        finally:
            self._end_call(depth, kept, begins)

    def _run(
        self, installed: Installed | None, in_graph: bool, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a module's own call; raise where it has written its weights on the device."""
        if installed is None:
            return original(*args, **kwargs)
        sums = None if in_graph else self._guard.before(installed.entry)
        result = original(*args, **kwargs)
        installed.refuse_writes()
        if sums is not None:
            self._guard.after(installed.entry, sums)
        return result

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        """Catch the tensors that autograd saves: weights become notes, `Saving` handles activations."""
        unpack, saving, note_of = self._unpack, self._schedule.saving, self._weights.pack
        keep: Callable[[torch.Tensor], Any] = Held if saving is None else saving.pack
        pool = self._schedule.residency.pool

        @never_traced
        def pack(tensor: torch.Tensor) -> Any:
            low, high = pool.span
            try:
                is_there = low <= tensor.data_ptr() < high
            except (RuntimeError, NotImplementedError):  # it has no memory of its own
                is_there = False
            return (note_of(tensor) if is_there else None) or keep(tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            if saving is None or not torch.is_grad_enabled():
                yield
            else:
                with saving.passing(pack, unpack):
                    yield

    @never_traced
    def _unpack(self, saved: Any) -> torch.Tensor:
        if current_pass() != self._turns.backward:
            self._turns.begin_backward()
        if type(saved) is SavedWeight:
            return self._schedule.unpack(saved)
        saving = self._schedule.saving
        if type(saved) is Held:
            if saving is not None:
                saving.note_end()
            return saved.get()
        assert saving is not None
        return saving.unpack(saved)

    @locked
    def _end_call(self, depth: int, kept: int, ends_pass: bool) -> None:
        self._passes.depth = depth
        stack = self._stack.installed
        while len(stack) > kept:
            self._uninstall(stack.pop())
        if ends_pass:
            self._twins.end_pass()
            self._turns.end_forward()
            self._schedule.end_pass()

    @locked
    def _take_turn(self) -> None:
        """Refuse a second thread or process: installed twins and a begun pass belong to one thread at a time."""
        refuse_ranks()
        self._turns.begin_forward()

    def _begin(self, module: nn.Module | None) -> None:
        order = self._schedule.residency.order
        whole = module is self._model or order.starts_with(self._inside.get(id(module), ()))
        self._schedule.begin_pass(module, training=torch.is_grad_enabled(), whole=whole)

    def _clean(self) -> None:
        """Undo what an interrupted pass has left, after Ctrl-C or a backward that raised."""
        stack = self._stack.installed
        while stack:
            self._uninstall(stack.pop())
        self._twins.end_pass()
        self._schedule.abandon()

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or isinstance(tensor, (HomeParameter, HomeView)):
            return tensor
        return tensor.to(self._device, non_blocking=not tensor.is_pinned())  # user code may refill a pinned one at once

    @staticmethod
    def _rows(entry: Entry, args: Any, kwargs: Any) -> frozenset[int] | None:
        """Of fused experts, those that the call needs; None: it needs the whole unit, as other modules do."""
        if entry.routed is None or torch.is_grad_enabled() or in_functorch():
            return None
        return entry.routed.rows(entry.module, args, kwargs)

    @locked
    def _install(self, installed: Installed, in_graph: bool, rows: frozenset[int] | None) -> None:
        for unit in installed.entry.units:
            stay = self._schedule.use(unit, rows, by_call=True)
            installed.units.append(unit)
            self._schedule.hold(unit)
            uses = [use for use in installed.entry.uses if use.place.unit is unit and _takes_twin(use)]
            twins = self._twins.of_unit(unit, stay, [use.place for use in uses], in_graph)
            for use, twin in zip(uses, twins, strict=True):
                installed.put(use, twin)

    @locked
    def _uninstall(self, installed: Installed) -> None:
        for use in installed.versions:
            take_out(use.module, use.name)
        self._schedule.release(installed.units)

    def renew(self, unit: Unit) -> None:
        """Give modules that are computing with ``unit`` its new weights: a forward has just written them at home."""
        for installed in self._stack.installed:
            if unit not in installed.units:
                continue
            installed.refuse_writes()  # writes to twins would be lost with them
            uses = [use for use in installed.versions if use.place.unit is unit and use.name in use.module.__dict__]
            for use in uses:
                del use.module.__dict__[use.name]  # all first: old twins would keep the room that new ones need
            with torch.set_grad_enabled(installed.graph):  # the mode of the call, not the present one
                for use in uses:
                    installed.put(use, self._twins.of(use.place))


def _takes_twin(use: Use) -> bool:
    """Whether a call has to install the parameter's twin in that module."""
    if use.wrapped or isinstance(use.module, nn.RNNBase):
        return False  # the adapter, or the module's own list of weights, would keep the twins
    if use.module._parameters.get(use.name) is use.parameter:
        return use.name not in use.module.__dict__  # else a call around this one has installed it
    # Another tensor stands there: from functional_call, or a parameter that user code has set. Transformations of
    # torch.func read home memory without going through our hooks.
    if in_functorch():
        joined(use.parameter)
    return False
