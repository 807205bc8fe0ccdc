"""What can be measured: a case is one method with its settings; a suite is the cases that are compared in one table.

Imports no torch: the process that starts the cases must not hold a GPU, and a peer's packages come before torch.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

METHODS = ("resident", "storm", "fsdp2", "ds3", "ramtorch", "ramtorch-bf16")
STEPS = ("backward", "forward", "serial")
ACTIVATIONS = ("auto", "offload", "recompute", "keep")


@dataclass(frozen=True, kw_only=True)
class Case:
    method: str
    size: str = "3b"
    micro_batch: int = 8
    step: str = "backward"  # when the optimizer runs; storm only
    vram: str = ""  # storm only; empty: its own choice
    activations: str = ""  # storm only; empty: the loop itself checkpoints each block, as for everybody else
    clip: bool = False
    device: str = "cuda"
    dtype: str = "bfloat16"  # of the arithmetic, and of the weights where the method does not keep them in fp32
    steps: int = 5
    warm_steps: int = 6  # by then STORM has settled what goes where; the same for everybody
    limit_s: float = 150

    @property
    def name(self) -> str:
        step = f"-{self.step}" if self.method == "storm" else ""
        activations = f"~{self.activations}" if self.activations else ""
        return f"{self.method}{step}{activations}{'+clip' if self.clip else ''}"

    @property
    def settings(self) -> str:
        return f"{self.name} {self.size} @{self.micro_batch}{f' vram={self.vram}' if self.vram else ''}"


def _storm(**settings: object) -> Case:
    return dataclasses.replace(Case(method="storm"), **settings)  # type: ignore[arg-type]


_PEERS = ("fsdp2", "ds3", "ramtorch")

SUITES: dict[str, tuple[Case, ...]] = {
    "main": (
        Case(method="resident"),
        _storm(vram="14GiB"),
        _storm(vram="14GiB", step="forward", clip=True),
        _storm(vram="8.9GiB"),  # the peak of the best of these peers
        *(Case(method=peer) for peer in _PEERS),
    ),
    "large": (
        Case(method="resident", micro_batch=32),
        _storm(vram="44GiB", micro_batch=32),
        _storm(vram="44GiB", micro_batch=32, step="forward"),
    ),
    "small": (
        Case(method="resident", micro_batch=2),
        _storm(vram="14GiB", micro_batch=2),
        *(Case(method=peer, micro_batch=2) for peer in ("fsdp2", "ramtorch")),
    ),
    "fits": (  # nothing has to be streamed: all of it ends up on the device
        Case(method="resident"),
        _storm(step="forward", clip=True),
        Case(method="resident", micro_batch=2),
        _storm(step="forward", clip=True, micro_batch=2),
    ),
    "arranged": (  # who sees to activations: the loop, which checkpoints each block, or STORM; once it has a plan
        *(_storm(vram="14GiB", activations=kind, warm_steps=9) for kind in ("", "auto")),
        *(
            _storm(vram="14GiB", step="forward", clip=True, activations=kind, warm_steps=9)
            for kind in ("", "auto", "recompute")
        ),
    ),
    "big": (
        _storm(vram="16GiB", size="7b"),
        *(Case(method=peer, size="7b", limit_s=150) for peer in _PEERS),
    ),
}

FORM = (
    f"a suite ({', '.join(SUITES)}) or METHOD[-STEP][~ACTIVATIONS][+clip][@MICRO_BATCH] with METHOD one of "
    f"{', '.join(METHODS)}; storm takes -STEP, one of {', '.join(STEPS)}, and ~ACTIVATIONS, one of "
    f"{', '.join(ACTIVATIONS)}"
)
_PATTERN = re.compile(
    rf"({'|'.join(sorted(METHODS, key=len, reverse=True))})(?:-(\w+))?(?:~(\w+))?(\+clip)?(?:@(\d+))?"
)


def parse(text: str) -> tuple[Case, ...]:
    """The cases that one word of the command line names."""
    if text in SUITES:
        return SUITES[text]
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"no such case: {text!r}. It is {FORM}.")
    method, step, activations, clip, micro_batch = match.groups()
    case = Case(method=method, clip=bool(clip))
    if step is not None or activations is not None:
        if method != "storm" or step not in (None, *STEPS) or activations not in (None, *ACTIVATIONS):
            raise ValueError(f"no such case: {text!r}. It is {FORM}.")
        case = dataclasses.replace(case, step=step or case.step, activations=activations or "")
    return (dataclasses.replace(case, micro_batch=int(micro_batch)) if micro_batch else case,)
