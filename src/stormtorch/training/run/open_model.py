"""Opens the model of a run: builds it, streams it, reads its weights, and describes it to the user."""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...checkpoint import load_weights
from ...checkpoint.content.pretrained import write_configs
from ...core.errors import SettingError
from ...session.api import Session
from ...session.build import check_budgets
from ...streams.settings import Settings
from ..errors import reason
from ..model import own_model
from ..model.build import Built, build, build_outline, check_base
from ..model.optimizer import make_optimizer, optimizer_and_options
from ..reporting import Spent, Watcher, describe_model, describe_placement, describe_schedule
from ..settings.train_settings import TrainSettings, is_callable_name
from .losses import check_can_sample
from .text_data import TextData


class Opened(NamedTuple):
    """``load``: the cost of reading the weights; None if none were read."""

    built: Built
    optimizer: torch.optim.Optimizer
    session: Session
    load: Spent | None


def check_names(settings: TrainSettings) -> None:
    """Refuse unknown names of the optimizer, the model or the loss, before hours of preparing data."""
    optimizer_and_options(settings)
    _seed(settings)  # importing user code may draw random numbers
    if is_callable_name(settings.model):
        own_model.find_callable(str(settings.model), setting="--model")
        own_model.own_loss(settings.loss)
    elif settings.lora_rank:
        check_base(settings)


def check_room(settings: TrainSettings, device: torch.device) -> None:
    """Refuse a model that the budgets cannot hold, on the meta device: before reading data or making a weight."""
    model = build_outline(settings)
    if model is not None:
        check_budgets(model, make_optimizer(model, settings), _stream_settings(settings, device))


def open_model(
    settings: TrainSettings, device: torch.device, data: TextData, watcher: Watcher, ends: ExitStack, *, values: bool
) -> Opened:
    """Open the model. Without ``values`` a checkpoint brings them. ``ends`` closes the session."""
    _seed(settings)
    began_s = time.perf_counter()
    built = build(settings, values=values)
    built_s = time.perf_counter() - began_s
    if settings.sample_prompts:
        check_can_sample(built.model)
    _rehearse_saving(built, data)
    watcher.say(describe_model(built.model, built.origin))
    watcher.say(describe_schedule(settings, data.total, data.rows.rows))
    optimizer = make_optimizer(built.model, settings)
    session = ends.enter_context(Session(built.model, optimizer, _stream_settings(settings, device)))
    session._keeps_states = False  # checkpoints have them, and the run ends with the session
    began_s = time.perf_counter()
    if built.weights is not None:
        load_weights(built.model, built.weights)
    load = None
    if built.read_bytes:
        load = Spent(built_s + time.perf_counter() - began_s, built.read_bytes)
        watcher.say(f"weights    read in {load.seconds:.1f} s")
    for line in describe_placement(session):
        watcher.say(line)
    return Opened(built, optimizer, session, load)


def _stream_settings(settings: TrainSettings, device: torch.device) -> Settings:
    return Settings(
        vram=settings.vram,
        ram=settings.ram,
        disk=settings.disk,
        disk_limit=None if settings.disk_limit == "auto" else settings.disk_limit,
        device=device,
        activations=settings.activations,
        step=settings.step,
    )


def _seed(settings: TrainSettings) -> None:
    random.seed(settings.seed)
    np.random.seed(settings.seed % (1 << 32))
    torch.manual_seed(settings.seed)


def _rehearse_saving(built: Built, data: TextData) -> None:
    """Write the small files of a checkpoint to a temporary folder: transformers reads some configs but refuses to write
    them. Find that now, not at the first save."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_configs(built.model, Path(folder))
            built.copy_files(Path(folder))
            data.tokenizer.save_pretrained(folder)
        except OSError:  # of the temporary folder
            pass
        except Exception as error:
            raise SettingError(
                f"The model or its tokenizer cannot be saved with a checkpoint: {reason(error)}. Correct its "
                "config.json, generation_config.json or tokenizer_config.json."
            ) from error
