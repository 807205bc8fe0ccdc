"""Finds the units of a model from its own structure; no model-specific code.

A *block* is an element of a list of modules (``ModuleList``, ``Sequential``, ``ModuleDict``): the repetition that
nearly every large model has. Modules outside the lists are taken child by child. A candidate that is too large for the
budget is split again; small neighbours are merged. A parameter that several modules share belongs to the unit that
comes first; later modules use that unit too. Without an optimizer, fused experts (routed.py) are units of their own: a
call may need a few of their rows."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from ...core.errors import SettingError
from ...core.sizes import MiB
from ...memory.disk.mapped import Span
from ..bridge.adapters import parametrized_in_forward
from ..bridge.torch_private import has_plain_storage
from .routed import Routed, routed
from .unit import Place, Unit, is_dense

_REPEATED, _MUCH = 3, 64  # what repeats: so often, and at least one in so many bytes
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(eq=False)
class Use:
    """A place where a module holds a parameter: ``module.name``."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    place: Place = field(init=False)  # in its unit; `partition` sets it
    wrapped: bool = field(init=False, default=False)  # an adapter parametrizes it in each forward


@dataclass(eq=False)
class Entry:
    """A module whose call brings its parameters to the device: all in its subtree, or only its own."""

    module: nn.Module
    uses: list[Use]
    routed: Routed | None = None  # it is fused experts, which have a unit of their own
    units: list[Unit] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Partition:
    units: list[Unit]
    entries: list[Entry]
    left: list[nn.Parameter]  # parameters that remain on the device, as ordinary ones
    large: list[Unit]  # those that are larger than the blocks, such as the tables of a vocabulary


@dataclass(eq=False)
class _Candidate:
    name: str
    module: nn.Module
    deep: bool  # whether the whole subtree belongs to it
    routed: Routed | None = None
    without: frozenset[int] = frozenset()  # modules of the subtree, by id, that do not belong to it

    def uses(self) -> list[Use]:
        modules = self.module.modules() if self.deep else [self.module]
        found = []
        for module in modules:
            if id(module) in self.without:
                continue
            found += [Use(module, name, p) for name, p in module._parameters.items() if p is not None]
        return found

    @functools.cached_property
    def bytes(self) -> int:
        return sum(p.nbytes for p in {id(use.parameter): use.parameter for use in self.uses()}.values())


def partition(
    model: nn.Module,
    *,
    unit_limit_bytes: int,
    only: Sequence[str] | None,
    leave: Sequence[str],
    small: bool = False,
    by_rows: bool = False,
    spans: Mapping[int, Span] = MappingProxyType({}),
) -> Partition:
    """Cut the model into units, in the order of its modules. Those over ``unit_limit_bytes`` are split. ``small``:
    neighbours are merged up to half the size of a block, not of the largest module. ``by_rows``: fused experts get
    units of their own. ``spans``: where files have parameters, by id."""
    names = dict(model.named_modules())
    for name in [*(only or []), *leave]:
        if name not in names:
            near = sorted(known for known in names if known.split(".")[0] == name.split(".")[0])[:8]
            raise SettingError(
                f"The model has no module {name!r}. Accepted: names such as {near or sorted(names)[:8]}."
            )
    left_modules = {id(inner) for name in leave for inner in names[name].modules()}
    if only is not None:
        chosen = {id(inner) for name in only for inner in names[name].modules()}
        left_modules |= {id(module) for module in model.modules() if id(module) not in chosen}
    left_modules |= {id(module) for module in model.modules() if isinstance(module, torch.jit.ScriptModule)}
    _refuse_shared_memory(model)
    experts = {id(module): found for module in model.modules() if by_rows and (found := routed(module)) is not None}
    candidates = [c for c in _candidates("", model, unit_limit_bytes, experts) if c.bytes]
    parameter_names = {id(p): name for name, p in model.named_parameters()}
    block_bytes = _block_bytes([candidate.bytes for candidate in candidates])
    units: list[Unit] = []
    large: list[Unit] = []
    entries: list[Entry] = []
    left: dict[int, nn.Parameter] = {}
    places: dict[int, Place] = {}  # by parameter
    for group in _merged(candidates, unit_limit_bytes, block_bytes if small else 0):
        made = [Entry(c.module, c.uses(), c.routed) for c in group]
        for entry in made:
            for use in list(entry.uses):
                # An embedding that changes its weight in forward.
                renormed = getattr(use.module, "max_norm", None) is not None
                if id(use.module) in left_modules or type(use.parameter) is not nn.Parameter or renormed:
                    left[id(use.parameter)] = use.parameter
                    entry.uses.remove(use)
        fresh = {
            id(use.parameter): use.parameter
            for entry in made
            for use in entry.uses
            if id(use.parameter) not in places and id(use.parameter) not in left
        }
        if fresh:
            named = [(parameter_names[key], parameter) for key, parameter in fresh.items()]
            unit = Unit(len(units), group[0].name or "root", named, spans)
            units.append(unit)
            if any(candidate.bytes > block_bytes for candidate in group):
                large.append(unit)
            places.update((id(place.parameter), place) for place in unit.places)
        entries += made
    wrapped = parametrized_in_forward(model)
    for entry in entries:
        entry.uses = [use for use in entry.uses if id(use.parameter) not in left]
        for use in entry.uses:
            use.place = places[id(use.parameter)]
            use.wrapped = (id(use.module), use.name) in wrapped
        entry.units = list(dict.fromkeys(use.place.unit for use in entry.uses))
        if entry.routed is not None:
            _divide(entry, entry.routed)
    return Partition(units, [entry for entry in entries if entry.uses], list(left.values()), large)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The elements of the model's lists of modules, outermost lists only: lists inside of blocks do not count."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(model, _LISTS) and _has_lists(model) and not isinstance(child, _LISTS):
            found.append(child)
        else:
            found += blocks_of(child)
    return list({id(block): block for block in found if any(True for _ in block.parameters())}.values())


