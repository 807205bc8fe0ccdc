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
from ..checkpoint.folder import read_manifest
from ..core.sizes import format_bytes
from ..data.loader import DataLoader
from ..memory.limits import usable_device
from .build import Built, build
from .checkpoints import Checkpoints
from .chunked_loss import ChunkedLoss
from .describe import describe_model, describe_placement, describe_schedule
from .ending import Times, as_record, peak_rss_bytes
from .identity import RunRecord, identity, read_run_file, write_run_file
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
        found = same_run(found, made_with, settings, data.total, watcher.warn)
        times = Times()
        built, optimizer, session = _open_model(settings, device, data, watcher, ends, times, values=not found)
        loader = ends.enter_context(data.loader(settings, device))
        resumed = _resume(found, session, loader, settings, folder, data.total, watcher, times)
        done = 0 if resumed is None else read_run_file(resumed).step
        metrics = ends.enter_context(_open_metrics(settings, folder, done, resumed, times))
        if resumed is not None and done >= data.total:
            watcher.say("All steps are done: nothing is left to train.")
            return _say_result(built, resumed, watcher)

        def write_files(into: Path, step: int, optimizer: bool) -> None:
            built.copy_files(into)
            data.tokenizer.save_pretrained(str(into))
            write_run_file(into, RunRecord(step, made_with, optimizer), settings)

        def on_saved(step: int, seconds: float, size: int) -> None:
            times.saves.append((seconds, size))
            metrics.write("save", step, **as_record(seconds, size))

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
                    optimizer=settings.save_optimizer,
                    write_files=write_files,
                    warn=watcher.warn,
                    on_saved=on_saved,
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
            loop.write_end()
        return _ending(loop, saved, built, times, watcher)


def _open_model(
    settings: TrainSettings,
    device: torch.device,
    data: TextData,
    watcher: Watcher,
    ends: ExitStack,
    times: Times,
    *,
    values: bool,
) -> tuple[Built, torch.optim.Optimizer, Session]:
    """The model, streamed; with its weights, unless a checkpoint follows that brings them."""
    random.seed(settings.seed)
    np.random.seed(settings.seed % (1 << 32))
    torch.manual_seed(settings.seed)
    began_s = time.perf_counter()
    built = build(settings, values=values)
    built_s = time.perf_counter() - began_s
    if settings.sample_prompts:
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
    began_s = time.perf_counter()
    if built.weights is not None:
        load_weights(built.model, built.weights)
    if built.read_bytes:
        times.load = (built_s + time.perf_counter() - began_s, built.read_bytes)
        watcher.say(f"weights    read in {times.load[0]:.1f} s")
    for line in describe_placement(session):
        watcher.say(line)
    return built, optimizer, session


def _resume(
    found: list[Path],
    session: Session,
    loader: DataLoader,
    settings: TrainSettings,
    folder: RunFolder,
    total: int,
    watcher: Watcher,
    times: Times,
) -> Path | None:
    """Load the best checkpoint that is whole, and tidy up around it; which it was, if there was one."""
    if not found:
        return None

    def load(path: Path) -> None:
        began_s = time.perf_counter()
        session.load(path, also={"loader": loader})
        times.resume = (time.perf_counter() - began_s, read_manifest(path).total_bytes)

    resumed = load_first_usable(found, load, watcher.warn, folder.checkpoints)
    record = read_run_file(resumed)
    seconds = f" (read in {times.resume[0]:.1f} s)" if times.resume is not None else ""
    watcher.say(f"resumed    {resumed}: {record.step} of {total} steps are done{seconds}")
    if not record.optimizer and record.step < total:
        watcher.warn(f"{resumed} holds the weights alone: the optimizer begins anew.")
    for moved in tidy(folder, resumed, settings.keep):
        watcher.say(f"damaged    {moved}: moved there")
    return resumed


def _open_metrics(settings: TrainSettings, folder: RunFolder, done: int, resumed: Path | None, times: Times) -> Metrics:
    cut_back(folder.metrics, done)
    board = folder.tensorboard if settings.tensorboard else None
    metrics = Metrics(folder.metrics, tensorboard=board, purge_step=done + 1)
    if times.load is not None:
        metrics.write("load", done, **as_record(*times.load))
    if times.resume is not None:
        metrics.write("resume", done, checkpoint=str(resumed), **as_record(*times.resume))
    return metrics


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _ending(loop: Loop, saved: bool, built: Built, times: Times, watcher: Watcher) -> int:
    watcher.say("")
    watcher.say(str(loop.session.report(tokens_per_step=loop.tokens_per_step)))
    watcher.say(f"process: peak RAM {format_bytes(peak_rss_bytes())}; {times}")
    watcher.say("")
    last, weights = loop.checkpoints.last, loop.checkpoints.weights_alone
    if not saved:
        kept = f"The weights alone are in {weights}" if weights is not None else "The last step is not saved"
        watcher.warn(f"{kept}. The last complete checkpoint is {last or 'none'}. Free space, or use another disk.")
        return loop.stopping.status or 1
    if loop.stopping.signal is not None:
        where = f"saved in {last}" if last is not None else "nothing to save"
        how = "The same command" if loop.settings.resume == "auto" else "The same command with --resume auto"
        watcher.say(f"Stopped after step {loop.done} of {loop.total}, {where}. {how} goes on from there.")
        return loop.stopping.status
    return _say_result(built, last, watcher)


def _say_result(built: Built, path: Path | None, watcher: Watcher) -> int:
    watcher.say(f"The trained model is {path}")
    watcher.say(built.opening(str(path)))
    return 0
