"""What the trainer writes beside the weights, and which of its checkpoints to go on from.

The files are the trainer's own (``optimizer.pt``, ``scheduler.pt``), so that a plain ``Trainer`` can go on from a
streamed run and the other way round. With bf16 and fp16 models the optimizer's state has an entry ``master`` more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...core.notices import say_once
from ...streams.durable import MASTER, durable_of
from ...streams.home import HomeView


def newest_complete(directory: str | Path) -> Path | None:
    """The newest checkpoint in ``directory`` that was written to its end; None if there is none.

    The trainer writes in place, its state file last, and takes the highest number when it is to resume: after a kill
    that may be half a checkpoint.
    """
    found = [path for path in Path(directory).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]
    numbered = [(int(number), path) for path in found if (number := path.name.rpartition("-")[2]).isdigit()]
    for _, path in sorted(numbered, reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            say_once(
                f"{path} is not a whole checkpoint ({TRAINER_STATE_NAME}, written last, cannot be read): passed over."
            )
            continue
        return path
    return None


def save_optimizer(directory: str | Path, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Write both states as the trainer does, straight from where they live, and masters that torch knows nothing of."""
    content = optimizer.state_dict()
    durable = durable_of(model)
    if durable is not None:
        number = {id(parameter): number for number, parameter in enumerate(_numbered(optimizer))}
        for parameter, held in durable.states():
            state = content["state"].get(number.get(id(parameter)))
            if state is not None and MASTER in held and MASTER not in state:
                content["state"][number[id(parameter)]] = {**state, MASTER: held[MASTER]}
    torch.save(content, Path(directory) / OPTIMIZER_NAME)
    torch.save(scheduler.state_dict(), Path(directory) / SCHEDULER_NAME)


def load_optimizer(directory: str | Path, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Read both states, the larger one through the page cache; does nothing if they are not both there.

    The trainer would read the whole file into RAM first, beside the memory that it is for; and torch would round the
    states of bf16 models to bf16, where they are not ours.
    """
    files = [Path(directory) / name for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
    if not all(file.is_file() for file in files):
        return
    content = torch.load(files[0], map_location="cpu", weights_only=True, mmap=True)
    optimizer.load_state_dict(content)
    durable = durable_of(model)
    for number, parameter in enumerate(_numbered(optimizer)):
        for name, saved in content["state"].get(number, {}).items():
            state = optimizer.state[parameter]
            if not isinstance(saved, torch.Tensor) or isinstance(state.get(name), HomeView):
                continue
            if name != MASTER:
                state[name] = saved.to(state[name].device, copy=True)  # what is read lazily must not follow its file
            elif state.pop(MASTER, None) is not None and durable is not None:
                durable.room_for(parameter, {MASTER: (saved.shape, saved.dtype)})[MASTER].copy_(saved)
    scheduler.load_state_dict(torch.load(files[1], weights_only=True))


def _numbered(optimizer: Any) -> list[nn.Parameter]:
    """The parameters in the order in which ``state_dict`` counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
