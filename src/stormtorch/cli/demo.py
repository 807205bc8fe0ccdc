"""``storm demo``: trains a small language model with less device memory than its weights need.

It runs ``storm train`` on a bundled corpus (STORM's own documentation), and an ordinary loop of torch and transformers
beside it; then it compares every loss and every weight, and the device memory with the budget.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import SettingError
from ..core.sizes import KiB, format_bytes, parse_bytes
from ..training.errors import require
from ..training.settings.train_settings import TrainSettings
from .live import Live

if TYPE_CHECKING:
    import torch

    from ..training.reporting import Status

_BUNDLED = Path(__file__).parent.parent / "demo_data"
# The bundled shape is too small for a GPU: its libraries alone take more than such a budget.
_GPU_SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "initializer_range": 0.02}
_GPU_SHAPE |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda:0, ... (default: the GPU if there is one)")
    parser.add_argument("--vram", default="auto", help="device budget (default: half of the model's weights)")
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")


def run(options: argparse.Namespace) -> int:
    if options.steps < 2:
        raise SettingError(f"--steps {options.steps} is not valid. Accepted: 2 or more.")
    for package in ("transformers", "tokenizers"):
        require(package, extra="hf", why="storm demo")
    with tempfile.TemporaryDirectory(prefix="storm-demo-") as folder:
        return _run(options, Path(folder))


def _run(options: argparse.Namespace, folder: Path) -> int:
    import torch

    from ..memory.books import limits
    from ..native.library import describe

    gpu = torch.cuda.is_available()
    device = limits.usable_device(("cuda" if gpu else "cpu") if options.device == "auto" else options.device)
    vram = None if options.vram == "auto" else parse_bytes(options.vram, setting="--vram")
    model = folder / "model"  # a directory of transformers without weights: they are random
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(_BUNDLED / name, model / name)
    config = json.loads((_BUNDLED / "config.json").read_bytes()) | (_GPU_SHAPE if device.type == "cuda" else {})
    (model / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        size = sum(parameter.nbytes for parameter in _new_model(model).parameters())
    vram = size // 2 // KiB * KiB if vram is None else vram
    settings = _settings(model, folder, device, f"{vram // KiB}KiB" if vram % KiB == 0 else str(vram), options.steps)
    print(f"{device}: {describe()}")
    print(f"model    {format_bytes(size)} of weights, device budget {format_bytes(vram)}, {options.steps} steps")
    print(f"streamed storm train ... --vram {settings.vram}")
    print(flush=True)
    streamed = _train_streamed(settings)
    if streamed is None:
        return 1
    print("plain    torch, transformers and a loop ...", flush=True)
    status = compare(_train_plain(settings, device), streamed, vram)
    flags = {"model": _BUNDLED, "data": _BUNDLED / "corpus.jsonl", "output": "my-run"}
    flags |= {name: getattr(settings, name) for name in ("vram", "device", "dtype", "sequence", "batch", "lr")}
    command = " ".join(f"--{name} {value}" for name, value in flags.items())
    print(f"The demo's files are removed. To train such a model and keep it: storm train {command}")
    return status


class Run(NamedTuple):
    losses: list[float]
    weights: list[torch.Tensor]
    seconds: float
    peak_bytes: int  # of device memory


def compare(plain: Run, streamed: Run, vram_bytes: int) -> int:
    """Print the comparison; returns the exit status."""
    import torch

    falls, held = streamed.losses[-1] < streamed.losses[0], streamed.peak_bytes <= vram_bytes
    memory = f"{format_bytes(streamed.peak_bytes)} of {format_bytes(vram_bytes)}"
    apart = max(abs(a - b) / abs(a) for a, b in zip(plain.losses, streamed.losses, strict=True))
    same = all(torch.equal(a, b) for a, b in zip(plain.weights, streamed.weights, strict=True))
    print(f"plain    loss {plain.losses[0]:.3f} -> {plain.losses[-1]:.3f} in {plain.seconds:.1f} s")
    print(f"streamed loss {streamed.losses[0]:.3f} -> {streamed.losses[-1]:.3f} in {streamed.seconds:.1f} s in total")
    print("         (one run of each on a machine that may be busy: not a comparison of speed)")
    print(f"The loss {'falls' if falls else 'does not fall'}.")
    print(f"The budget {'held' if held else 'was broken'}: {memory}.")
    if plain.losses == streamed.losses and same:
        print("Every loss and every weight equals plain PyTorch's, bit for bit.")
    else:
        print(f"Losses differ from plain PyTorch's by at most {apart:.1e} of their value (another AdamW kernel).")
    right = apart < 1e-2 and held and falls
    if not right:
        print("This is a defect: please report it.")
    return int(not right)


def _settings(model: Path, folder: Path, device: torch.device, vram: str, steps: int) -> TrainSettings:
    return TrainSettings(
        model=str(model),
        data=(str(_BUNDLED / "corpus.jsonl"),),
        output=str(folder / "run"),
        device=str(device),
        vram=vram,
        dtype="fp32",
        sequence=128,
        batch=4,
        steps=steps,
        lr=3e-3 if device.type == "cpu" else 3e-4,
        schedule="constant",
        warmup=0,
        save_every=0,
        log_every=1,
    )


def _new_model(directory: Path, *, seed: int = 0) -> Any:
    import torch

    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(str(directory))
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _train_plain(settings: TrainSettings, device: torch.device) -> Run:
    """The same training as an ordinary loop; only the rows and their order are ours."""
    import torch
    import transformers

    from ..data.loader import DataLoader
    from ..training.model.optimizer import make_optimizer
    from ..training.text import prepare

    assert settings.model is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
    cache = Path(settings.output) / "data"
    rows = prepare(settings.data, tokenizer, sequence=settings.sequence, cache=cache)
    model = _new_model(Path(settings.model), seed=settings.seed).to(device).train()
    optimizer = make_optimizer(model, settings)  # an ordinary torch.optim.AdamW, not streamed
    losses, start_s = [], time.perf_counter()
    with DataLoader(rows.arrays, settings.batch, shuffle=True, device=device, drop_last=True, epochs=999) as loader:
        for _, batch in zip(range(settings.steps or 0), loader, strict=False):
            loss = model(input_ids=batch["input_ids"].long(), labels=batch["labels"].long(), use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    numbers = [float(loss) for loss in losses]
    seconds = time.perf_counter() - start_s
    return Run(numbers, [parameter.detach().cpu() for parameter in model.parameters()], seconds, 0)


def _train_streamed(settings: TrainSettings) -> Run | None:
    """Run ``storm train``; losses and the peak from its metrics, weights from its checkpoint. None: it was stopped."""
    import torch

    from ..training.run.train import train

    class Watching(Live):
        def say(self, line: str) -> None:
            if settings.output not in line:  # the trained model is removed with the demo's other files
                super().say(line)

        def log(self, status: Status) -> None:
            if status.step % 5 == 0 or status.step == 1:
                super().log(status)

    transformers: Any = importlib.import_module("transformers")
    before = torch.cuda.memory_allocated(settings.device) if settings.device.startswith("cuda") else 0
    live, start_s = Watching(), time.perf_counter()
    try:
        if train(settings, live):
            return None
    finally:
        live.close()
    seconds = time.perf_counter() - start_s
    *records, end = map(json.loads, (Path(settings.output) / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    [checkpoint] = (Path(settings.output) / "checkpoints").glob("step-*")
    transformers.utils.logging.disable_progress_bar()
    trained = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
    weights = [parameter.detach() for parameter in trained.parameters()]
    return Run(losses, weights, seconds, end["peak_vram_bytes"] - before)
