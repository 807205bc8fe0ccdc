"""What a session has decided: where everything lies, what runs where, and why. Pure data, in JSON both ways."""

from __future__ import annotations

import dataclasses
import enum
import json
import reprlib
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from .errors import SettingError
from .sizes import format_bytes, round_down
from .tags import Tier

VERSION = 3
_GRAIN = 512  # pools grow by whole grains
_GROUPS = 6  # of units that are alike, in the printed page


class Origin(enum.Enum):
    """What a choice rests on."""

    PLANNED = "planned"  # sizes and budgets, before the first step
    MEASURED = "measured"  # steps that have run
    FORCED = "forced"  # a setting of the user's


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One decision."""

    reason: str
    origin: Origin

    def _because(self) -> str:
        return f"{' '.join(self.reason.split())} ({self.origin.value})"


@dataclass(frozen=True, kw_only=True)
class Limit(Choice):
    """A budget: at most so many bytes."""

    limit_bytes: int

    def __str__(self) -> str:
        return f"at most {format_bytes(self.limit_bytes)}: {self._because()}"


@dataclass(frozen=True, kw_only=True)
class DiskUse(Choice):
    """Optimizer states and trained weights on disk, and frozen weights that remain in the model's own files.
    ``ram_bytes``: RAM through which all pass. ``limit_bytes``: of the states and trained weights."""

    limit_bytes: int
    states_bytes: int
    ram_bytes: int
    weights_bytes: int = 0  # frozen
    trained_bytes: int = 0  # weights that are trained, in scratch files

    def __str__(self) -> str:
        trained = f", {format_bytes(self.trained_bytes)} of trained weights" if self.trained_bytes else ""
        weights = f", {format_bytes(self.weights_bytes)} of frozen weights in their files" if self.weights_bytes else ""
        return (
            f"{format_bytes(self.states_bytes)} of optimizer states{trained}{weights}, through "
            f"{format_bytes(self.ram_bytes)} of RAM; at most {format_bytes(self.limit_bytes)}: {self._because()}"
        )


@dataclass(frozen=True, kw_only=True)
class Placement(Choice):
    """The pool on the device, through which weights, gradients and states pass, and its parts."""

    pool_bytes: int
    least_bytes: int  # the smallest pool that works
    whole_bytes: int  # the smallest pool that holds all weights, with the fixed part
    fixed_bytes: int  # the part for gradients on their way home
    adding_bytes: int = 0  # of that, the part that only accumulation needs
    bucket_bytes: int = 0  # the gradients of a unit that go home in one piece: larger ones go in parts
    kept_bytes: int = 0  # the part for optimizer states that stay
    passing_bytes: int = 0  # the part for states that pass through

    @property
    def is_whole(self) -> bool:
        """Whether all weights have room at once."""
        return self.pool_bytes - self.kept_bytes - self.passing_bytes >= round_down(self.whole_bytes, _GRAIN)

    def __str__(self) -> str:
        parts = (("gradients", self.fixed_bytes), ("states kept", self.kept_bytes), ("states", self.passing_bytes))
        of_it = "".join(f", {format_bytes(size)} of it for {name}" for name, size in parts if size)
        return f"{format_bytes(self.pool_bytes)} on the device{of_it}: {self._because()}"


@dataclass(frozen=True, kw_only=True)
class Division(Choice):
    """How the model is cut into units."""

    unit_bytes: int  # a block with more is split into its modules
    left_bytes: int  # parameters that are in no unit remain on the device

    def __str__(self) -> str:
        left = f"; {format_bytes(self.left_bytes)} not streamed, on the device" if self.left_bytes else ""
        return f"blocks above {format_bytes(self.unit_bytes)} are split: {self._because()}{left}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """The weights, gradients or states of a unit. ``bytes``: of their home. ``resident``: they have permanent room on
    the device too."""

    bytes: int
    home: Tier
    resident: bool


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Where a unit lies. ``gradients``: None if it is frozen; without bytes if they only pass through the ring.
    ``states``: None if it has none, or torch keeps them."""

    name: str
    weights: Part
    gradients: Part | None
    states: Part | None

    def _parts(self) -> dict[str, Part]:
        return {name: part for name, part in vars(self).items() if isinstance(part, Part)}


@dataclass(frozen=True, kw_only=True)
class GradientRing(Choice):
    """RAM through which the gradients of all units pass to their updates."""

    ring_bytes: int

    def __str__(self) -> str:
        return f"through a ring of {format_bytes(self.ring_bytes)} in RAM: {self._because()}"


@dataclass(frozen=True, kw_only=True)
class StepMode(Choice):
    """When the optimizer runs."""

    mode: Annotated[str, "forward", "backward", "serial"]

    def __str__(self) -> str:
        return f"{self.mode}: {self._because()}"


