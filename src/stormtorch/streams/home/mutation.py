"""Tells which tensors a function of torch writes to, from its name and signature.

parameter.py asks this for every function that user code calls on a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Attributes and methods that do not look at a tensor's elements.
# fmt: off
METADATA = frozenset({
    "__hash__", "__len__", "_backward_hooks", "_base", "_grad", "_has_symbolic_sizes_strides", "_is_view",
    "_post_accumulate_grad_hooks", "_version", "device", "dim", "dtype", "element_size", "grad", "grad_dtype",
    "grad_fn", "has_names", "is_coalesced", "is_complex", "is_conj", "is_contiguous", "is_cpu", "is_cuda",
    "is_distributed", "is_floating_point", "is_hpu", "is_inference", "is_leaf", "is_meta", "is_mkldnn", "is_mps",
    "is_neg", "is_nested", "is_quantized", "is_same_size", "is_signed", "is_sparse", "is_sparse_csr", "is_vulkan",
    "is_xpu", "itemsize", "layout", "names", "nbytes", "ndim", "ndimension", "nelement", "numel", "output_nr",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad", "requires_grad_", "retain_grad",
    "retains_grad", "shape", "size", "storage_offset", "stride",
})
# fmt: on
_WRITING = frozenset(
    {"__setitem__"}
    | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
    | {f"__i{name}__" for name in ("lshift", "rshift", "matmul", "div")}
)
# Would give the parameter itself another shape, for which its unit has no room.
RESHAPING = frozenset(
    f"{name}_"
    for name in ("resize", "resize_as", "t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "as_strided")
)
# Give out the address of the memory, through which writes go unnoticed.
EXPOSING = frozenset({"numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__"})
ARRAYS = frozenset({"numpy", "__array__", "__dlpack__"})  # of these, what user code writes to by itself


def target_of(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument that the function writes to, or None."""
    if "out" in kwargs:
        return kwargs["out"]
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name in _WRITING or _argument(func, "inplace", args, kwargs):
        return args[0] if args else next(iter(kwargs.values()), None)
    if name in ("embedding", "embedding_bag") and _argument(func, "max_norm", args, kwargs) is not None:
        return _argument(func, "weight", args, kwargs)
    # Functions of torch.ops have a schema, also those of other libraries.
    schema = getattr(getattr(func, "default", func), "_schema", None)
    if schema is None or not schema.is_mutable:
        return None
    given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
    found: list[Any] = []
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument ``name`` of a function written in Python; None also if it has no such argument."""
    if name in kwargs:
        return kwargs[name]
    code = getattr(func, "__code__", None)
    names = code.co_varnames[: min(code.co_argcount, len(args))] if code is not None else ()
    return args[names.index(name)] if name in names else None
