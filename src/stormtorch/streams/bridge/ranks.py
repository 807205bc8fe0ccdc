"""Refuses several processes: a streamed model belongs to one, and wrappers that spread a model over several would fail.

Gradients of streamed parameters do not pass through the hooks where wrappers wait for them: ranks would silently drift
apart. Three checks refuse that, each where torch first shows it:

- `refuse_ranks`, when streaming begins, at each call of the model and at each step: a process group may come later;
- a registration hook of ``nn.Module``, while a session is open: a wrapper registers the streamed module that it wraps;
- the tables of parameters (home/registration.py): FSDP puts its own parameters there.

With one rank DDP gives the right numbers, but it keeps a second copy of all gradients, outside of every budget."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from torch import distributed, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ...core.errors import SettingError
from .torch_private import is_fsdp_managed

_streamed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules with wrapped calls, of all sessions
_lock = threading.RLock()
_hook: Any = None
_has_group = distributed.is_initialized if distributed.is_available() else lambda: False


def refuse_ranks() -> None:
    """Raise if there are several ranks. At every call of a model: without a group in a fraction of a microsecond."""
    if _has_group() and (ranks := distributed.get_world_size()) > 1:
        raise SettingError(
            f"STORM streams a model in one process, and torch.distributed has {ranks} ranks here: each would train a "
            "model of its own. Start one process, or call torch.distributed.destroy_process_group() first."
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Before streaming: raise for a model inside a wrapper, or whose parameters a wrapper has replaced."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise SettingError(
                f"{f'The module {name!r}' if name else 'The model'} is wrapped in DistributedDataParallel, which keeps "
                "a copy of all gradients. With one process it does nothing else: stream the model without it."
            )
        if is_fsdp_managed(module):
            raise _fsdp()
    if any(_is_sharded(parameter) for parameter in model.parameters()):
        raise _fsdp()


def refuse_sharding(module: nn.Module, tensor: Any) -> None:
    """While streaming: raise if sharding replaces a parameter of ``module`` by ``tensor``, or removes it."""
    if is_fsdp_managed(module) or _is_sharded(tensor):
        raise _fsdp()


def attach(modules: Iterable[nn.Module]) -> None:
    """Refuse wrappers around these modules from now on."""
    global _hook  # noqa: PLW0603
    with _lock:
        _streamed.update(modules)
        if _hook is None:
            _hook = register_module_module_registration_hook(_refuse_wrapper)


def detach(modules: Iterable[nn.Module]) -> None:
    """Stop that; the last session restores torch."""
    global _hook  # noqa: PLW0603
    with _lock:
        _streamed.difference_update(modules)
        if _hook is not None and not [*_streamed]:
            _hook.remove()
            _hook = None


def _refuse_wrapper(parent: nn.Module, _name: str, module: nn.Module | None) -> None:
    if module is None or not _has_group():  # wrappers need a process group
        return
    if not any(inner in _streamed for inner in module.modules()):
        return
    refuse_ranks()
    if isinstance(parent, nn.parallel.DistributedDataParallel):
        raise SettingError(
            "DistributedDataParallel cannot wrap a streamed model: it keeps a copy of all gradients. With one process "
            "it does nothing else: call the model without it."
        )


def _is_sharded(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # a process with such a tensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def _fsdp() -> SettingError:
    return SettingError(
        "FSDP (FullyShardedDataParallel, fully_shard) and other sharded parameters (DTensor) cannot go with streaming: "
        "both place the model's parameters. Stream the model without it, in one process."
    )
