"""One AdamW or Adam step over one set of tensors: its numbers and its tensors, checked. adamw.py and workers run it.

The arithmetic is specified in csrc/adamw.h and is the same wherever it runs. The tensors of an update, by those names:

    weight      the model's weight: fp32, bf16 or fp16. The home image.
    master      the bits that the image lacks to be the fp32 weight:
                    fp32 weight   nothing (None)
                    bf16 weight   int16 remainder, ``bits(fp32) = (bits(weight) << 16) + master``
                    fp16 weight   the fp32 weight itself
    exp_avg     first moment, fp32
    exp_avg_sq  second moment, fp32
    grad        gradient: fp32, bf16 or fp16, independent of the weight's dtype
    grad_factor one fp32 number that multiplies ``grad_scale``, or None. It is read when the update begins to run, not
                when it is submitted: a GPU can write a clip coefficient there before it raises the ready flag.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import platform
from dataclasses import dataclass, field, replace

import torch

from ..core.errors import SettingError
from .library import Scalars, Update

L2, FROM_GRAD, SQUARE_FUSED = 1, 2, 4  # csrc/adamw.h
# The product that torch's compiler fused into the second moment of its fused kernel; see csrc/adamw.h.
_FUSION = SQUARE_FUSED if platform.machine().lower() in ("x86_64", "amd64") else 0

_WEIGHT_KINDS = {(torch.float32, None): 0, (torch.bfloat16, torch.int16): 1, (torch.float16, torch.float32): 2}
_DEVICES = ("cpu", "cuda")
_NEEDED = ("weight", "exp_avg", "exp_avg_sq", "grad")
_GRAD_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ACCEPTED = (
    "Accepted: contiguous tensors of one size that share no memory, all on the CPU or all on one CUDA device; weight "
    "float32 without master, bfloat16 with an int16 master, or float16 with a float32 master; moments float32; grad "
    "float32, bfloat16 or float16; grad_factor one float32, or none."
)


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """The numbers of one step, as in ``torch.optim``. ``step`` counts from 1.

    ``grad_scale`` multiplies every gradient first: a clip factor, or one over a loss scale. ``decoupled`` is AdamW;
    without it weight decay is added to the gradient, as Adam does. ``fused`` chooses the bits of fp32 results: those of
    ``torch.optim`` on CPU tensors with ``fused=True``, or without it (``fused=False``, torch's own default).
    csrc/adamw.h says where they differ, and where equality ends."""

    lr: float
    step: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True
    maximize: bool = False
    grad_scale: float = 1.0
    fused: bool = True

    def __post_init__(self) -> None:
        good = {
            "lr": self.lr >= 0,
            "step": self.step >= 1,
            "betas": len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "eps": self.eps >= 0,
            "weight_decay": self.weight_decay >= 0,
        }
        if bad := [f"{name}={getattr(self, name)!r}" for name, fine in good.items() if not fine]:
            raise SettingError(
                f"{', '.join(bad)} is not valid. Accepted: lr, eps and weight_decay of at least 0, "
                "both betas in [0, 1), step of at least 1."
            )

    @functools.cached_property
    def scalars(self) -> Scalars:
        """The kernels' scalars: computed in double, as torch does, then rounded to float once by the struct."""
        beta1, beta2 = self.betas
        lerp_weight = ctypes.c_float(1 - beta1).value
        from_grad = lerp_weight >= 0.5  # torch's lerp starts from the nearer end
        l2 = not self.decoupled and self.weight_decay != 0
        return Scalars(
            grad_scale=-self.grad_scale if self.maximize else self.grad_scale,
            l2=self.weight_decay if l2 else 0.0,
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            lerp_weight=lerp_weight - 1 if from_grad else lerp_weight,
            beta2=beta2,
            grad_sq_weight=1 - beta2,
            # Torch's loop takes the power, which may differ from the root in the last bit of a double.
            root_bias2=math.sqrt(1 - beta2**self.step) if self.fused else (1 - beta2**self.step) ** 0.5,
            eps=self.eps,
            minus_step_size=-(self.lr / (1 - beta1**self.step)),
            flags=(L2 if l2 else 0) | (FROM_GRAD if from_grad else 0) | (_FUSION if self.fused else SQUARE_FUSED),
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is plain memory: no strides, no lazy sign, elements that can be read."""
    return (
        tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and (tensor.device.type not in _DEVICES or tensor.data_ptr() % tensor.itemsize == 0)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamTensors:
    """The tensors of one update, checked at construction. The top of this file explains each."""

    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    master: torch.Tensor | None = None
    grad_factor: torch.Tensor | None = None
    # Where weight, master and moments are read, if not in place: `made_from`.
    source: AdamTensors | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        present: dict[str, torch.Tensor] = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        missing = [name for name in _NEEDED if not isinstance(present.get(name), torch.Tensor)]
        if missing:
            raise SettingError(f"Cannot update these tensors: {', '.join(missing)} missing. {_ACCEPTED}")
        kind = (self.weight.dtype, None if self.master is None else self.master.dtype)
        wrong = [
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}] on {tensor.device}"
            + ("" if _is_plain(tensor) else ", not contiguous memory of whole elements")
            for name, tensor in present.items()
            if not _is_plain(tensor)
            or tensor.device.type not in _DEVICES
            or tensor.device != self.weight.device
            or tensor.numel() != (1 if name == "grad_factor" else self.weight.numel())
            or (name in ("exp_avg", "exp_avg_sq", "grad_factor") and tensor.dtype != torch.float32)
            or (name == "grad" and tensor.dtype not in _GRAD_KINDS)
            or (name in ("weight", "master") and kind not in _WEIGHT_KINDS)
        ]
        if not wrong and kind not in _WEIGHT_KINDS:
            wrong = [f"weight is {self.weight.dtype} and master is missing"]
        if wrong:
            raise SettingError(f"Cannot update these tensors: {'; '.join(wrong)}. {_ACCEPTED}")
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in present.items() if t.numel())
        wrong += [f"{a[2]} and {b[2]} share memory" for a, b in itertools.pairwise(spans) if a[1] > b[0]]
        if wrong:
            raise SettingError(f"Cannot update these tensors: {'; '.join(wrong)}. {_ACCEPTED}")

    def scaled_by(self, factor: torch.Tensor) -> AdamTensors:
        """The same with a word by which gradients are multiplied, of fp32 and on the same device: not checked again."""
        scaled = object.__new__(AdamTensors)
        scaled.__dict__.update(self.__dict__, grad_factor=factor)
        return scaled

    def made_from(self, source: AdamTensors) -> AdamTensors:
        """The same, but weight, master and moments are only written: they are read from ``source``, on the CPU and of
        the same form, whose gradient is not used."""
        made = object.__new__(AdamTensors)
        made.__dict__.update(self.__dict__, source=source)
        return made

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def numel(self) -> int:
        return self.weight.numel()

    def bind(self, scalars: Scalars) -> Update:
        """The C form. It holds addresses only: the tensors must outlive its use."""
        master, factor, source = self.master, self.grad_factor, self.source
        return Update(
            weight=self.weight.data_ptr(),
            master=None if master is None else master.data_ptr(),
            exp_avg=self.exp_avg.data_ptr(),
            exp_avg_sq=self.exp_avg_sq.data_ptr(),
            grad=self.grad.data_ptr(),
            grad_factor=None if factor is None else factor.data_ptr(),
            count=self.numel,
            weight_kind=_WEIGHT_KINDS[self.weight.dtype, None if master is None else master.dtype],
            grad_kind=_GRAD_KINDS[self.grad.dtype],
            scalars=scalars,
            weight_from=None if source is None else source.weight.data_ptr(),
            master_from=None if source is None or source.master is None else source.master.data_ptr(),
            exp_avg_from=None if source is None else source.exp_avg.data_ptr(),
            exp_avg_sq_from=None if source is None else source.exp_avg_sq.data_ptr(),
        )

    def bring(self, first: int, last: int) -> None:
        """Copy elements ``[first, last)`` of what is updated from where it is read."""
        if self.source is not None:
            for name in ("weight", "master", "exp_avg", "exp_avg_sq"):
                if (tensor := getattr(self, name)) is not None:
                    tensor.view(-1)[first:last].copy_(getattr(self.source, name).view(-1)[first:last])


_MASTERS = {torch.bfloat16: torch.int16, torch.float16: torch.float32}


@dataclass(frozen=True, kw_only=True, eq=False)
class FileTensors:
    """The tensors of one update whose states lie in files: ``master`` and both moments are byte offsets in the memory
    that the job reads them to. ``weight`` is one too where the weights lie there; ``dtype`` is theirs."""

    weight: torch.Tensor | int
    dtype: torch.dtype
    count: int
    grad: torch.Tensor
    exp_avg: int
    exp_avg_sq: int
    master: int | None
    grad_factor: torch.Tensor | None = None

    def inside(self, memory: torch.Tensor) -> AdamTensors:
        """With states in ``memory``, bytes. Checks all tensors."""
        master = _MASTERS.get(self.dtype)

        def there(at: int, dtype: torch.dtype) -> torch.Tensor:
            return memory[at : at + self.count * dtype.itemsize].view(dtype)

        return AdamTensors(
            weight=there(self.weight, self.dtype) if isinstance(self.weight, int) else self.weight,
            master=None if self.master is None or master is None else there(self.master, master),
            exp_avg=there(self.exp_avg, torch.float32),
            exp_avg_sq=there(self.exp_avg_sq, torch.float32),
            grad=self.grad,
            grad_factor=self.grad_factor,
        )

    @property
    def has_weights(self) -> bool:
        """Whether the weights lie in a file too."""
        return isinstance(self.weight, int)

    def scaled_by(self, factor: torch.Tensor) -> FileTensors:
        """The same with a word by which gradients are multiplied."""
        return replace(self, grad_factor=factor)

    def bind(self, scalars: Scalars) -> Update:
        """The C form, which is not checked again. It holds addresses only: the tensors must outlive its use."""
        return Update(
            weight=self.weight if isinstance(self.weight, int) else self.weight.data_ptr(),
            master=self.master,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            grad=self.grad.data_ptr(),
            grad_factor=None if self.grad_factor is None else self.grad_factor.data_ptr(),
            count=self.count,
            weight_kind=_WEIGHT_KINDS[self.dtype, _MASTERS.get(self.dtype)],
            grad_kind=_GRAD_KINDS[self.grad.dtype],
            scalars=scalars,
        )


@dataclass(frozen=True, eq=False)
class WeightCopy:
    """A copy of weights, of ``source`` to ``weight``: contiguous tensors on the CPU, of one size and dtype."""

    weight: torch.Tensor
    source: torch.Tensor

    @property
    def numel(self) -> int:
        return self.weight.numel()

    def bind(self) -> Update:
        """The C form: an update without a gradient, with a kind of weight of the same size."""
        kind = 0 if self.weight.itemsize == 4 else 1
        return Update(
            weight=self.weight.data_ptr(), weight_from=self.source.data_ptr(), count=self.numel, weight_kind=kind
        )
