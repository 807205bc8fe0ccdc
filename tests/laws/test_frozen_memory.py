"""Law: weights that remain in files take no RAM but the ring through which they pass: measured in a child, by the
kernel's count of memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .. import forkserver
from ..thinning import daily

pytest.importorskip("safetensors")
MIB = 1 << 20
WEIGHTS, RAM, VRAM = daily(144, 256) * MIB, 40 * MIB, 24 * MIB
SLACK = 24 * MIB  # Python's own, and torch's buffers for products

CHILD = """
import json, sys, threading
from pathlib import Path
import torch
from torch import nn
from safetensors.torch import safe_open, save_file
import stormtorch as storm
from stormtorch.streams.settings import Settings
from stormtorch.session.api import Session

def count(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
        self.adapter = nn.Parameter(torch.full((1024,), 0.1))
    def forward(self, x):
        return torch.tanh(self.base(x) * self.adapter)

folder, ram, vram, blocks = Path(sys.argv[1]), *map(int, sys.argv[2:])
torch.set_num_threads(1)
with torch.device("meta"):
    model = nn.Sequential(*(Block() for _ in range(blocks)))
for index, block in enumerate(model):
    path = folder / f"{index}.safetensors"
    weight = torch.randn(1024, 1024) / 32
    save_file({"weight": weight}, path)
    block.adapter = nn.Parameter(torch.full((1024,), 0.1))
    with safe_open(path, "pt") as file:
        block.base.weight = nn.Parameter(file.get_tensor("weight"), requires_grad=False)
del weight
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
x = torch.ones(2, 1024)
before, peak, done = count("RssAnon"), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, count("RssAnon"))

thread = threading.Thread(target=watch)
thread.start()
session = Session(model, optimizer, Settings(device="cpu", vram=vram, ram=ram, disk=folder))
in_files = sum(unit.image_bytes - unit.home_bytes for unit in session.units)
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
found = {"in files": in_files, "anonymous": peak - before}
open("/proc/self/clear_refs", "w").write("5")
found["before save"] = count("VmHWM")
session.save(folder / "saved")
found["in save"] = count("VmHWM")
done.set()
thread.join()
session.close()
print(json.dumps(found))
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(RAM), str(VRAM), str(WEIGHTS // (4 * MIB))]
    done = forkserver.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["in files"] > WEIGHTS - RAM
    assert found["anonymous"] <= RAM + VRAM + SLACK, found
    assert found["in save"] - found["before save"] <= SLACK, found
