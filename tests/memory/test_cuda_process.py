"""What happens to a GPU when a process ends badly, has one hardware queue, or uses lanes from another thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from stormtorch.core.tags import Tag
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.host.pinning import page_lock_for
from stormtorch.memory.lanes.build import open_lanes
from stormtorch.memory.lanes.flags import Flags

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)


SET_UP = """
import torch
from stormtorch.core.tags import Tag
from stormtorch.memory.lanes.flags import Flags
from stormtorch.memory.host.arena import HostArena
from stormtorch.memory.lanes.build import open_lanes
from stormtorch.memory.books.ledger import open_ledger
from stormtorch.memory.host.pinning import page_lock_for
device = torch.device("cuda", 0)
ledger, lock = open_ledger(device), page_lock_for(device)
flags = Flags(1, ledger=ledger, device=device, page_lock=lock)
arena = HostArena(1 << 20, ledger=ledger, tag=Tag.DATA, page_lock=lock)
home, there = arena.tensor((1 << 20,), torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8, device=device)
lanes = open_lanes(device)
"""


def test_a_process_ends_although_its_gpu_waits_for_a_flag() -> None:
    done = run(SET_UP + "lanes.load.wait_flag(flags[0], 1)\nlanes.load.copy(there, home, Tag.DATA)\nprint('ends')\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_an_exception_with_copies_under_way_ends_with_itself() -> None:
    done = run(SET_UP + "for _ in range(1000): lanes.load.copy(there, home, Tag.DATA)\nraise ValueError('mine')\n")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ValueError: mine")


def test_ctrl_c_gets_through_a_wait_that_would_never_end() -> None:
    code = SET_UP + (
        "import os, signal, threading\n"
        "lanes.load.wait_flag(flags[0], 1)\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try: lanes.load.synchronize()\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    done = run(code)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_a_process_may_end_with_a_session_open() -> None:
    code = """
import torch, stormtorch as storm
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)])
optimizer = torch.optim.AdamW(model.parameters())
session = storm.stream(model, optimizer, vram="1GiB", activations="recompute")
for _ in range(12):
    model(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
model(torch.randn(64, 256, device="cuda"))  # with a graph that has no backward
print("ends")
"""
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_one_hardware_queue_is_enough() -> None:
    """Flags order work invisibly to the GPU's scheduler: with one queue, a wait before the work it needs would hang."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "cuda",
        "tests/laws/test_same_bytes.py",
    ]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout


def test_lanes_and_flags_work_from_a_thread_that_never_saw_the_gpu(ledger: Ledger) -> None:
    device = torch.device("cuda", 0)
    lanes = open_lanes(device)
    flags = Flags(2, ledger=ledger, device=device, page_lock=page_lock_for(device))
    home, there = torch.ones(1000).pin_memory(), torch.zeros(1000, device=device)
    torch.cuda.synchronize()

    def elsewhere() -> None:
        lanes.load.wait_flag(flags[0], 1)
        lanes.load.copy(there, home, Tag.DATA)
        lanes.load.write_flag(flags[1], 1)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    flags[0].set(1)
    assert flags[1].wait(1, timeout_s=30)
    assert float(there.sum()) == 1000
    lanes.close()
    flags.close()


def test_lanes_never_share_a_stream_with_torch() -> None:
    """torch hands its streams out in turns: a user who makes many would sooner or later compute on a lane's."""
    lanes = open_lanes(torch.device("cuda", 0))
    ours = {lanes.load.stream.cuda_stream, lanes.store.stream.cuda_stream}  # type: ignore[attr-defined]
    assert len(ours) == 2
    assert ours.isdisjoint(torch.cuda.Stream().cuda_stream for _ in range(200))
    lanes.close()
