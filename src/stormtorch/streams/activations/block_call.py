"""Stands in for a block's call while STORM decides what becomes of its activations."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

Call = Callable[..., Any]


class Arranger(Protocol):
    """Decides how a block is run."""

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
        return getattr, (self._module(), "_call_impl")  # the class's method: the instance is being built
