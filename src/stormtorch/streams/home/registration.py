"""Watches a module's table of parameters while the module is streamed.

While a module computes, a device view (twin) hides each of its parameters, as an attribute of the instance (calls.py).
User code may put another tensor in a parameter's place for a while, as ``torch.func.functional_call`` does. The module
must then compute with that tensor, so the twin is set aside until the parameter is back."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ..bridge.ranks import refuse_sharding
from ..units.partition import Use


class Registered(dict[str, Any]):
    """Stands in for ``module._parameters``, with the same entries. A copy or pickle of the module gets a plain dict."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)
        self._module, self._own, self._aside = weakref.ref(module), dict[str, int](), dict[str, Any]()

    def __setitem__(self, name: str, tensor: Any) -> None:
        self._refuse(name, tensor)
        super().__setitem__(name, tensor)
        self._look(name)

    def __delitem__(self, name: str) -> None:
        self._refuse(name, None)
        super().__delitem__(name)
        self._look(name)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def own(self, use: Use) -> None:
        """Register ``use``'s parameter: a twin may hide it."""
        self._own[use.name] = id(use.parameter)

    def forget(self, name: str) -> None:
        """Drop a twin that was set aside: it must not come back."""
        self._aside.pop(name, None)

    def _refuse(self, name: str, tensor: Any) -> None:
        module = self._module()
        if module is not None and name in self._own:
            refuse_sharding(module, tensor)

    def _look(self, name: str) -> None:
        module = self._module()
        if module is None or name not in self._own:
            return
        if id(self.get(name)) != self._own[name]:
            if name in module.__dict__:
                self._aside[name] = module.__dict__.pop(name)
        elif name in self._aside:
            module.__dict__[name] = self._aside.pop(name)


def watch(uses: list[Use]) -> None:
    """Watch the tables of these modules, until `unwatch`."""
    for use in uses:
        table = use.module._parameters
        if not isinstance(table, Registered):
            table = use.module.__dict__["_parameters"] = Registered(use.module)
        table.own(use)


def take_out(module: nn.Module, name: str) -> None:
    """Remove the twin of that parameter, installed or set aside."""
    if isinstance(module._parameters, Registered):
        module._parameters.forget(name)
    module.__dict__.pop(name, None)


def unwatch(uses: list[Use]) -> None:
    for use in uses:
        if isinstance(use.module._parameters, Registered):
            use.module.__dict__["_parameters"] = dict(use.module._parameters)
