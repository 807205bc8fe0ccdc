"""Law: with several ranks every way to a streamed model is refused, in one line, on each of them, and nothing hangs.

With one rank a wrapper gives plain PyTorch's numbers or is refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import timeit
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch.streams.bridge.ranks import refuse_ranks

from ..forkserver import Popen

SCRIPT = Path(__file__).with_name("rank.py")
WRAPPERS = ["DDP", "FSDP", "FSDP with the model's own parameters", "fully_shard", "fully_shard of a block"]
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)


def launch(ranks: int, folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What each rank has found; as torchrun starts them, but for a rendezvous in a file."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment["OMP_NUM_THREADS"] = "1"
    processes = [
        Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(rank), str(ranks), str(folder)],
            preload=("torch.distributed.fsdp",),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=580)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)
    return [tuple(json.loads((folder / f"rank-{rank}.json").read_text())) for rank in range(ranks)]


def wrappers(found: dict[str, Any]) -> list[str]:
    return WRAPPERS + ["accelerate"] * ("accelerate around" in found)


def test_two_ranks_and_one(tmp_path: Path) -> None:
    """One launch for both: importing takes longer than all that is tried."""
    for rank, (together, alone) in enumerate(launch(2, tmp_path)):
        check_two(together, f"rank {rank}")
        check_one(alone, f"rank {rank}, alone")


def check_two(found: dict[str, Any], who: str) -> None:
    refused = {"call", "step", "stream", *(["trainer"] if "trainer" in found else [])}
    for wrapper in wrappers(found):
        refused |= {f"{wrapper} around", f"{wrapper} inside"}
        assert found[f"{wrapper} around, closed"] == {"result": None}, f"{who}: {wrapper}"
    for name in sorted(refused):
        message = found[name].get("refused")
        assert message is not None, f"{who}: {name}: {found[name]}"
        assert "\n" not in message
        assert "2 ranks" in message or "FSDP" in message or name == "trainer", f"{who}: {name}: {message}"
    for mode in ("offload", "recompute"):
        assert "result" in found["offloaded: plain"], found["offloaded: plain"]
        assert found[f"offloaded: {mode}"] == found["offloaded: plain"], f"{who}: {mode}"
    assert found["call, alone again"] == {"result": found["plain"]}, f"{who}: after destroy_process_group"
    assert found["step, alone again"] == {"result": None}
    assert found["hooks left"] == 0


def check_one(found: dict[str, Any], who: str) -> None:
    for wrapper in wrappers(found):
        for how in ("around", "inside"):
            what = found[f"{wrapper} {how}"]
            if wrapper == "accelerate":
                assert what == {"result": found["plain"]}, f"{who}: {wrapper} {how}: {what}"
            else:
                assert "\n" not in what.get("refused", "\n"), f"{who}: {wrapper} {how}: {what}"
                assert wrapper.split()[0].replace("DDP", "DistributedDataParallel") in what["refused"]
        assert found[f"{wrapper} around, closed"] == {"result": None}
    assert found["call"] == {"result": found["plain"]}
    assert found["inside of DDP"] == found["plain"]
    assert found["hooks left"] == 0


def test_asking_costs_next_to_nothing() -> None:
    """It is asked at every call of a model."""
    took_s = min(timeit.repeat(refuse_ranks, number=1000, repeat=20)) / 1000
    assert took_s < 20e-6  # 0.2 µs on a quiet machine
