"""``train``: from settings to a trained model. Puts the parts together; each has a file of its own."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from ..api import Session, stream
from ..checkpoint import load_weights
from ..data.loader import DataLoader
from ..memory.limits import usable_device
from .build import Built, build
from .checkpoints import Checkpoints
from .chunked_loss import ChunkedLoss
from .describe import describe_model, describe_placement, describe_schedule
from .identity import identity, read_run_file, write_run_file
from .loop import Loop
from .metrics import Metrics, cut_back
from .optimizer import make_optimizer
from .resume import candidates, load_first_usable, same_run, tidy
from .run_folder import RunFolder
from .sampling import check_can_sample
from .settings import TrainSettings, check_required
from .stopping import Stopping
from .text_data import TextData, read_text
from .watch import Watcher


def train(settings: TrainSettings, watcher: Watcher) -> int:
    """Train as the settings say; returns the exit status. Raises StormError, NotFinite among them."""
    check_required(settings)
    with RunFolder(Path(settings.output)) as folder, ExitStack() as ends:
        found = candidates(folder, settings)
        device = usable_device(_device(settings.device))
        data = read_text(settings, folder.data, watcher)
        made_with = identity(settings, total=data.total, data=data.rows.fingerprint)
        found = same_run(found, made_with, watcher.warn)
        built, optimizer, session = _open_model(settings, device, data, watcher, ends, values=not found)
        loader = ends.enter_context(data.loader(settings, device))
        resumed = _resume(found, session, loader, folder, watcher)
        done = 0 if resumed is None else read_run_file(resumed)[0]
        if resumed is not None:
            watcher.say(f"resumed    {resumed}: {done} of {data.total} steps are done")
            for moved in tidy(folder, resumed, settings.keep):
                watcher.say(f"damaged    {moved}: moved there")
        metrics = ends.enter_context(_open_metrics(settings, folder, done, resumed))

        def write_files(into: Path, step: int) -> None:
            built.copy_files(into)
            data.tokenizer.save_pretrained(str(into))
            write_run_file(into, step=step, made_with=made_with, settings=settings)

        eval_loader = data.eval_loader(settings, device)
        if eval_loader is not None:
            ends.enter_context(eval_loader)
        with Stopping(watcher.warn) as stopping:
            loop = Loop(
                settings=settings,
                session=session,
                model=built.model,
                loss=built.loss,
                by_tokens=built.by_tokens,
                optimizer=optimizer,
                loader=loader,
                eval_loader=eval_loader,
                tokenizer=data.tokenizer,
                checkpoints=Checkpoints(
                    session,
                    folder,
                    keep=settings.keep,
                    write_files=write_files,
                    warn=watcher.warn,
                    on_saved=lambda step, seconds: _write_saved(metrics, step, seconds),
                    last=resumed,
                ),
                metrics=metrics,
                watcher=watcher,
                stopping=stopping,
                total=data.total,
                done=done,
                before_first=built.loss.check if isinstance(built.loss, ChunkedLoss) else None,
            )
            saved = loop.run()
        return _ending(loop, saved, built, watcher)


def _open_model(
    settings: TrainSettings,
    device: torch.device,
    data: TextData,
    watcher: Watcher,
    ends: ExitStack,
    *,
    values: bool,
) -> tuple[Built, torch.optim.Optimizer, Session]:
    """The model, streamed; with its weights, unless a checkpoint follows that brings them."""
    random.seed(settings.seed)
    np.random.seed(settings.seed % (1 << 32))
    torch.manual_seed(settings.seed)
    built = build(settings, values=values)
    if settings.sample_every:
        check_can_sample(built.model)
    watcher.say(describe_model(built.model, built.origin))
    watcher.say(describe_schedule(settings, data.total, data.rows.rows))
    optimizer = make_optimizer(built.model, settings)
    session = ends.enter_context(
        stream(
            built.model,
            optimizer,
            vram=settings.vram,
            ram=settings.ram,
            device=device,
            activations=settings.activations,
            step=settings.step,
        )
    )
    if built.weights is not None:
        began_s = time.perf_counter()
        load_weights(built.model, built.weights)
        watcher.say(f"weights    read in {time.perf_counter() - began_s:.1f} s")
    for line in describe_placement(session):
        watcher.say(line)
    return built, optimizer, session


def _resume(
    found: list[Path], session: Session, loader: DataLoader, folder: RunFolder, watcher: Watcher
) -> Path | None:
    if not found:
        return None
    return load_first_usable(
        found, lambda path: _load(session, path, loader, watcher), watcher.warn, folder.checkpoints
    )


def _load(session: Session, path: Path, loader: DataLoader, watcher: Watcher) -> None:
    began_s = time.perf_counter()
    session.load(path, also={"loader": loader})
    watcher.say(f"checkpoint read in {time.perf_counter() - began_s:.1f} s")


def _open_metrics(settings: TrainSettings, folder: RunFolder, done: int, resumed: Path | None) -> Metrics:
    cut_back(folder.metrics, done)
    board = folder.tensorboard if settings.tensorboard else None
    metrics = Metrics(folder.metrics, tensorboard=board, purge_step=done + 1)
    if resumed is not None:
        metrics.write("resume", done, checkpoint=str(resumed))
    return metrics


def _write_saved(metrics: Metrics, step: int, seconds: float) -> None:
    metrics.write("save", step, seconds=round(seconds, 3))


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _ending(loop: Loop, saved: bool, built: Built, watcher: Watcher) -> int:
    watcher.say("")
    watcher.say(str(loop.session.report(tokens_per_step=loop.tokens_per_step)))
    watcher.say("")
    last = loop.checkpoints.last
    if not saved:
        watcher.warn(f"The last step is not saved. The last good checkpoint is {last or 'none'}.")
        return loop.stopping.status or 1
    if loop.stopping.signal is not None:
        where = f"saved in {last}" if last is not None else "nothing to save"
        watcher.say(f"Stopped after step {loop.done} of {loop.total}, {where}. The same command goes on from there.")
        return loop.stopping.status
    watcher.say(f"The trained model is {last}")
    watcher.say(built.opening(str(last)))
    return 0
