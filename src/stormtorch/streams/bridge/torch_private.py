"""Every use of torch's private interfaces by the streams; tests/streams/test_torch_private.py watches them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import DeviceContext

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Any)


sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Returns how many nodes of autograd's graph the calling thread has made so far."""


current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that the calling thread is in; -1 outside of any."""


def in_backward() -> bool:
    """Whether the calling thread is inside a node of autograd's engine; recomputation for checkpointing is."""
    return current_pass() != -1


def will_run(node: Any) -> bool:
    """Whether ``node``, not a leaf, belongs to the running backward pass."""
    return bool(torch._C._will_engine_execute_node(node))


def will_accumulate(leaf: Any) -> bool | None:
    """Whether the running backward pass will execute ``leaf``, an AccumulateGrad node.

    False for leaves that ``backward(inputs=...)`` left out; None inside ``torch.autograd.grad``, which does not
    accumulate."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return None


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run ``call`` when the backward pass that the calling thread is in has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def runs_backward(thread: int | None) -> bool:
    """Whether that thread waits for a backward, which may run on threads of autograd's."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        if frame.f_code is torch.autograd.graph._engine_run_backward.__code__:
            return True
        frame = frame.f_back
    return False


def saved_tensor_hooks_active() -> bool:
    """Whether saved-tensor hooks of other code, e.g. checkpointing, are active on this thread, or torch.func forbids
    hooks.

    Hooks do not nest: only the innermost ones run, so ours must not be put over others.
    """
    private: Any = torch._C._autograd
    return not private._saved_tensors_hooks_is_enabled() or innermost_hooks() is not None


def innermost_hooks() -> tuple[Any, Any] | None:
    """The active saved-tensor hooks, pack and unpack, of this thread."""
    private: Any = torch._C._autograd
    hooks: tuple[Any, Any] | None = private._top_saved_tensors_default_hooks(True)
    return hooks


# Wrappers of a method that change nothing (a scheduler's note that there was a step), by the module that makes them:
# the attribute that holds the inner function. tests/laws/test_optimizers_of_users.py has both kinds.
INSIDE_OF_WRAPPERS = {
    "torch.optim.lr_scheduler": "__wrapped__",
    "torch._dynamo.eval_frame": "_torchdynamo_orig_callable",
}


class VersionProbe:
    """Tells whether a tensor, or anything that shares its memory, was changed in place since; keeps no memory."""

    __slots__ = ("_at", "_shadow")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._at = tensor._version
        private: Any = torch._C
        with private._SetExcludeDispatchKeyGuard(private.DispatchKey.ADInplaceOrView, False):
            self._shadow = tensor.detach()  # with the tensor's own counter, inside of a dispatch mode too
        autograd: Any = torch.autograd
        # Hidden from dispatch modes: a mode that counts a block's operations would count ours.
        with autograd._unsafe_preserve_version_counter(tensor), private._DisableTorchDispatch():
            self._shadow.set_()  # type: ignore[call-overload]  # empty, with the same counter

    @property
    def changed(self) -> bool:
        return self._shadow._version != self._at


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Whether its values are those in its storage, at its strides."""
    private: Any = torch._C._functorch
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or private.is_functorch_wrapped_tensor(tensor):
        return False
    if tensor._is_zerotensor():  # used by forward-mode derivatives
        return False
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)


def backend_flags() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Getters and setters of the flags that context managers of ``torch.backends`` change; these work even if the user
    has forbidden to change flags permanently."""
    private: Any = torch._C
    names = ("cudnn_enabled", "cudnn_deterministic", "cudnn_benchmark", "mkldnn_enabled")
    return [(getattr(private, f"_get_{name}"), getattr(private, f"_set_{name}")) for name in names]


def in_functorch() -> bool:
    """Whether the calling thread is inside a transformation of torch.func."""
    private: Any = torch._C
    return bool(private._are_functorch_transforms_active())


