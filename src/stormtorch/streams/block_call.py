"""Standing in for a module's call: for a block as long as activations are arranged, for its children while it runs."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from torch import nn

Call = Callable[..., Any]


class Arranger(Protocol):
    """Who decides how a block is run."""

    def rules_here(self) -> bool: ...

    def call(self, index: int, block: nn.Module, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block, whose ordinary call is ``original``."""


class BlockCall:
    """Stands in for a block's ``_call_impl``. A copy or pickle of the block gets the ordinary method instead."""

    def __init__(self, arranger: Arranger, module: nn.Module, index: int, original: Call) -> None:
        self._arranger, self._module = weakref.ref(arranger), weakref.ref(module)
        self._index, self._original = index, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arranger, module = self._arranger(), self._module()
        if arranger is None or module is None or not arranger.rules_here():
            return self._original(*args, **kwargs)
        return arranger.call(self._index, module, self._original, args, kwargs)

    def belongs_to(self, arranger: Arranger) -> bool:
        return self._arranger() is arranger

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(nn.Module._call_impl, memo[id(self._module())])

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "_call_impl")  # of the class: the instance's is being made


@contextlib.contextmanager
def calling(
    parts: Iterable[tuple[str, nn.Module]], call: Callable[[str, nn.Module, Call, Any, Any], Any]
) -> Iterator[None]:
    """For as long as this lasts, calls of ``parts`` are made by ``call(name, part, original, args, kwargs)``."""
    replaced: list[tuple[nn.Module, Any]] = []

    def stand_in(name: str, part: nn.Module, original: Call) -> Call:
        return lambda *args, **kwargs: call(name, part, original, args, kwargs)

    try:
        for name, part in parts:
            original, had = part._call_impl, vars(part).get("_call_impl")
            replaced.append((part, had))
            part.__dict__["_call_impl"] = stand_in(name, part, original)
        yield
    finally:
        while replaced:
            part, had = replaced.pop()
            if had is None:
                part.__dict__.pop("_call_impl", None)
            else:
                part.__dict__["_call_impl"] = had
