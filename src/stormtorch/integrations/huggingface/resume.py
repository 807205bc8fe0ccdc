"""Resumes from a trainer's checkpoint: chooses it, and reads the optimizer's state.

The files are the trainer's own (``optimizer.pt``, ``scheduler.pt``), so that a plain ``Trainer`` can resume a streamed
run and the other way round. With bf16 and fp16 models the optimizer's state has an additional entry ``master``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...core.errors import CheckpointError
from ...core.notices import say_once
from ...streams.home.parameter import HomeView
from ...training.errors import reason


def newest_complete(directory: str | Path) -> Path | None:
    """The newest complete checkpoint in ``directory``; None if there is none.

    The trainer writes in place, its state file last, and resumes from the highest number: after a kill that may be half
    a checkpoint.
    """
    found = [path for path in Path(directory).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]
    numbered = [(int(number), path) for path in found if (number := path.name.rpartition("-")[2]).isdigit()]
    for _, path in sorted(numbered, reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            say_once(
                f"{path} is not a complete checkpoint ({TRAINER_STATE_NAME}, written last, cannot be read): skipped."
            )
            continue
        return path
    return None


def load_optimizer(directory: str | Path, optimizer: Any, scheduler: Any) -> None:
    """Read both states, the larger one from a mapping; does nothing unless both files exist.

    The trainer would first read the whole file into RAM, beside its target; and for optimizers that STORM does not
    know, torch would round the fp32 states of a bf16 model.
    """
    files = [Path(directory) / name for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
    if not all(file.is_file() for file in files):
        return
    content = _load(files[0], mmap=True)
    optimizer.load_state_dict(content)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, saved in content["state"].items():
        state = optimizer.state.get(parameters[number], {})
        for name, value in state.items():
            if name in saved and isinstance(value, torch.Tensor) and not isinstance(value, HomeView):
                dtype = torch.promote_types(value.dtype, saved[name].dtype)
                state[name] = saved[name].to(value.device, dtype, copy=True)  # a copy, because the file may change
    scheduler.load_state_dict(_load(files[1], mmap=False))


def _load(file: Path, *, mmap: bool) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # from pickle or torch: it is damaged, or holds code
        raise CheckpointError(
            f"{file} cannot be read ({type(error).__name__}: {reason(error)[:200]}). Name another checkpoint."
        ) from error
