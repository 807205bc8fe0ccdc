"""Stands in for a block's call while STORM decides what becomes of its activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from ..bridge.module_calls import ModuleCall

Call = Callable[..., Any]


class Arranger(Protocol):
    """Decides how a block is run."""

    def rules_here(self) -> bool: ...

    def call(self, index: int, block: nn.Module, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block, whose ordinary call is ``original``."""


class BlockCall(ModuleCall[Arranger]):
    """The wrapped call of block number ``index``."""

    def __init__(self, arranger: Arranger, module: nn.Module, index: int, original: Call) -> None:
        super().__init__(arranger, module, original)
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arranger, module = self._owner(), self._module()
        if arranger is None or module is None or not arranger.rules_here():
            return self._original(*args, **kwargs)
        return arranger.call(self._index, module, self._original, args, kwargs)
