"""What can be measured: a case is a model, a shape of batches and a method. Imports no torch."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

MASTERED = "resident-masters"  # clips in its optimizer, in fp32
MASTERS = (MASTERED, "storm", "storm-backward", "fsdp2")  # update in fp32; the others in the weights' dtype
RESIDENT = ("resident", "resident-checkpoint", MASTERED)
WARM = {"storm": 12, "storm-backward": 12}  # then STORM waits on until its plans have settled
UNCLIPPED = ("storm-backward",)  # weights are updated before the norm of all gradients is known
_TRAINING = (*RESIDENT, "storm", "storm-backward", "fsdp2")
_ADAPTERS = ("resident", "resident-checkpoint", "storm", "storm-backward", "fsdp2")  # trained in fp32 as they are
_GENERATION = ("resident", "storm", "accelerate")
METHODS = (*_TRAINING, "accelerate")


@dataclass(frozen=True, kw_only=True)
class Model:
    config: str  # build.py
    tiny: str
    methods: tuple[str, ...] = _TRAINING
    shapes: tuple[str, ...] = ("8x1024", "16x1024")  # rows x tokens of a batch; for generation: of the prompt
    tiny_shape: str = "2x16"
    vram: tuple[str, str] = ("12GiB", "24GiB")  # for shapes of up to 8,192 tokens, and for larger ones
    tiny_vram: str = "2MiB"
    limit_s: float = 100


MODELS = {
    "llama-2b": Model(config="llama-2b", tiny="tiny"),
    "qwen-1b": Model(config="qwen-1b", tiny="tiny-qwen"),
    "moe-2b": Model(config="moe-2b", tiny="tiny-moe"),
    "moe-loop-2b": Model(config="moe-loop-2b", tiny="tiny-moe-loop", limit_s=150),
    "vit-2b": Model(config="vit-2b", tiny="tiny-vit"),
    "dit-2b": Model(config="dit-2b", tiny="tiny-dit"),
    "lora-7b": Model(config="llama-7b", tiny="tiny", methods=_ADAPTERS, limit_s=200),
    "lora-moe-30b": Model(
        config="moe-30b", tiny="tiny-moe", methods=_ADAPTERS, shapes=("8x1024",), vram=("12GiB", "24GiB"), limit_s=400
    ),
    "generate-7b": Model(
        config="llama-7b", tiny="tiny-deep", methods=_GENERATION, shapes=("1x64",), tiny_shape="1x8",
        vram=("6GiB", "6GiB"), tiny_vram="4MiB",
    ),
    "generate-moe-30b": Model(
        config="moe-30b", tiny="tiny-moe", methods=_GENERATION, shapes=("1x64",), tiny_shape="1x8",
        vram=("12GiB", "12GiB"), tiny_vram="4MiB", limit_s=400,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    method: str
    rows: int
    sequence: int
    vram: str
    steps: int = 10  # measured ones; for generation: tokens
    warm: int = 4  # steps before those, at least
    limit_s: float = 100
    device: str = "cuda"
    tiny: bool = False

    @property
    def config(self) -> str:
        return MODELS[self.model].tiny if self.tiny else MODELS[self.model].config

    @property
    def generates(self) -> bool:
        return MODELS[self.model].methods is _GENERATION

    @property
    def adapts(self) -> bool:
        """Trains low-rank adapters (LoRA) and nothing else."""
        return MODELS[self.model].methods is _ADAPTERS

    @property
    def streams(self) -> bool:
        return self.method.startswith("storm")

    @property
    def dtype(self) -> str:
        return "float32" if self.device == "cpu" else "bfloat16"  # many a CPU takes minutes for bf16

    @property
    def tokens(self) -> int:
        """Of a step."""
        return 1 if self.generates else self.rows * self.sequence

    @property
    def updates(self) -> str:
        """The dtype in which parameters are updated: losses of two methods can only agree if theirs agree."""
        return "float32" if self.adapts or self.method in MASTERS else self.dtype

    @property
    def shape(self) -> str:
        return f"{self.rows}x{self.sequence}"

    @property
    def settings(self) -> str:
        return f"{self.model} {self.shape} {self.method}{f' vram={self.vram}' if self.streams else ''}"


FORM = f"MODEL[:ROWSxTOKENS], with MODEL one of {', '.join(MODELS)}"


def parse(text: str, *, methods: tuple[str, ...] = (), vram: str = "", tiny: bool = False) -> list[Case]:
    """The cases that one word of the command line names, resident ones first. ``methods``: only these; ``vram``: in
    place of the model's own budgets."""
    match = re.fullmatch(r"([\w-]+)(?::(\d+x\d+))?", text)
    if match is None or match[1] not in MODELS:
        raise ValueError(f"no such case: {text!r}. It is {FORM}.")
    model = MODELS[match[1]]
    shapes = (match[2],) if match[2] else (model.tiny_shape,) if tiny else model.shapes
    found = []
    for shape in shapes:
        rows, sequence = (int(word) for word in shape.split("x"))
        own = model.tiny_vram if tiny else model.vram[rows * sequence > 8192]
        found += [
            Case(
                model=match[1], method=method, rows=rows, sequence=sequence,
                vram=(vram or own) if method.startswith("storm") else "",
                warm=12 if model.methods is _GENERATION else WARM.get(method, Case.warm), limit_s=model.limit_s,
                tiny=tiny,
            )
            for method in model.methods
            if not methods or method in methods
        ]  # fmt: skip
    return found


def given(case: Case, **settings: object) -> Case:
    """The case with those settings that are not None."""
    return dataclasses.replace(case, **{name: value for name, value in settings.items() if value is not None})  # type: ignore[arg-type]
