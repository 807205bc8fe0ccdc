"""What is measured: a group is the cases that are compared in one table.

Imports no torch: the process that starts the cases must not hold a GPU, and a peer's packages come before torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.training.cases import Case

OURS = ("resident", "storm-auto", "storm-offload", "storm")  # a run in which one of these fails has failed


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A case of a group. ``at_peak_of`` names the method whose measured peak becomes this case's ``vram``."""

    case: Case
    at_peak_of: str = ""


def _all(*methods: str, template: Case) -> tuple[Planned, ...]:
    return tuple(Planned(case=replace(template, method=method)) for method in methods)


_PLAIN = Case(method="")
_LONG = Case(method="", size="3b-32k", micro_batch=1, limit_s=240)
_FP32 = Case(method="", size="3b-8-layers", micro_batch=4, dtype="float32")  # about a second a step on an H200
_WIDE = Case(method="", size="wide", micro_batch=2)
_BUDGET = Case(method="", vram="8GiB", limit_s=240)

GROUPS: dict[str, tuple[Planned, ...]] = {
    # Forward and backward, weights resident: what each way to hold activations costs and saves.
    "forward_backward": (
        *_all(
            "resident", "checkpoint", "save_on_cpu", "trl", "trl-checkpoint", "storm-auto", "storm-offload",
            template=_PLAIN,
        ),
        Planned(case=replace(_PLAIN, method="storm-auto"), at_peak_of="trl"),
    ),
    # The same at one sequence of 32768 tokens.
    "long": (
        *_all("resident", "checkpoint", "trl", "trl-checkpoint", template=_LONG),
        Planned(case=replace(_LONG, method="storm-auto"), at_peak_of="checkpoint"),
    ),
    # Arithmetic slow enough for the link to hide everything.
    # The limit is there to make it small what may stay on the device: without one, most would.
    "fp32": (
        *_all("resident", template=_FP32),
        Planned(case=replace(_FP32, method="storm-offload", vram="12GiB")),
    ),
    # The same in bf16, by width.
    "wide": (
        *_all("resident", template=_WIDE),
        Planned(case=replace(_WIDE, method="storm-offload", vram="80GiB")),
    ),
    # Whole training steps, parameters streamed too, within an enforced limit: the largest micro-batch of each.
    "budget": _all("storm", "fsdp2", "ds3", "ramtorch", "ramtorch-offload", template=_BUDGET),
}  # fmt: skip

SEARCHED = ("budget",)  # groups in which the micro-batch is the first one to try, and ``limit_s`` is for all tries


def tiny(planned: Planned) -> Planned:
    """The same case in seconds on a CPU: shows that it runs, not how fast."""
    case = planned.case
    small = replace(
        case,
        size="tiny-wide" if case.size == "wide" else case.size.replace("3b", "tiny"),
        micro_batch=1,
        vram="256MiB" if case.vram or planned.at_peak_of else "",
        device="cpu",
        dtype="float32",
        steps=2,
        warm_steps=1,
    )
    return Planned(case=small)