def containers_of(model: nn.Module, entries: list[Entry]) -> list[nn.Module]:
    """The model, and modules that contain entries without being one: user code may call them alone."""
    inner = {id(entry.module) for entry in entries}
    return [
        module
        for module in model.modules()
        if id(module) not in inner
        and not isinstance(module, (nn.ModuleList, nn.ModuleDict))  # these cannot be called
        and (module is model or any(id(below) in inner for below in module.modules()))
    ]


def _divide(entry: Entry, routed: Routed) -> None:
    """Let the entry's unit be loaded by rows, unless others have parameters in it, or an adapter needs all rows."""
    own = {id(use.parameter) for use in entry.uses}
    alone = len(entry.units) == 1 and all(id(place.parameter) in own for place in entry.units[0].places)
    if alone and not any(use.wrapped for use in entry.uses):
        unit = entry.units[0]
        unit.row_bytes = {place.index: routed.row_bytes(place) for place in unit.places if routed.has_row(place)}
    else:
        entry.routed = None


def _candidates(name: str, module: nn.Module, limit: int, experts: dict[int, Routed]) -> Iterator[_Candidate]:
    """Candidates in the order of the model; together they cover every parameter of ``module`` once. Those of
    ``experts``, by id, are apart from the modules around them."""
    if any(p is not None for p in module._parameters.values()):
        yield _Candidate(name, module, deep=False)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if id(child) in experts:
            yield _Candidate(path, child, deep=True, routed=experts[id(child)])
            continue
        whole = _Candidate(path, child, deep=True, without=frozenset(experts))
        opaque = isinstance(child, (nn.MultiheadAttention, nn.RNNBase))  # one operation uses all parameters below it
        block = isinstance(module, _LISTS) and not isinstance(child, _LISTS)
        inside = any(True for _ in child.children())
        if opaque or not inside or ((block or not _has_lists(child)) and whole.bytes <= limit):
            yield whole
            for inner_name, inner in child.named_modules():
                if id(inner) in experts:
                    yield _Candidate(f"{path}.{inner_name}", inner, deep=True, routed=experts[id(inner)])
        else:
            yield from _candidates(path, child, limit, experts)


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raise if two parameters share memory: each would get its own home. Likewise for a buffer that is a view of a
    parameter. Buffers may share memory among themselves."""
    spans = sorted(
        (str(tensor.device), *_span(tensor), is_parameter, name)
        for is_parameter, named in ((True, model.named_parameters()), (False, model.named_buffers()))
        for name, tensor in named
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.nbytes
        if (is_dense(tensor) if is_parameter else has_plain_storage(tensor))
    )
    last: dict[tuple[str, bool], tuple[int, str]] = {}  # how far parameters, or buffers, reach so far
    for device, start, end, is_parameter, name in spans:
        for other_is_parameter in (True, False) if is_parameter else (True,):
            reach, other = last.get((device, other_is_parameter), (0, ""))
            if reach > start and other_is_parameter == is_parameter:
                raise SettingError(
                    f"The parameters {other!r} and {name!r} share memory. Make them one nn.Parameter, or clone one."
                )
            if reach > start:
                buffer, parameter = (other, name) if is_parameter else (name, other)
                raise SettingError(
                    f"The buffer {buffer!r} shares memory with the parameter {parameter!r}, which gets other memory "
                    "when it is streamed. Clone the buffer, or compute it from the parameter in each forward."
                )
        last[device, is_parameter] = max(last.get((device, is_parameter), (0, "")), (end, name))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address range of its elements, gaps included."""
    length = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.itemsize


def _has_lists(module: nn.Module) -> bool:
    """Whether ``module`` is or contains a list of at least two modules with parameters."""
    return any(
        isinstance(inner, _LISTS) and sum(any(True for _ in child.parameters()) for child in inner.children()) >= 2
        for inner in module.modules()
    )


def _block_bytes(sizes: Sequence[int]) -> int:
    """The largest size that several have, because blocks repeat and the tables of a vocabulary do not. The largest of
    all if no size repeats, or what repeats is a small part of the model."""
    repeated = max((size for size, count in Counter(sizes).items() if count >= _REPEATED), default=0)
    is_much = sum(size for size in sizes if size <= repeated) * _MUCH >= sum(sizes)
    return repeated if is_much else max(sizes, default=0)


def _merged(candidates: list[_Candidate], limit: int, block_bytes: int) -> Iterator[list[_Candidate]]:
    """Merge neighbours that are small compared with the largest, or with ``block_bytes``, up to half its size."""
    largest = block_bytes or max((c.bytes for c in candidates), default=0)
    target = max(largest // 2, min(4 * MiB, limit // 4))
    group: list[_Candidate] = []
    size = 0
    for candidate in candidates:
        if group and (size + candidate.bytes > target or candidate.routed or group[-1].routed):
            yield group
            group, size = [], 0
        group.append(candidate)
        size += candidate.bytes
    if group:
        yield group
