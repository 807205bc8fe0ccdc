"""The settings of a streamed trainer, and the trainer's own settings that cannot be combined with streaming.

The settings are those of `storm.stream`, given to the trainer as ``storm={"vram": "8GiB"}``. A keyword, because it is
the same for every trainer: a subclass of ``TrainingArguments`` would be needed again for ``SFTConfig``, ``DPOConfig``
and so on, and a script that parses its arguments would have to name it in two places.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...core.errors import SettingError
from ...streams.settings import Settings


def checked(storm: object) -> dict[str, Any]:
    """The keyword ``storm`` as settings of `storm.stream`; raises at once for wrong names and values."""
    if storm is None:
        return {}
    names = [field.name for field in dataclasses.fields(Settings)]
    if not isinstance(storm, Mapping):
        raise SettingError(f"storm={storm!r} is not valid. Accepted: a dict, as in storm={{'vram': '8GiB'}}.")
    unknown = [key for key in storm if key not in names]
    if unknown:
        raise SettingError(f"storm={{{unknown[0]!r}: ...}} is not valid. Accepted: {', '.join(names)}.")
    Settings(**storm)
    return dict(storm)


def keep_in_ram(init: Callable[..., None], given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """If TRL loads the model by its name, make it load into RAM: on a GPU it may not fit.

    Changes ``args.model_init_kwargs``, unless it has a ``device_map``.
    """
    arguments = inspect.signature(init).bind_partial(*given, **named).arguments
    arguments = {**arguments.get("kwargs", {}), **arguments}
    args: Any = arguments.get("args")
    if isinstance(arguments.get("model"), str) and hasattr(args, "model_init_kwargs"):
        args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}


def refuse_arguments(args: Any, storm: Mapping[str, Any]) -> None:
    """Refuse settings that make the trainer copy, shard, compile or move the model."""
    if args.deepspeed:
        raise SettingError("DeepSpeed and STORM both place the model. Remove deepspeed=..., or use the plain trainer.")
    if args.fsdp:
        raise SettingError("FSDP and STORM both place the model. Remove fsdp=..., or use the plain trainer.")
    if args.world_size > 1:
        raise SettingError(f"STORM streams to one GPU; this run has {args.world_size} processes. Start it with one.")
    if args.n_gpu > 1:
        raise SettingError(
            f"STORM streams to one GPU; torch sees {args.n_gpu}, and the trainer would copy the model to each "
            "(DataParallel). Show it one: CUDA_VISIBLE_DEVICES=0."
        )
    if args.device.type not in ("cpu", "cuda"):
        raise SettingError(f"STORM streams to CUDA devices and the CPU, not to {args.device.type!r}.")
    device = storm.get("device", "auto")
    if device != "auto" and torch.device(device).type != args.device.type:
        raise SettingError(
            f"storm={{'device': {str(device)!r}}}, but the trainer's device is {args.device}. Remove it."
        )
    if args.torch_compile:
        raise SettingError("torch_compile=True compiles the whole model as one. Remove it; blocks may be compiled.")
    if args.fp16_full_eval or args.bf16_full_eval:
        raise SettingError("fp16_full_eval and bf16_full_eval cast the model. Load it in that dtype instead.")
    offload = (args.gradient_checkpointing_kwargs or {}).get("offload")
    if getattr(args, "activation_offloading", False) or offload:
        what = "gradient_checkpointing_kwargs={'offload': True}" if offload else "activation_offloading=True"
        raise SettingError(f"{what} and STORM both move activations. Remove it, and set storm={{'activations': ...}}.")
    name = str(getattr(args.optim, "value", args.optim))
    if "lomo" in name or "layerwise" in name:
        raise SettingError(f"optim={name!r} updates inside backward itself. Use storm={{'step': 'backward'}}.")
    if storm.get("step") == "backward" and (args.max_grad_norm > 0 or args.gradient_accumulation_steps > 1):
        raise SettingError(
            f"step='backward' uses gradients before their norm and their sum are known, but max_grad_norm is "
            f"{args.max_grad_norm} and gradient_accumulation_steps is {args.gradient_accumulation_steps}. "
            "Set them to 0 and 1, or remove 'step'."
        )


def refuse_model(model: Any) -> None:
    """Refuse models that are quantized or spread over several devices."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1 or "disk" in places:
        raise SettingError(
            f"device_map spread the model over {', '.join(sorted(places))}. Load it into RAM: device_map=None "
            "(with TRL: model_init_kwargs={'device_map': None})."
        )
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        raise SettingError("The model is quantized, which STORM cannot stream. Load it in bf16; LoRA works with that.")
