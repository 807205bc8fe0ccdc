"""Watches the private interfaces of torch that streams stand on: a torch that changes them fails here first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stormtorch.streams.bridge import torch_private


class Probe(torch.autograd.Function):
    """Calls ``seen`` in backward, with its own node."""

    @staticmethod
    def forward(ctx: Any, seen: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.seen = seen
        return torch.stack([tensor.detach() for tensor in tensors]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.seen(ctx)
        return (None, *(grads[0] for _ in ctx.next_functions))


def probe(seen: Any, *tensors: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Probe.apply(seen, *tensors)  # type: ignore[no-untyped-call]
    return result


def leaves(count: int) -> list[torch.Tensor]:
    return [torch.zeros((), requires_grad=True) for _ in range(count)]


def test_the_pass_is_known_inside_backward_only() -> None:
    seen: list[tuple[bool, int]] = []

    def look(_: Any) -> None:
        seen.append((torch_private.in_backward(), torch_private.current_pass()))

    assert not torch_private.in_backward()
    for _ in range(2):
        probe(look, *leaves(1)).backward()
    assert [inside for inside, _ in seen] == [True, True]
    assert seen[0][1] != seen[1][1]
    assert not torch_private.in_backward()


def test_recomputation_happens_inside_backward() -> None:
    seen: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.in_backward())
        return x.sin()

    checkpoint(forward, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]


def test_which_leaves_accumulate() -> None:
    seen: list[list[bool | None]] = []

    def look(node: Any) -> None:
        seen.append([torch_private.will_accumulate(leaf) for leaf, _ in node.next_functions if leaf is not None])

    first, second = leaves(2)
    probe(look, first, second).backward()
    probe(look, first, second).backward(inputs=[second])
    torch.autograd.grad(probe(look, first, second), [first])
    assert seen == [[True, True], [False, True], [None, False]]


def test_a_call_at_the_end_of_backward() -> None:
    order: list[str] = []

    def look(_: Any) -> None:
        torch_private.at_end_of_backward(lambda: order.append("end"))
        order.append("node")

    probe(look, *leaves(2)).backward()
    assert order == ["node", "end"]


def test_others_hooks_are_seen() -> None:
    assert not torch_private.saved_tensor_hooks_active()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert torch_private.saved_tensor_hooks_active()
    assert not torch_private.saved_tensor_hooks_active()


def test_a_module_is_called_through_an_attribute_that_an_instance_may_have() -> None:
    module = nn.Linear(2, 2)
    module.__dict__["_call_impl"] = lambda *_args: "ours"
    assert module(torch.ones(2)) == "ours"


def test_a_parameter_may_change_its_class() -> None:
    class Watched(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise LookupError(func)

    parameter: Any = nn.Parameter(torch.ones(2))
    parameter.__class__ = Watched
    with pytest.raises(LookupError):
        parameter + 1
    with torch_private.without_torch_function():
        assert (parameter + 1).sum() == 4
    parameter.__class__ = nn.Parameter
    assert type(parameter) is nn.Parameter


def test_the_hooks_in_force_are_known() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert torch_private.innermost_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        hooks = torch_private.innermost_hooks()
        assert hooks is not None
        assert hooks[0] is pack


def test_a_version_is_watched_without_keeping_the_memory() -> None:
    tensor = torch.randn(1000)
    before = tensor._version
    probe = torch_private.VersionProbe(tensor)
    assert tensor._version == before
    assert not probe.changed
    assert probe._shadow.untyped_storage().nbytes() == 0
    tensor[3:5].mul_(2)
    assert probe.changed


def test_a_storage_is_known_by_itself() -> None:
    tensor = torch.randn(10)
    reference = torch_private.StorageReference(tensor.untyped_storage())
    assert reference.key == tensor[2:].untyped_storage()._cdata
    assert not reference.gone
    del tensor
    assert reference.gone


def test_casts_of_weights_are_recognised() -> None:
    seen: list[bool] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.is_made_from_weights(tensor))
        return tensor

    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True) * 2
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert sorted(seen) == [False, True]  # the input's cast, the weight's cast


def test_those_who_listen_to_every_module_are_seen() -> None:
    assert not torch_private.has_global_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert torch_private.has_global_hooks()
    handle.remove()
    assert not torch_private.has_global_hooks()


def test_transformations_are_seen() -> None:
    assert not torch_private.in_functorch()
    assert torch.func.vmap(lambda x: x * torch_private.in_functorch())(torch.ones(2)).sum() == 2


def test_flags_of_backends_are_asked_and_set() -> None:
    for ask, put in torch_private.backend_flags():
        before = ask()
        put(not before)
        try:
            assert ask() is not before
        finally:
            put(before)


def test_a_probe_is_not_seen_by_dispatch_modes() -> None:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(2)
    with Mode():  # type: ignore[no-untyped-call]
        probe = torch_private.VersionProbe(tensor)
    assert not [name for name in seen if "detach" not in name]  # a view, which does not count
    assert not probe.changed
    tensor.add_(1)
    assert probe.changed


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
def test_storages_that_are_plain() -> None:
    assert not torch_private.has_plain_storage(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    assert torch_private.has_plain_storage(torch.ones(2))
    assert not torch_private.has_plain_storage(torch.ones(2).to_sparse())
    assert not torch_private.has_plain_storage(torch.ones(2, device="meta"))


def test_a_version_is_watched_inside_a_dispatch_mode() -> None:
    probes: list[torch_private.VersionProbe] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            probes.append(torch_private.VersionProbe(result))
            return result

    with Mode():  # type: ignore[no-untyped-call]
        result = torch.ones(2) + 1
    assert not probes[-1].changed
    result.add_(1)
    assert probes[-1].changed


def test_functions_come_by_the_class_below_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose ``apply`` was taken before, and those of torch itself."""
    base, seen = torch_private.FUNCTION_BASE, []
    assert "apply" not in vars(base)
    taken = Probe.apply

    def apply(cls: Any, *args: Any) -> Any:
        seen.append(cls)
        return super(base, cls).apply(*args)

    monkeypatch.setattr(base, "apply", classmethod(apply), raising=False)
    taken(lambda _: None, *leaves(2)).backward()  # type: ignore[no-untyped-call]
    checkpoint(torch.sin, torch.ones(3, requires_grad=True), use_reentrant=True).sum().backward()
    assert seen[0] is Probe
    assert len(seen) == 2


