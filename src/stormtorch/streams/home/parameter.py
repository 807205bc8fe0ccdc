"""The class of registered parameters while their model is streamed, and of views of home memory that user code holds.

One file of more than 400 lines: torch calls both classes' ``__torch_function__`` for every access, it dispatches to
functions by their names, and these make and tell apart the two classes. A split would be a cycle of imports.

`HomeParameter` replaces ``nn.Parameter`` as the class of the user's own objects, so that every read and write of a
parameter by user code passes through ``__torch_function__``:

- outside of the model's forward, pending work on the parameter is finished first, so that a value is never stale, and
  a write tells the streams that the device copy is out of date;
- inside of it, and wherever other tensors of the device are involved, the parameter's device view (twin) takes its
  place. Modules of a unit hold twins anyway; this serves all other uses, such as a tied weight that is reached through
  another module. ``autograd.Function`` needs separate treatment: autograd_functions.py. A write goes to home memory
  here too, and the forward goes on with a new twin.

Tensors that share home memory are handed out as `HomeView`, which does the same for as long as they live:
``w = p.data`` taken once and edited every step works. A gradient is a `HomeView` too: reading ``p.grad`` does not wait,
using it does.

``p.data = x`` cannot give the parameter other memory: it copies ``x``. Views that were taken before must not see that,
so they get a copy of the old values; when one of them is assigned back, they are views of home memory again. So code
that swaps averaged weights in and out by ``p.data`` gets the trained ones back, as in plain PyTorch.

``device`` of a streamed parameter is the device that computes with it, so that ``x.to(p.device)`` and ``model.device``
keep their meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ...core.errors import StormError
from ..bridge.handlers import undisturbed
from ..bridge.torch_private import in_backward, never_traced, without_torch_function
from ..units.unit import Place
from .mutation import ARRAYS, EXPOSING, METADATA, RESHAPING, target_of
from .torch_grad import SLOT


class Lender(Protocol):
    """Serves user code that computes on the device."""

    def of(self, place: Place) -> torch.Tensor:
        """The device view that stands in for the parameter."""

    def lend(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        """Lend user code in forward a tensor over the device's memory, and note it: writes to it would be lost."""


class Access(Protocol):
    """Serves user code that touches home memory."""

    device: torch.device
    closed: bool  # the session is
    stepping: int | None  # the signal handler that runs an optimizer's step, 0 for none; None: no step runs

    @property
    def twins(self) -> Lender:
        """Lends device views of the parameters."""

    def in_forward(self) -> bool:
        """Whether the calling thread is inside a streamed module's forward."""

    def is_interrupted(self, *, forward: bool = True) -> bool:
        """Whether the caller is a signal handler that has interrupted a backward, a step or, with ``forward``, a
        forward."""

    def join(self, place: Place, kind: str) -> None:
        """Block until home memory of this ``kind`` is up to date; kinds are those of `HomeView`."""

    def before_write(self, place: Place, kind: str) -> None:
        """User code is about to write home memory; ``join`` was called."""

    def after_write(self, place: Place, kind: str) -> None:
        """User code has written it."""

    def expose(self, place: Place, kind: str) -> None:
        """User code gets an array over home memory, or its address, through which it may write without our notice."""

    def grad(self, place: Place) -> torch.Tensor | None:
        """The gradient; does not wait for its values."""

    def grad_norm(self, place: Place) -> torch.Tensor | None:
        """The gradient's 2-norm, on the CPU, if it was computed on the device; None: compute it from the values."""

    def scale_grad(self, place: Place, factor: torch.Tensor) -> bool:
        """Multiply the gradient by ``factor``, a number on the CPU, when its values are next used. False: the caller
        has to do it."""

    def set_grad(self, place: Place, value: torch.Tensor | None) -> None:
        """Replace the gradient."""


def _grad_of(home: HomeParameter) -> torch.Tensor | None:
    if "_storm" not in vars(home):
        return SLOT.__get__(home)  # type: ignore[no-any-return]
    access, place = home._storm
    with without_torch_function():
        return access.grad(place)


