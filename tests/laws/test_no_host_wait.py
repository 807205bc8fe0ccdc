"""Law: in the steady loop the host only enqueues. A trace of it has no synchronize call and no blocking copy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import stormtorch as storm

from .models import LLAMA, Llama, adamw, on

# torch 2.11 warns once that a profiler keeps the present cycle only, which is what is wanted here.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*Profiler clears events")]

FIRST, LAST, STEPS = 3, 6, 8  # traced: the steps that are neither the first ones nor cut off at the end


def waits(run: Callable[[int], object], folder: Path) -> list[str]:
    """Names of all calls between the start of step FIRST and the end of step LAST on which the host waits."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for step in range(STEPS):
            with record_function(f"storm step {step}"):
                run(step)
        torch.cuda.synchronize()
    path = folder / "trace.json"
    trace.export_chrome_trace(str(path))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    marks = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    start, last = marks[f"storm step {FIRST}"]["ts"], marks[f"storm step {LAST}"]
    end = last["ts"] + last["dur"]
    runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and start <= e["ts"] <= end]
    assert runtime, "the trace has no calls at all"
    numbers = {event.get("args", {}).get("correlation") for event in runtime}
    found = [e["name"] for e in runtime if "Synchronize" in e["name"] or e["name"] in ("cudaMemcpy", "cudaMemset")]
    found += [
        event["name"]
        for event in events
        if event.get("cat") == "gpu_memcpy"
        and "Pageable" in event["name"]
        and event.get("args", {}).get("correlation") in numbers
    ]
    return found


def test_the_trace_shows_a_wait_where_there_is_one(tmp_path: Path) -> None:
    x = torch.randn(64, 64, device="cuda")
    assert waits(lambda _: (x @ x).sum().item(), tmp_path)
    assert waits(lambda _: torch.randn(64).to("cuda") @ x, tmp_path)
    assert not waits(lambda _: x @ x, tmp_path)


@pytest.mark.parametrize("mode", ["forward-clipped", "backward"])
def test_no_host_wait_where_all_of_it_fits(tmp_path: Path, mode: str) -> None:
    check("auto", tmp_path, mode, recompute=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("mode", ["forward", "forward-clipped", "forward-trainer", "forward-accumulated", "backward"])
def test_no_host_wait_in_the_steady_loop(tmp_path: Path, mode: str, recompute: bool, dtype: torch.dtype) -> None:
    check("32MiB", tmp_path, mode, recompute=recompute, dtype=dtype)


def test_no_host_wait_where_blocks_are_recomputed(tmp_path: Path) -> None:
    """Comparing the two runs of a block is left to the device."""
    check("32MiB", tmp_path, "forward", recompute=False, dtype=torch.bfloat16, activations="recompute")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_host_wait_when_the_share_changes(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device was to update is not left to the host, who would do it at once."""
    shares = itertools.cycle([1.0, 0.5, 0.0])
    monkeypatch.setattr("stormtorch.planner.online.device_share", lambda *_, **__: (next(shares), "said the test"))
    check("32MiB", tmp_path, "forward-clipped", recompute=False, dtype=dtype)


def check(
    vram: str, folder: Path, mode: str, *, recompute: bool, dtype: torch.dtype, activations: str = "auto"
) -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = Llama(blocks=12, width=256, recompute=recompute).to(dtype)
    optimizer = adamw(model)
    batches = [on(LLAMA.batch(number), device) for number in range(2 * STEPS)]
    step, _, extra = mode.partition("-")
    with storm.stream(model, optimizer, vram=vram, device=str(device), step=step, activations=activations) as session:

        def run(number: int) -> None:
            for part in range(2 if extra == "accumulated" else 1):
                LLAMA.loss(model, batches[2 * number + part]).backward()
            if extra in ("clipped", "trainer"):
                session.clip_grad_norm_(1.0)
            optimizer.step()
            (model if extra == "trainer" else optimizer).zero_grad()  # the former is what transformers' Trainer does

        found = waits(run, folder)
        adam = session._parts.adam
        assert adam is not None
        assert all((home.kept is not None) == (vram == "auto") for home in adam.homes)
    assert not found, f"{len(found)} waits: {sorted(set(found))}"
