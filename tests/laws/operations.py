"""Tells of each operation of torch on the calling thread: the tensors that it reads, and those that it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Tell = Callable[[str, list[torch.Tensor], list[torch.Tensor]], None]
# Operations that do not look at elements, beside those that return views.
_NO_ELEMENTS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "_unsafe_view", "resize_"}
)
_LIKE = frozenset(
    {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full"}
)


class Operations(TorchDispatchMode):
    """Enter it around the operations. Those of other threads, such as copies of lanes, are not told of."""

    only_observes = True

    def __init__(self, tell: Tell) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        aliases = [returned.alias_info for returned in func._schema.returns]
        if name in _NO_ELEMENTS or any(alias is not None and not alias.is_write for alias in aliases):
            return result
        reads, writes = list[torch.Tensor](), list[torch.Tensor]()
        for argument, value in _given(func._schema, args, kwargs or {}):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or name not in _LIKE:
                (writes if is_written else reads).extend(_with_memory(value))
        known = {tensor.untyped_storage().data_ptr() for tensor in (*reads, *writes)}
        new = [tensor for tensor in _with_memory(result) if tensor.untyped_storage().data_ptr() not in known]
        self._tell(name, reads, writes + new)
        return result


def _given(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    yield from zip(schema.arguments, args, strict=False)
    yield from ((argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs)


def _with_memory(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided:
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _with_memory(each)
