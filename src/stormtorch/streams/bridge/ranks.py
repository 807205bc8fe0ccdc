"""Several processes: a streamed model belongs to one, and wrappers that spread a model over several are refused.

Gradients of streamed parameters do not pass by where wrappers wait for them: ranks would drift apart without a word.
Three checks refuse that, each where torch tells of it first:

- `refuse_ranks`, when streaming begins, at each call of the model and at each step: a process group may come later;
- a registration hook of ``nn.Module``, while a session is open: a wrapper that takes in a streamed module says so;
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

_streamed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the modules whose calls are wrapped, of all sessions
_lock = threading.RLock()
_hook: Any = None
_has_group = distributed.is_initialized if distributed.is_available() else lambda: False


def refuse_ranks() -> None:
    """Asked at every call of a model: without a process group it costs a fraction of a microsecond."""
    if _has_group() and (ranks := distributed.get_world_size()) > 1:
        raise SettingError(
            f"STORM streams a model in one process, and torch.distributed has {ranks} ranks here: each would train a "
            "model of its own. Start one process, or call torch.distributed.destroy_process_group() first."
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Before streaming: a model that a wrapper holds, or whose parameters one has replaced."""
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
    """While streaming: ``tensor``, or nothing, is about to take the place of a parameter of ``module``."""
    if is_fsdp_managed(module) or _is_sharded(tensor):
        raise _fsdp()


def attach(modules: Iterable[nn.Module]) -> None:
    """From now on a wrapper that takes in one of these modules is refused."""
    global _hook  # noqa: PLW0603
    with _lock:
        _streamed.update(modules)
        if _hook is None:
            _hook = register_module_module_registration_hook(_refuse_wrapper)


def detach(modules: Iterable[nn.Module]) -> None:
    """The last session leaves torch as it was."""
    global _hook  # noqa: PLW0603
    with _lock:
        _streamed.difference_update(modules)
        if _hook is not None and not [*_streamed]:
            _hook.remove()
            _hook = None


def _refuse_wrapper(parent: nn.Module, _name: str, module: nn.Module | None) -> None:
    if module is None or not _has_group():  # wrappers need one
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
    module = sys.modules.get("torch.distributed.tensor")  # a process that has such a tensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def _fsdp() -> SettingError:
    return SettingError(
        "FSDP (FullyShardedDataParallel, fully_shard) and other sharded parameters (DTensor) cannot go with streaming: "
        "both place the model's parameters. Stream the model without it, in one process."
    )
