"""Every use of torch's private interfaces by the streams; tests/streams/test_torch_private.py watches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def current_pass() -> int:
    """The number of the backward pass that the calling thread is in; -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether the calling thread is inside a node of autograd's engine, as recomputation for checkpointing is."""
    return current_pass() != -1


def will_run(node: Any) -> bool:
    """Whether ``node``, not a leaf, belongs to the running backward pass."""
    return bool(torch._C._will_engine_execute_node(node))


def will_accumulate(leaf: Any) -> bool | None:
    """Whether the running backward pass will execute ``leaf``, an AccumulateGrad node.

    False for leaves that ``backward(inputs=...)`` left out; None inside ``torch.autograd.grad``, which accumulates
    nothing."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return None


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run ``call`` when the backward pass that the calling thread is in has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def saved_tensor_hooks_active() -> bool:
    """Whether somebody's saved-tensor hooks, checkpointing's for one, are in force on this thread.

    Hooks do not nest: only the innermost ones run, so ours must not be put over others. Nor where torch.func forbids
    them.
    """
    private: Any = torch._C._autograd
    return not private._saved_tensors_hooks_is_enabled() or private._top_saved_tensors_default_hooks(True) is not None


without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