def test_who_else_holds_a_tensor() -> None:
    """Alone, one looks like another, however it was made; Python's references, views and autograd's all show."""
    alone = torch_private.holders({0: torch.empty(0)}, 0)
    leaf = torch.ones(3, requires_grad=True)
    tensors = {7: Doubled.apply(leaf)}  # type: ignore[no-untyped-call]
    assert torch_private.holders(tensors, 7) == alone
    held = tensors[7]
    assert torch_private.holders(tensors, 7) != alone
    del held
    view = tensors[7].view(3, 1)
    assert torch_private.holders(tensors, 7) != alone
    del view
    graph = tensors[7].square()  # which saves it
    assert torch_private.holders(tensors, 7) != alone
    del graph
    graph = tensors[7] + 1  # which does not
    assert torch_private.holders(tensors, 7) == alone
    assert graph.requires_grad


def test_a_tensor_is_pointed_elsewhere_and_keeps_its_node() -> None:
    leaf = torch.ones(3, requires_grad=True)
    twin = Doubled.apply(leaf)  # type: ignore[no-untyped-call]
    node, version = twin.grad_fn, twin._version
    twin.data = torch.empty(0)
    twin.data = torch.full((3,), 5.0)
    assert (twin.grad_fn, twin._version) == (node, version)
    (twin * 3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [6.0, 6.0, 6.0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return (tensor * 2).data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return grads[0] * 2


def test_what_is_made_outside_of_a_transformation_is_ordinary() -> None:
    made: list[bool] = []

    @torch_private.outside_functorch
    def make() -> torch.Tensor:
        tensor = torch.ones(4)[:3]
        made.append(torch_private.has_plain_storage(tensor))
        assert tensor.untyped_storage().data_ptr()
        return tensor

    def function(x: torch.Tensor) -> torch.Tensor:
        made.append(torch_private.has_plain_storage(x))
        return (x * make()).sum()

    assert torch.func.grad(function)(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    assert torch.func.vmap(torch.func.grad(function))(torch.ones(2, 3)).tolist() == [[1.0, 1.0, 1.0]] * 2
    assert made == [False, True, False, True]


def test_zeros_of_forward_mode_have_no_storage() -> None:
    assert not torch_private.has_plain_storage(torch._efficientzerotensor(3))
    assert torch_private.has_plain_storage(torch.zeros(3))


def test_a_call_outside_of_graphs() -> None:
    seen: list[bool] = []
    eager = torch_private.outside_of_graphs(lambda: seen.append(torch.compiler.is_compiling()))

    def run(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            eager()
        return x + 1

    torch._dynamo.reset()
    assert torch.compile(run, backend="eager")(torch.ones(2)).sum() == 4
    assert seen == [False]
    torch._dynamo.reset()


def test_torch_function_comes_back_where_it_was_switched_off() -> None:
    seen: list[str] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    tensor = torch.ones(2).as_subclass(Watched)
    seen.clear()
    with torch_private.without_torch_function():
        tensor.sum()
        assert not seen
        with torch_private.with_torch_function():
            tensor.sum()
        tensor.mean()
    assert seen == ["sum"]


def test_the_sequence_number_grows_with_every_node() -> None:
    x = torch.ones(2, requires_grad=True)
    before = torch_private.sequence_number()
    x.mul(2)
    once = torch_private.sequence_number()
    assert once > before
    with torch.no_grad():
        x.mul(2)
    assert torch_private.sequence_number() == once


def test_modes_are_seen() -> None:
    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert not torch_private.has_modes()
    assert not torch_private.has_user_modes()
    dispatch: Any = Dispatch
    for mode in (dispatch(), Function()):
        with mode:
            assert torch_private.has_modes()
            assert torch_private.has_user_modes()
    with torch.device("meta"):
        assert torch_private.has_modes()
        assert not torch_private.has_user_modes()
        assert torch_private.default_device() == torch.device("meta")
    assert torch_private.default_device() is None


def test_dynamo_leaves_marked_functions_alone() -> None:
    @torch_private.never_traced
    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(type(x))
        return 2 * x

    seen: list[type] = []
    compiled = torch.compile(lambda x: double(x) + 1, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert seen == [torch.Tensor], "it was traced with a stand-in, or twice"
