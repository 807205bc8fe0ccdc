"""One case, in the process that runs it."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.models.build import build
from torch import nn

from stormtorch.core.tags import Tag

_FEW = 4  # tokens of accelerate that are measured: each takes seconds


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cpu" if options.tiny else "cuda")
    if case == "link":
        return {"bytes_per_s": _link(device)}
    if case.endswith("-no-cudnn"):
        torch.backends.cuda.enable_cudnn_sdp(False)
    model = _built(options.size, tiny=options.tiny)
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": sum(p.nbytes for p in model.parameters()),
    }
    import stormtorch  # noqa: F401  # before the peak of RSS begins

    if device.type == "cuda":
        torch.zeros(1, device=device)  # its context is not what streaming takes
    rss = _status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # the peak of RSS begins here
    began_s = time.perf_counter()
    if case.startswith("storm"):
        return found | _storm(model, device, options, rss, began_s)
    if case == "resident":
        model.to(device)
        warm, tokens = options.warm, options.tokens
    else:
        from accelerate import cpu_offload  # type: ignore[import-untyped]

        cpu_offload(model, execution_device=device)
        warm = min(2, options.warm)
        tokens = warm + _FEW
    found |= {"setup_s": time.perf_counter() - began_s, "setup_rss_bytes": _status("VmHWM:") - rss}
    clock = Clock(device, warm)
    answer = _generate(model, device, options.prompt, tokens, clock)
    return found | {"token_s": clock.token_s, "tokens": answer, "peak_bytes": clock.peak_bytes}


def _storm(
    model: nn.Module, device: torch.device, options: argparse.Namespace, rss: int, began_s: float
) -> dict[str, Any]:
    import stormtorch as storm

    with storm.stream(model, vram=options.vram, device=device) as session:
        found = {"setup_s": time.perf_counter() - began_s, "setup_rss_bytes": _status("VmHWM:") - rss}
        parts = session._parts

        def loaded() -> int:
            return int(parts.ground.recorder.snapshot().bytes.get(("load", Tag.PARAMETERS), 0))

        clock = Clock(device, options.warm, loaded)
        answer = _generate(model, device, options.prompt, options.tokens, clock)
        resident = sum(session.units[index].image_bytes for index in parts.parameters.residency.kept)
        print(session.report())
        return found | {
            "token_s": clock.token_s,
            "tokens": answer,
            "peak_bytes": clock.peak_bytes or parts.ground.pool.capacity_bytes,
            "vram_bytes": parts.tuning.limit_bytes,
            "not_resident_bytes": sum(unit.image_bytes for unit in session.units) - resident,
            "loaded_bytes": clock.loaded_bytes,
        }


def _built(size: str, *, tiny: bool) -> nn.Module:
    is_mixture = size.startswith("moe")
    if tiny:
        return build("tiny-moe" if is_mixture else "tiny-deep", dtype=torch.float32).eval()
    return build(size if is_mixture else f"llama-{size}", dtype=torch.bfloat16).eval()


class Clock:
    """A criterion of generate(), which never stops it and notes when each token was there."""

    def __init__(self, device: torch.device, warm: int, loaded: Any = lambda: 0) -> None:
        self._device, self._warm, self._loaded = device, warm, loaded
        self._at_s: list[float] = []
        self._loaded_before = self._loaded_after = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        del scores
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._at_s.append(time.perf_counter())
        self._loaded_after = self._loaded()
        if len(self._at_s) == self._warm:
            self._loaded_before = self._loaded_after
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    @property
    def token_s(self) -> float:
        return (self._at_s[-1] - self._at_s[self._warm - 1]) / (len(self._at_s) - self._warm)

    @property
    def loaded_bytes(self) -> float:
        return (self._loaded_after - self._loaded_before) / (len(self._at_s) - self._warm)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0


def _generate(model: Any, device: torch.device, prompt: int, tokens: int, clock: Clock) -> str:
    """What was generated, as a short sum: cases that agree show the same."""
    from transformers import StoppingCriteriaList

    vocabulary = model.config.vocab_size
    given = torch.randint(0, vocabulary, (1, prompt), generator=torch.Generator().manual_seed(1)).to(device)
    answer = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    first = answer[0, prompt : prompt + 4].tolist()  # of which every case generates as many
    return hashlib.sha256(str(first).encode()).hexdigest()[:8]


def _link(device: torch.device) -> float:
    if device.type == "cuda":
        from benchmarks.activations.link import measure_link

        return measure_link(device).in_bytes_per_s
    here, there = (torch.ones(16 << 20, dtype=torch.uint8) for _ in range(2))
    began_s = time.perf_counter()
    for _ in range(4):
        there.copy_(here)
    return 4 * here.nbytes / (time.perf_counter() - began_s)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
