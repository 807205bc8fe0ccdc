"""Saving and loading take no second copy of the model: measured in a child, by what the kernel counts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import torch

from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tag, Tier

from ..resident import resident_bytes
from .made import Run

CHILD = """
import gc, json, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import torch
from torch import nn
import stormtorch as storm
from stormtorch.checkpoint import load_weights

torch.cuda.is_available()  # where there is a driver it is loaded now, and not in the middle of what is measured

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

def now():
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    return peak()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

def trained(folder):
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = storm.stream(model, optimizer, vram="96MiB", device="cpu", step="serial")
    if folder:
        session.load(folder)
    else:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    model(torch.ones(1, 2048)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, session

folder = Path(sys.argv[1])
found = {{}}
now()
model, session = trained(None)
started, before = peak(), now()
session.save(folder / "one")
found["save"] = [before, peak()]
before = now()
session.save(folder / "one", wait=False)
session.synchronize()
found["behind"] = [before, peak()]
before = now()
session.load(folder / "one")
found["load"] = [before, peak()]
before = now()
load_weights(model, folder / "one")
found["weights"] = [before, peak()]
session.close()
del model, session
gc.collect()
now()
model, session = trained(folder / "one")
found["resume"] = [started, peak()]
session.close()
print(json.dumps(found))
"""


# malloc maps each tensor on its own, always: left to itself it starts keeping freed ones after a while, 16 MiB each.
STEADY = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def test_no_second_copy_of_the_model(tmp_path: Path) -> None:
    child = CHILD.format(paths=[str(Path(__file__).parents[2]), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", child, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, **STEADY},
    )
    assert ended.returncode == 0, ended.stderr
    for what, (before, peak) in json.loads(ended.stdout).items():
        assert before > 256 * MiB  # 64 of weights, 128 of states, 64 of gradients, and torch
        assert peak <= 1.05 * before, f"{what}: {before / MiB:.0f} MiB, {peak / MiB:.0f} at the peak"


def test_twenty_times_saved_and_loaded_leave_nothing(tmp_path: Path) -> None:
    run = Run(width=64)
    run.step()

    def cycle(number: int) -> None:
        run.session.save(tmp_path / "one", wait=number % 2 == 0)
        run.step(number)
        run.session.load(tmp_path / "one")

    def standing() -> tuple[int, int, int]:
        gc.collect()
        return threading.active_count(), psutil.Process().num_threads(), len(list(Path("/proc/self/fd").iterdir()))

    for number in range(4):
        cycle(number)
    before, charged, rss = standing(), run.session.ledger.used_bytes(Tier.HOST), resident_bytes()
    for number in range(20):
        cycle(number)
    assert standing() == before
    assert run.session.ledger.used_bytes(Tier.HOST) == charged
    assert run.session.ledger.used_bytes(Tier.HOST, Tag.CHECKPOINT) == 0
    assert resident_bytes() - rss < 16 * MiB
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    run.session.close()
    assert type(run.model.head.weight) is torch.nn.Parameter
