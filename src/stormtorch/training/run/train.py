"""``train``: assembles the parts of a run and runs it."""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack
from pathlib import Path

import torch

from ...core.errors import SettingError
from ...memory.books.limits import usable_device
from ..errors import require
from ..model.build import Built
from ..output.checkpoints import Checkpoints
from ..output.identity import RunRecord, identity, write_run_file
from ..output.metrics import Metrics, cut_back
from ..output.resume import Resumed, candidates, go_on, same_run, tidy
from ..output.run_folder import RunFolder
from ..reporting import Watcher, describe_usage
from ..settings.train_settings import TrainSettings, check_required, is_callable_name, learning_rate
from .loop import Loop
from .open_model import check_names, check_room, open_model
from .stopping import Stopping
from .text_data import loader_of, read_text


def train(settings: TrainSettings, watcher: Watcher, stopping: Stopping | None = None) -> int:
    """Train with these settings; returns the exit status. Raises StormError, e.g. NotFinite, and `Stopped` if a signal
    comes before the first step. ``stopping``: a handler that is entered already; default: a new one."""
    if stopping is None:
        with Stopping(watcher.warn) as own:
            return train(settings, watcher, own)
    check_required(settings)
    _refuse_ranks()
    with RunFolder(Path(settings.output)) as folder, ExitStack() as ends:
        found = candidates(folder, settings)
        name = settings.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        device = usable_device(name)
        settings = _with_dtype(settings, device)
        if settings.tensorboard:  # refused here if it is not installed, before hours of loading
            require("torch.utils.tensorboard", extra="log", why="--tensorboard")
        check_names(settings)
        check_room(settings, device)
        data = read_text(settings, folder.data, watcher)
        made_with = identity(settings, total=data.total, data=data.rows.fingerprint)
        found = same_run(found, made_with, settings, data.total, watcher.warn)
        opened = open_model(settings, device, data, watcher, ends, values=not found)
        built, total = opened.built, data.total
        loader = ends.enter_context(loader_of(data.rows, settings, device, steps=total))
        resumed = go_on(found, opened.session, loader, folder, total, watcher)
        done = resumed.record.step if resumed is not None else 0
        cut_back(folder.metrics, done)
        board = folder.tensorboard if settings.tensorboard else None
        metrics = ends.enter_context(Metrics(folder.metrics, tensorboard=board, purge_step=done + 1))
        if opened.load is not None:
            metrics.write_spent("load", done, opened.load)
        if resumed is not None:
            metrics.write_spent("resume", done, resumed.spent, checkpoint=str(resumed.path))
            tidy(folder, done, settings.keep, watcher)
            if resumed.record.total is not None and resumed.record.total < total:
                watcher.say(
                    f"schedule   the run had {resumed.record.total} steps and has {total} now: from step {done + 1} on "
                    f"the learning rate is that of {total} steps, {learning_rate(settings, done + 1, total):.3g} at "
                    "first"
                )
            if done >= total:
                return _nothing_left(resumed, settings, built, watcher)

        def write_files(into: Path, step: int, optimizer: bool) -> None:
            built.copy_files(into)
            data.tokenizer.save_pretrained(str(into))
            write_run_file(into, RunRecord(step, made_with, optimizer, total), settings)

        eval_loader = None
        if data.eval_rows is not None:
            eval_loader = ends.enter_context(loader_of(data.eval_rows, settings, device))
        last = resumed.path if resumed is not None else None
        loop = Loop(
            settings=settings,
            opened=opened,
            data=data,
            loader=loader,
            eval_loader=eval_loader,
            checkpoints=Checkpoints(
                opened.session, folder, settings, metrics, write_files, watcher.warn, done=done, last=last
            ),
            metrics=metrics,
            watcher=watcher,
            stopping=stopping,
            done=done,
        )
        stopping.begin_steps()
        return _ending(loop, loop.run())


def _nothing_left(resumed: Resumed, settings: TrainSettings, built: Built, watcher: Watcher) -> int:
    """Say how to continue a run whose last step is saved; returns the exit status."""
    done = resumed.record.step
    more = f"--steps {2 * done}" if settings.steps is not None else f"--epochs {2 * settings.epochs:g}"
    watcher.say(f"The run is finished at step {done}: nothing is left to train. Continue it with {more}.")
    _say_result(built, resumed.path, watcher)
    if resumed.record.optimizer or not settings.save_optimizer:
        return 0
    watcher.warn(
        f"{resumed.path} is not complete: it holds the weights alone, without the optimizer's states. Give "
        "--no-save-optimizer if that is enough. Or free space and delete it: the same command then trains again, from "
        "the checkpoint before it or from the beginning."
    )
    return 1  # like the run that made it


def _refuse_ranks() -> None:
    """Refuse a launcher, before locking the folder: else the second process reports that the first one is running."""
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks.isdecimal() and int(ranks) > 1:
        raise SettingError(
            f"STORM trains in one process, and WORLD_SIZE={ranks} means that a launcher such as torchrun or accelerate "
            f"launch started {ranks}. Start storm train without a launcher."
        )


def _with_dtype(settings: TrainSettings, device: torch.device) -> TrainSettings:
    """Resolve dtype=auto: bf16, but fp32 on a CPU, where bf16 may be a hundred times slower."""
    if settings.dtype != "auto" or is_callable_name(settings.model):
        return settings
    return dataclasses.replace(settings, dtype="fp32" if device.type == "cpu" else "bf16")


def _ending(loop: Loop, saved: bool) -> int:
    """Report how the run ended and what it used; returns the exit status."""
    watcher, stopping, last = loop.watcher, loop.stopping, loop.checkpoints.last
    watcher.say("")
    watcher.say(str(loop.session.report(tokens_per_step=loop.tokens_per_step)))
    watcher.say(describe_usage(loop.metrics.spent))
    watcher.say("")
    if not saved:
        weights = loop.checkpoints.weights_alone
        kept = f"The weights alone are in {weights}" if weights is not None else "The last step was not saved"
        good = f"The last complete checkpoint is {last}" if last is not None else "There is no complete checkpoint"
        watcher.warn(f"{kept}. {good}. Free space, or use another disk.")
        return stopping.status or 1
    if stopping.signal is not None:
        where = f"saved in {last}" if last is not None else "nothing to save"
        how = "The same command" if loop.settings.resume == "auto" else "The same command with --resume auto"
        watcher.say(f"Stopped after step {loop.done} of {loop.total}, {where}. {how} resumes from there.")
    else:
        _say_result(loop.opened.built, last, watcher)
    return stopping.status


def _say_result(built: Built, path: Path | None, watcher: Watcher) -> None:
    watcher.say(f"The trained model is {path}")
    watcher.say(f"Open it: {built.opening.format(path=str(path))}")
