"""``storm.stream`` of a model in RAM never holds its weights twice, nor does ``close``; and a model whose weights stop
half-way is ordinary and whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.core.errors import OutOfBudget, StormError
from stormtorch.memory.host import arena as host
from stormtorch.memory.host.process_memory import MappedFiles
from stormtorch.session.api import Session, stream
from stormtorch.streams.home import moving
from stormtorch.streams.home.moving import Moving
from stormtorch.streams.settings import Settings
from stormtorch.streams.units.unit import Unit

MEASURE = """
import gc, json, logging, sys
import torch
from torch import nn
import stormtorch as storm
from stormtorch.core.sizes import MiB

device, width, blocks, parts, held = sys.argv[1], *map(int, sys.argv[2:])
said = []
heard = logging.StreamHandler()
heard.emit = lambda record: said.append(record.getMessage())
logging.getLogger("stormtorch").addHandler(heard)

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def growth(action):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
    before = status("VmRSS:")
    result = action()
    return status("VmHWM:") - before, result

def block():
    made = nn.Module()
    for number in range(parts):
        weight = torch.empty(width, width // parts)
        made.register_parameter(f"w{number}", nn.Parameter(weight.fill_(number + 1.0), requires_grad=False))
    return made

def open_one():
    return storm.stream(model, vram=(8 << 30) if device == "cuda" else 4 * width * width * 4, device=device)

if device == "cuda":
    torch.zeros(1, device=device)
small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))  # whatever is made once in a process is made by this one
storm.stream(small, vram=64 * MiB, device=device).close()
model = nn.Sequential(*(block() for _ in range(blocks)))
kept = model.state_dict() if held else None
opening, session = growth(open_one)
closing, _ = growth(session.close)
right = all((p == n % parts + 1).all() for n, p in enumerate(model.parameters()))
weights = sum(p.nbytes for p in model.parameters())
print(json.dumps({"weights": weights, "opening": opening, "closing": closing, "right": bool(right), "said": said}))
"""


def measured(device: str = "cpu", *, width: int = 2048, blocks: int = 24, parts: int = 1, held: bool = False) -> Any:
    command = [sys.executable, "-c", MEASURE, device, *map(str, (width, blocks, parts, int(held)))]
    # On ARM torch has an allocator of its own, which returns memory to the system a fraction of a second later.
    environment = {**os.environ, "MIMALLOC_PURGE_DELAY": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "parts", [1, pytest.param(16, marks=pytest.mark.wide)], ids=["large_tensors", "tensors_of_malloc's_heap"]
)
def test_weights_are_in_ram_once(parts: int) -> None:
    found = measured(parts=parts)
    assert found["right"]
    assert found["opening"] <= 0.1 * found["weights"] + (32 << 20), found
    assert found["closing"] <= 0.1 * found["weights"] + (32 << 20), found
    assert not found["said"]


@pytest.mark.gpu
def test_weights_are_in_ram_once_where_they_are_page_locked() -> None:
    found = measured("cuda", width=8192, blocks=16)
    assert found["right"]
    assert found["opening"] <= 0.1 * found["weights"] + (256 << 20), found
    assert found["closing"] <= 0.1 * found["weights"] + (256 << 20), found


def test_memory_that_user_code_holds_is_said() -> None:
    found = measured(blocks=6, held=True)
    assert found["right"]
    assert len(found["said"]) == 1
    assert "96.0 MiB of RAM that held the model's weights could not be freed" in found["said"][0]


def test_a_mapped_file_is_no_memory_of_the_process(tmp_path: Any) -> None:
    """As weights are that come from safetensors."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 16))
    mapped = torch.from_file(str(file), shared=False, size=1 << 14, dtype=torch.float32)
    own = torch.zeros(1 << 14)
    assert moving.ram_of([nn.Parameter(mapped)]) == 0
    assert moving.ram_of([nn.Parameter(own), nn.Parameter(own[:8])]) == own.nbytes
    assert 0x7F0000000010 not in MappedFiles("7f0000000000-7f0000001000 rw-s 00000000 00:01 77 /memfd:x (deleted)\n")
    files = MappedFiles("".join(f"{n}000-{n}800 r--p 00000000 08:01 77 /a file\n" for n in range(1, 9)))
    assert [address in files for address in (0xFFF, 0x1000, 0x17FF, 0x1800, 0x8000, 0x8800)] == [
        *(False, True, True, False, True, False)
    ]


def made() -> tuple[nn.Sequential, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    return model, [parameter.detach().clone() for parameter in model.parameters()]


def check_whole(model: nn.Sequential, values: list[torch.Tensor]) -> None:
    """Ordinary, with its values; and it can be streamed after all."""
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), values, strict=True))
    given = torch.randn(4, 64)
    expected = model(given)
    expected.sum().backward()
    model.zero_grad()
    with stream(model, vram=100_000, device="cpu"):
        assert torch.equal(model(given), expected)


def after(count: int, then: Callable[[], Any]) -> Callable[..., Any]:
    """Moves so many units, then does something else."""
    real, moved = Moving.move, list[int]()

    def move(self: Moving, unit: Unit, image: torch.Tensor) -> None:
        moved.append(unit.index)
        if len(moved) == count:
            then()
        real(self, unit, image)

    return move


@pytest.mark.parametrize("count", [1, 4])
def test_ctrl_c_half_way_leaves_an_ordinary_model(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    model, values = made()
    with monkeypatch.context() as patch:
        patch.setattr(Moving, "move", after(count, interrupt))
        with pytest.raises(KeyboardInterrupt):
            Session(model, None, Settings(vram=100_000, device="cpu"))
    check_whole(model, values)


def test_ram_that_runs_out_half_way_leaves_an_ordinary_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where other tensors keep what was to be freed."""
    model, values = made()
    free = [0]  # less than the weights: they have room only as they are freed
    with monkeypatch.context() as patch:
        patch.setattr(moving, "host_available_bytes", lambda: free[0])
        patch.setattr(Moving, "move", after(4, lambda: free.__setitem__(0, 0)))
        model_bytes = sum(parameter.nbytes for parameter in model.parameters())
        free[0] = model_bytes // 2
        with pytest.raises(OutOfBudget, match="Drop other references to the weights"):
            Session(model, None, Settings(vram=100_000, device="cpu"))
    check_whole(model, values)


def test_weights_move_where_free_ram_is_less_than_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, values = made()
    half = sum(parameter.nbytes for parameter in model.parameters()) // 2
    with monkeypatch.context() as patch:
        patch.setattr("stormtorch.memory.books.limits.host_available_bytes", lambda: half)
        with stream(model, vram=100_000, ram=10 * half, device="cpu"):
            pass
    check_whole(model, values)


@pytest.mark.parametrize("allowed", [0, 2])
def test_pages_that_cannot_be_locked_half_way(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []

    class Some:
        def lock(self, address: int, _size: int) -> None:
            if len(locked) == allowed:
                raise StormError("CUDA_ERROR_OUT_OF_MEMORY")
            locked.append(address)

        def unlock(self, address: int) -> None:
            locked.remove(address)

    monkeypatch.setattr(host, "_REGION_AIM", 32_768)  # several regions
    monkeypatch.setattr("stormtorch.session.resources.page_lock_for", lambda _device: Some())
    model, values = made()
    given = torch.randn(4, 64)
    expected = model(given).detach()
    with torch.no_grad(), stream(model, vram=100_000, device="cpu"):
        assert torch.equal(model(given), expected)
    assert not locked
    monkeypatch.undo()
    check_whole(model, values)