@dataclass(frozen=True, kw_only=True)
class OptimizerShare(Choice):
    """Where updates run. Units whose states are resident are updated on the device. Of the others, so is this share of
    those that backward does not update."""

    device_share: float

    def __str__(self) -> str:
        return self._because()


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block's activations between forward and backward. ``inputs_away``: it is recomputed from inputs in RAM."""

    kind: Annotated[str, "keep", "offload", "recompute"]
    inputs_away: bool
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Activations(Choice):
    """``blocks``: empty before the first plan, and where ``mode`` applies to all of them. ``outside``: what STORM does
    with tensors that are saved outside of blocks."""

    mode: Annotated[str, "auto", "keep", "offload", "recompute"]
    blocks: tuple[Block, ...]
    outside: Annotated[str, "keep", "offload"]

    def __str__(self) -> str:
        device, host = sum(block.device_bytes for block in self.blocks), sum(block.host_bytes for block in self.blocks)
        sizes = f"; {format_bytes(device)} on the device, {format_bytes(host)} in RAM" if self.blocks else ""
        return f"{self.mode}: {self._because()}{sizes}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan in force, as of the moment when it was asked for; ``str`` gives a page."""

    vram: Limit
    ram: Limit
    disk: DiskUse | None  # None: no directory was given
    pool: Placement
    division: Division
    units: tuple[UnitPlan, ...]
    gradients: GradientRing | None  # None: they remain until the step, in homes of their units
    step: StepMode | None  # None: there is no optimizer
    optimizer: OptimizerShare | None
    activations: Activations

    def to_json(self) -> str:
        data = {"version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(data, default=lambda item: item.value, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` has written. Raises SettingError for any other text."""
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise _refused(f"it is not JSON ({' '.join(str(error).split())})") from None
        version = data.pop("version", None) if isinstance(data, dict) else None
        if type(version) is not int or version != VERSION:
            raise _refused(f"its version is {reprlib.repr(version)}, and this STORM reads version {VERSION}")
        made: Plan = _read(cls, data, "plan")
        return made

    def __str__(self) -> str:
        rows: list[tuple[str, object]] = [
            ("vram", self.vram),
            ("ram", self.ram),
            ("disk", self.disk),
            ("pool", self.pool),
        ]
        rows += [("units", f"{len(self.units)}, {self.division}"), *(("", line) for line in _grouped(self.units))]
        rows += [("gradients", self.gradients)]
        rows += [("step", self.step), ("optimizer", self.optimizer), ("activations", self.activations)]
        return "\n".join(f"{name:<12}{row}" for name, row in rows if row is not None)


def _grouped(units: Iterable[UnitPlan]) -> list[str]:
    """A line for each group of units that are alike but for their names, the largest first."""
    groups: dict[tuple[object, ...], list[UnitPlan]] = {}
    for unit in units:
        groups.setdefault((unit.weights, unit.gradients, unit.states), []).append(unit)
    lines = []
    ordered = sorted(groups.values(), key=lambda group: -sum(unit.weights.bytes for unit in group))
    for group in ordered[:_GROUPS]:
        parts = group[0]._parts()
        sizes = ", ".join(f"{name} {format_bytes(part.bytes)}" for name, part in parts.items() if part.bytes)
        resident = " and ".join(name for name, part in parts.items() if part.resident)
        name = (f"{len(group)} like " if len(group) > 1 else "") + " ".join(group[0].name.split())
        homes = " and ".join(sorted({part.home.value for part in parts.values()}))
        lines.append(f"{name}: {sizes}; home: {homes}" + (f"; stay on the device: {resident}" if resident else ""))
    rest = sum(len(group) for group in ordered[_GROUPS:])
    return [*lines, f"and {rest} of other sizes"] if rest else lines


def _refused(problem: str) -> SettingError:
    return SettingError(f"This is not a plan: {problem}. Accepted: the text that Plan.to_json has made.")


_LEAVES: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (lambda value: type(value) is int and 0 <= value < 1 << 63, "a whole number of bytes"),
    float: (lambda value: type(value) in (int, float) and 0 <= value <= 1, "a share from 0 to 1"),
    bool: (lambda value: type(value) is bool, "true or false"),
    str: (lambda value: type(value) is str, "a text"),
}


def _read(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``, a type of the fields above."""
    form, inner = typing.get_origin(kind), typing.get_args(kind)
    if form is types.UnionType:
        return None if value is None else _read(inner[0], value, where)
    if dataclasses.is_dataclass(kind):
        return _read_object(kind, value, where)
    if form is tuple:
        is_right, expected = type(value) is list, "a list"
    elif form is Annotated or issubclass(kind, enum.Enum):
        words = inner[1:] if form is Annotated else [member.value for member in kind]
        is_right, expected = type(value) is str and value in words, f"one of {', '.join(words)}"
    else:
        is_right, expected = _LEAVES[kind][0](value), _LEAVES[kind][1]
    if not is_right:
        raise _refused(f"{where} is {reprlib.repr(value)}, not {expected}")
    if form is tuple:
        return tuple([_read(inner[0], item, f"{where}[{number}]") for number, item in enumerate(value)])
    return value if form is Annotated else kind(value)


def _read_object(kind: Any, value: Any, where: str) -> Any:
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    if type(value) is not dict:
        raise _refused(f"{where} is {reprlib.repr(value)}, not an object")
    if wrong := set(names) ^ set(value):
        name = min(wrong)
        raise _refused(f"{where} lacks {name}" if name in names else f"{where} has an unknown {reprlib.repr(name)}")
    return kind(**{name: _read(hints[name], value[name], f"{where}.{name}") for name in names})