def outside_functorch(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` work on ordinary tensors inside transformations of torch.func, which would wrap new ones."""

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not in_functorch():
            return function(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return outside


def has_global_hooks() -> bool:
    """Whether user code has hooks on the forward of every module."""
    module: Any = torch.nn.modules.module
    return bool(module._global_forward_hooks) or bool(module._global_forward_pre_hooks)


def has_user_modes() -> bool:
    """Whether a ``TorchFunctionMode`` or ``TorchDispatchMode`` is active on this thread that may change results of
    operations. A default device does not count: torch makes it a mode, and a second run sets it again. Nor does a mode
    with the attribute ``only_observes = True``."""
    private: Any = torch._C
    modes = [private._get_dispatch_stack_at(index) for index in range(private._len_torch_dispatch_stack())]
    return any(
        not isinstance(mode, DeviceContext) and not getattr(mode, "only_observes", False)
        for mode in (*modes, *_function_modes())
    )


def has_modes() -> bool:
    """Whether a mode of any kind is active on this thread, and would see operations of ours."""
    private: Any = torch._C
    return bool(private._len_torch_dispatch_stack()) or bool(private._len_torch_function_stack())


def default_device() -> torch.device | None:
    """The device of new tensors on this thread; None if user code has set none. ``get_default_device`` makes a tensor
    to find out, which takes longer than many an operation."""
    private: Any = torch._C
    if not private._len_torch_function_stack():
        return None
    found = [mode.device for mode in _function_modes() if isinstance(mode, DeviceContext)]
    return found[-1] if found else None


def _function_modes() -> list[Any]:
    private: Any = torch._C
    return [private._get_function_stack_at(index) for index in range(private._len_torch_function_stack())]


def is_fsdp_managed(module: torch.nn.Module) -> bool:
    """Whether FSDP, of either kind, manages the module; it sets this mark before it touches a parameter."""
    return bool(vars(module).get("_is_fsdp_managed_module", False))


def holders(tensors: Mapping[int, torch.Tensor], key: int) -> tuple[int, int]:
    """How many references Python and C++ have to one of ``tensors``; equal for all that only this mapping holds."""
    tensor: Any = tensors[key]
    return sys.getrefcount(tensor), int(tensor._use_count())


class StorageReference:
    """A weak reference to a storage. While it lives, no other storage has its ``key``; an address could be reused."""

    __slots__ = ("_reference", "key")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.key: int = storage._cdata
        self._reference = StorageWeakRef(storage)

    @property
    def gone(self) -> bool:
        return bool(self._reference.expired())

    def get(self) -> torch.UntypedStorage | None:
        """The storage; None if it is gone."""
        private: Any = torch.UntypedStorage
        found: torch.UntypedStorage | None = private._new_with_weak_ptr(self._reference.cdata)
        return found


def is_made_from_weights(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, as a saved-tensor hook sees it, is a cast or view of a leaf: autocast makes those."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _CASTS_AND_VIEWS:
        node = node.next_functions[0][0]
    return node is not None and (node.name().endswith("AccumulateGrad") or node.name() == "FetchBackward")


_CASTS_AND_VIEWS = frozenset(
    f"{name}Backward0" for name in ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "Alias", "AsStrided")
)


def never_traced(function: F) -> F:
    """Keep Dynamo from compiling or tracing ``function`` when a compiled region calls it outside of its graphs.

    Marks the code object, which costs nothing in a call: torch.compiler.disable would import dynamo at once, and wrap
    every call."""
    private: Any = torch._C._dynamo.eval_frame
    if hasattr(private, "set_code_exec_strategy"):  # without it Dynamo compiles more than needed, and may warn
        skip = private._FrameAction.SKIP  # this frame and those that it calls
        private.set_code_exec_strategy(function.__code__, private._FrameExecStrategy(skip, skip))
    return function


outside_of_graphs: Any = vars(torch)["_disable_dynamo"]  # torch.compiler.disable would import dynamo at once
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
with_torch_function: Any = torch._C._EnableTorchFunction  # for user code that is called inside of the former
FUNCTION_BASE: Any = (
    torch.autograd.function._SingleLevelFunction
)  # between Function and C++; has no ``apply`` of its own
