"""All settings of ``storm train`` in one frozen dataclass: the only place with their names, defaults and help.

The command's flags, the keys of a YAML file, and the output of ``--print-config`` all come from its fields.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import SettingError
from .values import PAIR, SWITCH, Kind, accept, count, number, one_of, path, several, size, text


def _setting(group: str, default: Any, kind: Kind, meaning: str) -> Any:
    return field(default=default, metadata={"kind": kind, "group": group, "help": meaning})


_model = functools.partial(_setting, "model and memory")
_data = functools.partial(_setting, "data")
_update = functools.partial(_setting, "training")
_lora = functools.partial(_setting, "LoRA")
_run = functools.partial(_setting, "run and checkpoints")
_seen = functools.partial(_setting, "metrics, evaluation and samples")

METRICS = "metrics.jsonl"  # in the output
_PATH, _PATHS = path(), several(path())
_CALLABLE = text("module:callable", "MODULE:CALLABLE")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The settings of a run. ``model`` and ``data`` are required; all others have defaults that work."""

    model: str | None = _model(
        None,
        path("a directory, a JSON file or module:callable", "MODEL"),
        "a transformers directory with weights; a directory or a JSON file with a config alone (random weights); "
        "or module:callable that returns an nn.Module",
    )
    tokenizer: str | None = _model(None, _PATH, "directory or tokenizer.json (default: the model's directory)")
    loss: str | None = _model(None, _CALLABLE, "loss(output, batch), for a module:callable model that returns no loss")
    vram: str = _model("auto", size("vram"), "limit of device memory, such as 8GiB; auto: nearly all that is free")
    ram: str = _model("auto", size("ram"), "limit of RAM, such as 64GiB; auto: what is free")
    disk: tuple[str, ...] | None = _model(
        None, _PATHS, "directories on fast local disks, for optimizer states that RAM has no room for"
    )
    disk_limit: str | None = _model(None, size("disk_limit"), "limit of the space that is used there, such as 200GiB")
    device: str = _model("auto", text("auto, cpu, cuda:0, ...", "DEVICE"), "cpu, cuda:0, ...; auto: a GPU if possible")
    dtype: str = _model(
        "auto",
        one_of("auto", "bf16", "fp32"),
        "dtype of the weights; bf16 keeps fp32 masters; auto: bf16, on a CPU fp32, or as module:callable built it",
    )
    chunked_loss: bool = _model(
        False, SWITCH, "never hold all logits: less device memory for large vocabularies, different rounding"
    )
    step: str = _model(
        "auto",
        one_of("auto", "forward", "backward", "serial"),
        "when the optimizer runs: behind the next forward, during backward as gradients arrive, or alone; the numbers "
        "are the same; auto: forward",
    )
    activations: str = _model(
        "auto",
        one_of("auto", "keep", "offload", "recompute"),
        "what backward needs is kept on the device, offloaded to RAM, or recomputed; auto: as measurements show",
    )

    data: tuple[str, ...] = _data(
        (), _PATHS, "JSON lines or text files, or directories of them; or folders that storm data pack made"
    )
    format: str = _data("auto", one_of("auto", "text", "chat", "completion"), "of the data; auto: by the first line")
    text_field: str | None = _data(None, text("a key", "KEY"), "key of the text (default: text; for chats: messages)")
    sequence: int = _data(1024, count(2, 1 << 24), "tokens in a row")
    packing: bool = _data(True, SWITCH, "join documents into full rows; --no-packing: one document per row")
    completions_only: bool | None = _data(None, SWITCH, "train on answers only (default: yes for chat and completion)")

    batch: int = _update(1, count(1), "rows in a forward pass")
    accumulate: int = _update(1, count(1, 1 << 16), "forward passes in a step")
    epochs: float = _update(1.0, number(above=True, most=1e6), "passes over the data, unless steps are given")
    steps: int | None = _update(None, count(1), "optimizer steps, instead of epochs")
    optimizer: str = _update(
        "adamw", text("the name of an optimizer of torch.optim", "NAME"), "an optimizer of torch.optim"
    )
    lr: float = _update(1e-5, number(above=True), "maximum learning rate")
    schedule: str = _update("cosine", one_of("cosine", "linear", "constant"), "learning rate after the warm-up")
    warmup: float = _update(0.03, number(), "steps from 0 to lr; below 1: a share of all steps")
    weight_decay: float = _update(0.0, number(), "of matrices; norms and biases are not decayed")
    betas: tuple[float, float] | None = _update(None, PAIR, "of Adam (default: the optimizer's own)")
    eps: float | None = _update(None, number(above=True), "of Adam (default: the optimizer's own)")
    clip: float = _update(1.0, number(), "norm at which gradients are clipped; 0: no clipping")
    seed: int = _update(0, count(0), "seed of random weights, dropout and the order of rows")
    on_nan: str = _update(
        "stop",
        one_of("stop", "skip"),
        "if a loss or gradient is not finite: stop with status 3, or skip the update (the host then waits for each "
        "step)",
    )

    lora_rank: int = _lora(0, count(0), "rank of the adapters; 0 trains all weights")
    lora_alpha: float | None = _lora(None, number(above=True), "scale of the adapters (default: twice the rank)")
    lora_dropout: float = _lora(0.0, number(most=0.99), "dropout in front of the adapters")
    lora_targets: tuple[str, ...] | None = _lora(
        None,
        several(text("the name of a module", "NAME")),
        "modules that get adapters (default: all linear layers except the head)",
    )

    output: str = _run(
        "storm-run", path(written=True), "directory of the run: checkpoints, metrics.jsonl, prepared data"
    )
    resume: str = _run(
        "auto",
        path("auto, never or a checkpoint's directory", "auto|never|PATH"),
        "auto: resume from the newest complete checkpoint, if there is one",
    )
    save_every: int = _run(500, count(0), "steps between checkpoints; 0: only at the end")
    keep: int = _run(2, count(1), "checkpoints to keep")
    save_optimizer: bool = _run(
        True, SWITCH, "save the optimizer's states; without them, a resumed run starts with new ones"
    )
    log_every: int = _seen(10, count(1), "steps between lines of metrics")
    tensorboard: bool = _seen(False, SWITCH, "write TensorBoard files too")
    eval_data: tuple[str, ...] | None = _seen(None, _PATHS, "documents to evaluate on, like --data")
    eval_every: int = _seen(500, count(0), "steps between evaluations; 0: only at the end")
    eval_batches: int | None = _seen(None, count(1), "limit of batches in an evaluation (default: all)")
    sample_every: int = _seen(0, count(0), "steps between samples; 0: only at the end")
    sample_prompts: tuple[str, ...] | None = _seen(
        None, several(text("a text", "TEXT", written=True)), "prompts that the model continues as samples"
    )
    sample_tokens: int = _seen(64, count(1), "tokens of a sample")

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = accept(item.name, item.metadata["kind"], getattr(self, item.name))
            object.__setattr__(self, item.name, item.default if value in (None, ()) else value)  # an empty line of YAML
        _check_pairs(self)

    def as_mapping(self) -> dict[str, Any]:
        """Every setting by name, in the types of YAML and JSON."""
        found = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def check_required(settings: TrainSettings) -> None:
    for name in ("model", "data"):
        if not getattr(settings, name):
            raise SettingError(f"No {name} is given. Give --{name}, or {name}: in the file of --config.")


