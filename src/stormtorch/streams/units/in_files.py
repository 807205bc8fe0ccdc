"""Finds parameters that need no home in RAM, because a file has them: those that are mapped from one and not trained.

Which units leave them there is a matter of RAM: `choose`. They pass through a ring of RAM, whose size is set here, and
so do weights in scratch files (sizes.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ...core.notices import say_once
from ...core.sizes import MiB, round_up
from ...memory.disk.mapped import Mappings, Span, is_there, private_pages
from ..bridge.torch_private import has_plain_storage
from .unit import Unit, is_dense

_GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, are spread evenly, however many
_READ_BYTES, _PAGE = 8 * MiB, 4096
_LEAST_READS, _MOST_READS = 8, 64
_SLOTS_IN_ALL = 64  # slots are smaller where the weights in files would take fewer
_SPARE_PART = 4


@dataclass(frozen=True)
class InFiles:
    """Units whose frozen weights remain in the model's own files, and the ring through which these pass, and those in
    scratch files: so many slots, each for one read."""

    units: tuple[Unit, ...] = ()
    slots: int = 0
    slot_bytes: int = 0

    @property
    def ring_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def flags(self) -> int:
        """Two for each slot: a read has filled it; its bytes were copied."""
        return 2 * self.slots

    def home_bytes(self, unit: Unit) -> int:
        """The part of a unit's image that has its home in RAM."""
        return unit.file_at if unit in self.units else unit.image_bytes


def left_in_files(units: Sequence[Unit], spare_bytes: int = 0, *, scratch: Sequence[int] = ()) -> InFiles:
    """These units in files, and the bytes of others' weights in ``scratch`` files. Reads of 8 MiB are as fast as longer
    ones, and some must be under way while others are copied. A part of ``spare_bytes`` lets reads run ahead, by up to
    the largest unit twice."""
    sizes = [*(unit.image_bytes - unit.file_at for unit in units), *scratch]
    if not sizes:
        return InFiles()
    slot = min(_READ_BYTES, max(_PAGE, round_up(sum(sizes) // _SLOTS_IN_ALL, _PAGE)))
    ahead = min(-(-2 * max(sizes) // slot), _MOST_READS, spare_bytes // _SPARE_PART // slot)
    return InFiles(tuple(units), max(_LEAST_READS, ahead), slot)


def spans_of(parameters: Iterable[nn.Parameter], *, trained_too: bool) -> dict[int, Span]:
    """Where files have these parameters, by id: those that are views of a mapped file which no code has written to.
    ``trained_too``: no optimizer will write them, so also those that require gradients."""
    mappings, files = Mappings(), dict[str, bool]()
    found: dict[int, Span] = {}
    for parameter in parameters:
        if parameter.requires_grad and not trained_too:
            continue
        span = _span(parameter, mappings)
        if span is None:
            continue
        if span.path not in files:
            files[span.path] = is_there(span)
            if not files[span.path]:
                say_once(
                    f"Frozen weights from {span.path} get a home in RAM: that path does not lead to the file that is "
                    "mapped, or its file system does not tell.",
                    key="mapped elsewhere",
                )
        if files[span.path]:
            found[id(parameter)] = span
    return found


def _span(parameter: nn.Parameter, mappings: Mappings) -> Span | None:
    if type(parameter) is not nn.Parameter or parameter.device.type != "cpu" or not parameter.numel():
        return None
    if not has_plain_storage(parameter) or not is_dense(parameter):
        return None
    address = parameter.data_ptr()
    span = mappings.span(address, parameter.nbytes)
    if span is None:
        return None
    try:
        is_written = any(True for _ in private_pages(address, parameter.nbytes))
    except OSError as error:
        say_once(
            f"Frozen weights get a home in RAM: this system does not tell whether mapped memory was written ({error}).",
            key="no page table",
        )
        return None
    return None if is_written else span


def choose(units: Sequence[Unit], fits: Callable[[Sequence[Unit]], bool]) -> list[Unit]:
    """The fewest units whose frozen weights stay in files so that the rest ``fits``, evenly spread over the model; all
    that have some, if nothing fits."""
    some = [unit for unit in units if unit.file_at < unit.image_bytes]
    if not some or fits([]):
        return []
    spread = sorted(range(len(some)), key=lambda number: number * _GOLDEN % 1)
    least, most = 1, len(some)
    while least < most:
        middle = (least + most) // 2
        if fits([some[number] for number in spread[:middle]]):
            most = middle
        else:
            least = middle + 1
    return [some[number] for number in sorted(spread[:most])]