def _set_grad_of(home: HomeParameter, value: torch.Tensor | None = None) -> None:
    if "_storm" not in vars(home):
        SLOT.__set__(home, value)
        return
    access, place = home._storm
    with without_torch_function():
        access.set_grad(place, value)


class HomeParameter(nn.Parameter):
    """A streamed parameter. Its memory is a view of the unit's home image."""

    _storm: tuple[Access, Place]
    _storm_kind = "weight"
    # Clipping and zero_grad ask each parameter four times a step: ``__torch_function__`` takes longer than the answer.
    grad = property(_grad_of, _set_grad_of, _set_grad_of)

    @classmethod
    @never_traced
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _through(func, args, kwargs or {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__" and "_storm" in vars(self):  # before anything is exchanged
            raise StormError(
                f"torch.utils.swap_tensors cannot exchange the streamed parameter {self._storm[1].name!r}: its memory "
                "belongs to its unit. Assign values by p.data = x or p.copy_(x), or close the session first."
            )
        super().__setattr__(name, value)

    def set_(self, source: Any = None, *rest: Any, **named: Any) -> Any:
        """Act as ``p.data = x``. Not covered by ``__torch_function__``; parametrizations use it when they come and
        go."""
        if "_storm" not in vars(self):
            return super().set_(*(() if source is None else (source,)), *rest, **named)
        if source is self and not (rest or named):
            return self
        if not isinstance(source, torch.Tensor) or rest or named:
            raise StormError(
                f"set_ cannot give the streamed parameter {self._storm[1].name!r} other memory. Assign a tensor of its "
                "shape by p.data = x, or close the session first."
            )
        self.data = source
        return self

    def __reduce_ex__(self, proto: Any) -> Any:
        if not hasattr(self, "_storm"):
            return super().__reduce_ex__(proto)  # type: ignore[no-untyped-call]
        access, place = self._storm
        access.join(place, "weight")
        with without_torch_function():
            return nn.Parameter(alone(_plain(self.data)), self.requires_grad).__reduce_ex__(proto)

    def __copy__(self) -> torch.Tensor:
        """Another parameter over the same memory, with its own gradient: writes to it change the weight."""
        if "_storm" not in vars(self):
            return nn.Parameter(self.data, self.requires_grad)
        with without_torch_function():
            view = _made_of(self, torch.Tensor.detach(self))
            view._is_param = True  # makes it an nn.Parameter
            return view.requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(_plain(self.data).clone(), self.requires_grad)
        return memo[id(self)]


class HomeView(torch.Tensor):
    """A tensor over home memory that user code holds. ``_storm_kind``: "weight", "grad" or "state".

    "past" is a weight that ``p.data = x`` has replaced, or a gradient that was dropped: the views own the memory.
    ``_storm_whole``: it is the object that torch knows as the gradient or the state, not one made from it."""

    _storm: tuple[Access, Place]
    _storm_kind: str
    _storm_whole: bool = False
    _is_param: bool

    @classmethod
    @never_traced
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OF_GRADIENTS and not kwargs and len(args) == 2:
            view, value = args
            if type(view) is HomeView and view._storm_kind == "grad" and view._storm_whole:
                found = _OF_GRADIENTS[func](view, value)
                if found is not None:
                    return found
        return _through(func, args, kwargs or {})

    def set_(self, source: Any = None, *rest: Any, **named: Any) -> Any:
        """Act as ``p.grad.data = x``. Not covered by ``__torch_function__``."""
        if not isinstance(source, torch.Tensor) or rest or named or not _has_its_place(self):
            return super().set_(*(() if source is None else (source,)), *rest, **named)
        self.data = source
        return self

    def __copy__(self) -> torch.Tensor:
        with without_torch_function():
            return _made_of(self, torch.Tensor.detach(self)).requires_grad_(self.requires_grad)

    def __format__(self, spec: str) -> str:
        """Format as torch does, which treats only its own class as numbers."""
        if self.dim():
            return object.__format__(self, spec)
        return format(_plain(joined(self)).detach(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _plain(self.clone())
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        access, place = self._storm
        access.join(place, self._storm_kind)
        return alone(_plain(self)).__reduce_ex__(proto)


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own: ``torch.save`` writes whole storages, and refuses two dtypes in one."""
    if not tensor.numel():
        return torch.empty_like(tensor)
    with torch.no_grad(), without_torch_function():
        own = tensor.detach().contiguous()
        return torch.from_numpy(own.view(-1).view(torch.uint8).numpy()).view(tensor.dtype).view(tensor.shape)


def home_view(tensor: torch.Tensor, access: Access, place: Place, kind: str) -> HomeView:
    """``tensor``, which lies in home memory, as a `HomeView`."""
    with without_torch_function():
        view = tensor.as_subclass(HomeView)
    view._storm, view._storm_kind, view._storm_whole = (access, place), kind, True
    if kind != "state":
        place.views[id(view)] = view
    return view


def _made_of(home: HomeParameter | HomeView, tensor: torch.Tensor) -> HomeView:
    """``tensor``, which shares memory with ``home``, as a `HomeView` of the same kind."""
    view = home_view(tensor, *home._storm, home._storm_kind)
    view._storm_whole = False
    return view


def _has_its_place(view: HomeView) -> bool:
    """Whether the view is a gradient or a state itself: it cannot get other memory, so values are copied to it."""
    return view._storm_whole and view._storm_kind in ("grad", "state")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with without_torch_function():
        return tensor.as_subclass(torch.Tensor)


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``; if it lies in home memory, its pending work is finished first."""
    if isinstance(tensor, (HomeParameter, HomeView)) and hasattr(tensor, "_storm"):
        tensor._storm[0].join(tensor._storm[1], tensor._storm_kind)
    return tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor, for code that has waited for pending work itself."""
    return _plain(tensor) if isinstance(tensor, (HomeView, HomeParameter)) else tensor


def _homes(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[HomeParameter | HomeView]:
    """The tensors of home memory among the arguments, also inside lists and tuples."""
    found: list[HomeParameter | HomeView] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (HomeParameter, HomeView)):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, (HomeParameter, HomeView))]
    return [home for home in found if hasattr(home, "_storm")]


def _through(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name: str = getattr(func, "__name__", "").partition(".")[0]  # torch.ops have names such as "mul_.Tensor"
    if func is torch.autograd.grad and (edges := _edges(*args, **kwargs)) is not None:
        return func(args[0] if args else kwargs["outputs"], edges, *args[2:], **_without(kwargs, "outputs", "inputs"))
    with without_torch_function():
        if name in ("__get__", "__set__", "__delete__"):
            attribute: str = getattr(getattr(func, "__self__", None), "__name__", "")
            table = _OF_PARAMETERS if isinstance(args[0], HomeParameter) else _OF_VIEWS
            special = table.get((attribute, name))
            if special is not None and hasattr(args[0], "_storm"):
                return special(func, args)
            if attribute in METADATA:
                return func(*args, **kwargs)
            name = attribute if name == "__get__" else f"{attribute}_"
        elif name in METADATA or name in ("backward", "grad"):  # the latter two name parameters without using them
            return func(*args, **kwargs)
        homes = _homes(args, kwargs)
        itself = args[0] if args else next(iter(kwargs.values()), None)
        if name in RESHAPING and isinstance(itself, HomeParameter) and homes:
            raise StormError(
                f"{name} cannot give the streamed parameter {homes[0]._storm[1].name!r} another shape: its memory "
                "belongs to its unit. Close the session, then stream again."
            )
        if name in _OF_ITSELF and homes and homes[0] is itself:
            return _OF_ITSELF[name](homes[0])
        return _with_homes(func, name, homes, args, kwargs) if homes else func(*args, **kwargs)


def _edges(outputs: Any, inputs: Any, *_: Any, **settings: Any) -> list[Any] | None:
    """For ``torch.autograd.grad``, the edges of the graph that lead to ``inputs``: code that backward runs again must
    still be given device views of parameters, and tensors of ours would have to be hidden from torch meanwhile. None if
    torch does not take edges there."""
    given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    if settings.get("materialize_grads") or settings.get("is_grads_batched") or _homes([outputs], {}):
        return None
    with without_torch_function():
        if not all(isinstance(one, torch.Tensor) and one.requires_grad for one in given):
            return None
        return [torch.autograd.graph.get_gradient_edge(one) for one in given]


def _without(kwargs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in names}


def _detach_(home: HomeParameter | HomeView) -> torch.Tensor:
    """Detach without torch's refusal for views: for user code, home memory is no view."""
    if isinstance(home, HomeView) and home.grad_fn is not None:
        return torch.Tensor.detach_(home)
    return home.requires_grad_(False)


def _share_memory_(home: HomeParameter | HomeView) -> torch.Tensor:
    """Do nothing, as torch does for memory of a GPU, for which home memory stands."""
    access, place = home._storm
    if home._storm_kind == "past":
        torch.Tensor.share_memory_(home)  # type: ignore[no-untyped-call]
        return home
    if access.device.type == "cpu":
        raise StormError(
            f"share_memory_ cannot move the streamed parameter {place.name!r}, its gradient or its state: its memory "
            "belongs to its unit. Share a copy (p.detach().clone()), or close the session first."
        )
    return home


_OF_ITSELF: dict[str, Callable[[HomeParameter | HomeView], torch.Tensor]] = {
    "detach_": _detach_,
    "share_memory_": _share_memory_,
}


def _with_homes(
    func: Any, name: str, homes: list[HomeParameter | HomeView], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    target = target_of(func, name, args, kwargs)
    written = [home for home in homes if home is target or _is_in(home, target)]
    if _in_forward(homes):
        if not written:
            return func(*_exchanged(args, _twin), **_exchanged(dict(kwargs), _twin))

        def exchange(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if any(tensor is home for home in written) else _here(_twin(tensor))

        return _on_home(func, name, homes, written, _exchanged(args, exchange), _exchanged(dict(kwargs), exchange))
    if name in EXPOSING:
        written = [home for home in homes if not _is_in_file(home)]  # of those, every load looks for writes
        for home in homes:
            if name in ARRAYS or home not in written:
                home._storm[0].expose(home._storm[1], home._storm_kind)
    if _any_on_device((*args, *kwargs.values())):
        # For user code, parameters are on the device. So compute there, and copy results that are written to home
        # memory back.
        if not written:
            return func(*_exchanged(args, _there), **_exchanged(dict(kwargs), _there))
        if not _any_on_device([target]):  # a mix of both: torch reports the error
            args, kwargs = _exchanged(args, _here), _exchanged(dict(kwargs), _here)
    return _on_home(func, name, homes, written, args, kwargs)


def for_function(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Exchange the arguments of an ``autograd.Function``, which does not say whether it writes.

    Also where checkpointing runs a part of a forward again without calling a module. Tensors that remain in home memory
    keep their class: the function's own code sees these very objects."""
    with without_torch_function():
        if in_backward() or _in_forward(_homes(args, {})):
            args = tuple(_twin(arg) for arg in args)
        return tuple(_there(arg) for arg in args) if _any_on_device(args) else args


def _on_home(
    func: Any,
    name: str,
    homes: list[HomeParameter | HomeView],
    written: list[HomeParameter | HomeView],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    for home in written:
        refuse_write(*home._storm, home._storm_kind)
    for home in homes:
        joined(home)
    result = _written(func, written, args, kwargs) if written else func(*args, **kwargs)
    if name == "__iter__":
        return iter([_watched(row, homes) for row in result])
    return _watched(result, homes)


@undisturbed  # else a signal handler could begin to save values that are about to change
def _written(
    func: Any, written: list[HomeParameter | HomeView], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    for home in written:
        home._storm[0].before_write(home._storm[1], home._storm_kind)
    try:
        return func(*args, **kwargs)
    finally:  # a function that writes several may have written some before it raises
        for home in written:
            home._storm[0].after_write(home._storm[1], home._storm_kind)


def _is_in_file(home: HomeParameter | HomeView) -> bool:
    """Whether it shows a weight that is read from a file."""
    access, place = home._storm
    return place.in_file and home._storm_kind == "weight" and not access.closed


def refuse_write(access: Access, place: Place, kind: str) -> None:
    """Raise if user code is about to write a weight that is read from a file."""
    if place.in_file and kind == "weight" and not access.closed:
        path = "a file" if place.span is None else place.span.path
        raise StormError(
            f"Cannot write {place.name!r}: RAM has no room for it, so it is read from {path}, and a write would not "
            "get there. Raise ram= so that it gets a home in RAM, or give its module's name to storm.stream as "
            "leave=[...]."
        )


def _is_in(home: torch.Tensor, value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(home is item for item in value)


def _in_forward(homes: list[HomeParameter | HomeView]) -> bool:
    return any(isinstance(home, HomeParameter) and home._storm[0].in_forward() for home in homes)


def _watched(result: Any, homes: list[HomeParameter | HomeView]) -> Any:
    """The result, with tensors that lie in home memory as `HomeView`."""
    if isinstance(result, (list, tuple)):
        return type(result)(_watched(item, homes) for item in result) if type(result) in (list, tuple) else result
    if type(result) is not torch.Tensor or result.device.type != "cpu" or not result.numel():
        return result
    storage = result.untyped_storage().data_ptr()
    for home in homes:
        if home.untyped_storage().data_ptr() == storage:
            return _made_of(home, result)
    return result


def _exchanged(value: Any, exchange: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor exchanged, also in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return exchange(value)
    if type(value) in (list, tuple):
        return type(value)(_exchanged(item, exchange) for item in value)
    if type(value) is dict:
        return {key: _exchanged(item, exchange) for key, item in value.items()}
    return value


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, HomeParameter) and hasattr(tensor, "_storm"):
        return tensor._storm[0].twins.of(tensor._storm[1])
    return tensor


def _there(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device, if it belongs to a parameter."""
    if isinstance(tensor, HomeView):
        return _plain(joined(tensor)).to(tensor._storm[0].device)
    return _twin(tensor)


def _here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.to("cpu")


def _any_on_device(values: Iterable[Any]) -> bool:
    """Whether a tensor among ``values``, or in a list of them, is not in RAM, where home memory is."""
    return any(
        value.device.type != "cpu"
        if isinstance(value, torch.Tensor)
        else type(value) in (list, tuple) and _any_on_device(value)
        for value in values
    )


def _get_data(func: Any, args: tuple[Any, ...]) -> Any:
    home = args[0]
    if isinstance(home, HomeParameter) and _in_forward([home]):
        access, place = home._storm
        return access.twins.lend(place, access.twins.of(place).data)
    return _with_homes(func, "data", [home], args, {})


@undisturbed
def _set_data(func: Any, args: tuple[Any, ...]) -> Any:
    """``p.data = x`` and ``p.grad.data = x`` copy: unit and stream own the memory."""
    home, value = args
    kind: str = home._storm_kind
    if isinstance(home, HomeView) and not _has_its_place(home):
        return func(*args)
    access, place = home._storm
    # A write to ``p.data`` leaves the parameter's version unchanged.
    own = torch.Tensor.data.__get__(home) if isinstance(home, HomeParameter) else _plain(home)  # type: ignore[attr-defined]
    if value.shape != own.shape or value.dtype not in (own.dtype, place.dtype):
        raise TypeError(
            f"Cannot assign a {value.dtype} tensor of shape {tuple(value.shape)} to the {kind} of the streamed "
            f"parameter {place.name!r} ({own.dtype}, {tuple(own.shape)}). Close the session, then stream again."
        )
    joined(value)
    access.join(place, kind)
    if own.data_ptr() != _plain(value).data_ptr():
        refuse_write(access, place, kind)
    with torch.no_grad():
        flat, new = own.as_strided((place.count,), (1,)), _plain(value).detach()
        if new.data_ptr() == own.data_ptr() and new.stride() == own.stride():
            return None
        if flat.data_ptr() <= new.data_ptr() < flat.data_ptr() + flat.nbytes:
            new = new.clone()  # the same values in another form
        move_views(place, flat, parts_only=kind != "weight")
        access.before_write(place, kind)
        own.copy_(new)
    access.after_write(place, kind)
    was_here = isinstance(value, HomeView) and value._storm_kind == "past" and value._storm[1] is place
    if kind == "weight" and was_here and new.stride() == own.stride():
        move_views(place, new.as_strided((place.count,), (1,)), flat)
    return None


def move_views(
    place: Place, source: torch.Tensor, target: torch.Tensor | None = None, *, parts_only: bool = False
) -> None:
    """Point user code's views of ``source`` at ``target``, the weight's home memory, or at a copy of the old values.

    Both hold all of one parameter, flat. ``parts_only``: views made from the gradient, not the gradient itself."""
    storage, first, end = source.untyped_storage().data_ptr(), source.data_ptr(), source.data_ptr() + source.nbytes
    kind = "past" if target is None else "weight"
    with torch.no_grad(), without_torch_function():
        for view in list(place.views.values()):
            if view.untyped_storage().data_ptr() != storage or not first <= view.data_ptr() < end:
                continue
            if parts_only and view._storm_whole:
                continue
            target = source.clone() if target is None else target
            distance = (target.storage_offset() - source.storage_offset()) * source.itemsize
            at = (view.storage_offset() * view.itemsize + distance) // view.itemsize
            moved = _plain(view).new_empty(0)  # on the CPU, regardless of the default device
            view.data = moved.set_(target.untyped_storage(), at, view.shape, view.stride())
            view._storm_kind = kind


def _norm(view: HomeView, order: Any) -> torch.Tensor | None:
    """``torch.linalg.vector_norm(p.grad, 2.0)``, as torch's clipping asks for it."""
    with without_torch_function():
        norm = view._storm[0].grad_norm(view._storm[1]) if order == 2.0 else None
        return None if norm is None else norm.to(view.dtype)


def _scale(view: HomeView, factor: Any) -> torch.Tensor | None:
    """``p.grad.mul_(factor)``, as torch's clipping does it."""
    with without_torch_function():
        if type(factor) is not torch.Tensor or factor.dim() or factor.device.type != "cpu" or view.requires_grad:
            return None
        access, place = view._storm
        return view if access.scale_grad(place, factor) else None


# Clipping asks these of each gradient. The device has the norms, and the optimizer can scale.
_OF_GRADIENTS: dict[Any, Callable[[HomeView, Any], torch.Tensor | None]] = {
    torch.linalg.vector_norm: _norm,
    torch.Tensor.mul_: _scale,
}
# What replaces torch's access to an attribute, by its name and kind; called with torch's function and its arguments.
_OF_VIEWS: dict[tuple[str, str], Callable[[Any, tuple[Any, ...]], Any]] = {
    ("data", "__get__"): _get_data,
    ("data", "__set__"): _set_data,
}
_OF_PARAMETERS = {
    **_OF_VIEWS,
    ("grad", "__get__"): lambda _, args: _access(args).grad(args[0]._storm[1]),
    ("grad", "__set__"): lambda _, args: _access(args).set_grad(args[0]._storm[1], args[1]),
    ("grad", "__delete__"): lambda _, args: _access(args).set_grad(args[0]._storm[1], None),
    ("device", "__get__"): lambda _, args: _access(args).device,
    ("is_cuda", "__get__"): lambda _, args: _access(args).device.type == "cuda",
    ("is_cpu", "__get__"): lambda _, args: _access(args).device.type == "cpu",
}


def _access(args: tuple[Any, ...]) -> Access:
    access: Access = args[0]._storm[0]
    return access