def _check_pairs(settings: TrainSettings) -> None:
    """Refuse settings that contradict each other."""
    if settings.step == "backward":
        for name, off in (("clip", 0), ("accumulate", 1)):
            if getattr(settings, name) != off:
                raise SettingError(
                    f"step=backward updates while gradients arrive, which {name}={getattr(settings, name)} forbids. "
                    f"Use --{name} {off}, or --step forward."
                )
        if settings.on_nan == "skip":
            raise SettingError("step=backward updates before a step can be skipped. Use --step forward.")
    _check_output(settings)
    if settings.sample_every and not settings.sample_prompts:
        raise SettingError("sample_every needs prompts. Give --sample-prompts 'Once upon a time'.")
    if settings.loss is not None and not is_callable_name(settings.model):
        raise SettingError("loss is for module:callable models; transformers models have their own. Leave it out.")
    if settings.chunked_loss and is_callable_name(settings.model):
        raise SettingError("chunked_loss is for transformers models. See stormtorch.linear_cross_entropy for others.")
    if not settings.lora_rank:
        for name in ("lora_alpha", "lora_dropout", "lora_targets"):
            if getattr(settings, name):
                raise SettingError(f"{name} is for adapters, and lora_rank=0 trains all weights. Give --lora-rank 16.")
    if settings.lora_rank and is_callable_name(settings.model):
        raise SettingError("lora_rank is for transformers models. Add adapters where the model is made.")


def _check_output(settings: TrainSettings) -> None:
    """Refuse data files that the run itself writes."""
    output = os.path.realpath(settings.output)  # Path.resolve raises for a link to itself
    metrics = os.path.join(output, METRICS)  # noqa: PTH118
    for name in ("data", "eval_data"):
        for given in getattr(settings, name) or ():
            if os.path.realpath(given) in (output, metrics):
                raise SettingError(
                    f"--{name.replace('_', '-')} {given}: the run writes {metrics}, which a resumed run would read as "
                    "text. Use another --output."
                )


def is_callable_name(name: str | None) -> bool:
    """Whether ``name`` is ``module:callable``, not a path."""
    if name is None or Path(name).exists():
        return False
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), attribute])


def warmup_steps(settings: TrainSettings, total: int) -> int:
    """Steps until the learning rate reaches its maximum: a number, or a share of all, then at least one."""
    warmup = settings.warmup
    if warmup == 0:
        return 0
    return math.ceil(warmup * total) if warmup < 1 else round(warmup)


def learning_rate(settings: TrainSettings, step: int, total: int) -> float:
    """The learning rate of update ``step``, from 1 to ``total``: a resumed run needs no state for it.

    It rises linearly and reaches ``lr`` in the last step of the warm-up; then it is constant, or falls towards zero,
    which the step after the last would have.
    """
    warmup = warmup_steps(settings, total)
    if step <= warmup:
        return settings.lr * step / warmup
    if settings.schedule == "constant":
        return settings.lr
    progress = (step - 1 - warmup) / max(1, total - warmup)
    if settings.schedule == "linear":
        return settings.lr * (1.0 - progress)
    return settings.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
