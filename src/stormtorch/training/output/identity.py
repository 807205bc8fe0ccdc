"""The identity of a run: everything that decides its numbers. A checkpoint holds it; a resumed run must have the same.

It leaves out placement (vram, ram, device, step, activations), which never changes a result, and how often the run
saves, logs or evaluates. It includes the data, by its tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoint.folders.manifest import check_sums, file_in, read_manifest
from ...core.errors import CheckpointError, SettingError, StorageError
from ...memory.disk.contained import parse_json, read_small
from ..model.hf_model import fingerprint, samples, values_in_config
from ..settings.train_settings import TrainSettings, is_callable_name, warmup_steps

RUN_FILE = Path("storm") / "run.json"
_CONFIG, _SAMPLES = "config of the model", "samples of the model's weights"
_OPTIONAL = {_CONFIG, _SAMPLES}  # older checkpoints do not have them
_SETTINGS = """
    sequence batch accumulate optimizer lr schedule weight_decay betas eps clip seed loss chunked_loss
    lora_rank lora_alpha lora_dropout lora_targets
"""


def identity(settings: TrainSettings, *, total: int, data: str) -> dict[str, Any]:
    """The identity by name, in JSON's types."""
    found = {name: value for name, value in settings.as_mapping().items() if name in _SETTINGS.split()}
    found["dtype"] = settings.dtype
    if is_callable_name(settings.model):
        found["model"] = settings.model
    else:
        found[_CONFIG] = values_in_config(Path(str(settings.model)))
    if settings.lora_rank:  # a checkpoint holds adapters alone
        found["weights of the model"] = fingerprint(Path(str(settings.model)))
        found[_SAMPLES] = samples(Path(str(settings.model)))
    found |= of_schedule(settings, total)
    found["data (its tokens)"] = data
    return found


def of_schedule(settings: TrainSettings, total: int) -> dict[str, Any]:
    """The values that the learning rate depends on, besides the settings."""
    steps = {} if settings.schedule == "constant" else {"steps in all": total}
    return steps | {"warm-up steps": warmup_steps(settings, total)}


class RunRecord(NamedTuple):
    """A checkpoint's record of its run. ``optimizer``: whether it holds the optimizer's states.

    ``total``: the planned steps of the run; None in older checkpoints."""

    step: int
    made_with: dict[str, Any]
    optimizer: bool
    total: int | None


def write_run_file(folder: Path, record: RunRecord, settings: TrainSettings) -> None:
    path = folder / RUN_FILE
    path.parent.mkdir(exist_ok=True)
    content = {
        "step": record.step,
        "total": record.total,
        "optimizer": record.optimizer,
        "identity": record.made_with,
        "settings": settings.as_mapping(),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_run_file(checkpoint: Path) -> RunRecord:
    path = file_in(checkpoint, str(RUN_FILE))
    try:
        if not path.exists():
            raise FileNotFoundError
        content, manifest = parse_json(read_small(path)), read_manifest(checkpoint)
        check_sums(checkpoint, manifest, manifest.files.keys() & {str(RUN_FILE)})
        step, made_with = content["step"], dict(content["identity"])
        total = content.get("total", made_with.get("steps in all"))
        if not _is_count(step) or not (total is None or _is_count(total)):
            raise ValueError("its steps are not numbers")
        if not isinstance(made_with.get(_CONFIG, {}), dict):
            raise ValueError("it names no config")
        return RunRecord(step, made_with, bool(content.get("optimizer", True)), total)
    except FileNotFoundError:
        raise CheckpointError(
            f"{checkpoint} was not made by storm train: it has no {RUN_FILE}. Open it as --model, in a new --output."
        ) from None
    except (StorageError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Use another checkpoint.") from None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def check_same(checkpoint: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise SettingError with one line for each difference."""
    then, now = _flat(then), _flat({name: now[name] for name in now if name in then or name not in _OPTIONAL})
    names = list(dict.fromkeys([*then, *now]))
    different = [name for name in names if _json(then.get(name)) != _json(now.get(name))]
    if different:
        lines = [f"{name}: {_shown(then.get(name))} then, {_shown(now.get(name))} now" for name in different]
        raise SettingError(
            f"{checkpoint} was made with settings that give other numbers. Restore them, or start a new run with "
            "another --output:" + (f" {lines[0]}" if len(lines) == 1 else "\n  " + "\n  ".join(lines))
        )


def _flat(made_with: dict[str, Any]) -> dict[str, Any]:
    """Put the config's values beside the settings."""
    config = {f"{name} in the model's config": value for name, value in (made_with.get(_CONFIG) or {}).items()}
    return {name: value for name, value in made_with.items() if name != _CONFIG} | config


def _json(value: Any) -> str:
    """For comparison: NaN equals NaN, and the order of names does not matter."""
    return json.dumps(value, sort_keys=True)


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
