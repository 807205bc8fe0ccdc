"""What the trainer writes beside the weights, and which of its checkpoints to go on from.

The files are the trainer's own (``optimizer.pt``, ``scheduler.pt``), so that a plain ``Trainer`` can go on from a
streamed run and the other way round. With bf16 and fp16 models the optimizer's state has an entry ``master`` more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...core.notices import say_once
from ...streams.home import HomeView, joined, plain


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


def save_optimizer(directory: str | Path, optimizer: Any, scheduler: Any) -> None:
    """Write both states as the trainer does, straight from where they live."""
    state = _pytree.tree_map_only(HomeView, _own_storage, optimizer.state_dict())
    torch.save(state, Path(directory) / OPTIMIZER_NAME)
    torch.save(scheduler.state_dict(), Path(directory) / SCHEDULER_NAME)


def load_optimizer(directory: str | Path, optimizer: Any, scheduler: Any) -> bool:
    """Read both states, the larger one through the page cache; False if they are not both there.

    The trainer would read the whole file into RAM first, beside the memory that it is for.
    """
    files = [Path(directory) / name for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
    if not all(file.is_file() for file in files):
        return False
    optimizer.load_state_dict(torch.load(files[0], map_location="cpu", weights_only=True, mmap=True))
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, HomeView):
                state[name] = value.clone()  # still the file's memory: it must not follow what happens to the file
    scheduler.load_state_dict(torch.load(files[1], weights_only=True))
    return True


def _own_storage(view: HomeView) -> torch.Tensor:
    """The same memory as a storage that begins and ends with the tensor.

    ``torch.save`` writes whole storages, and refuses one that is seen in two dtypes; home memory is one for all states.
    """
    tensor = plain(joined(view))
    if not tensor.numel() or not tensor.is_contiguous():
        return tensor.clone()
    flat = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return flat.view(tensor.dtype).view(tensor.shape)
