"""Calls without gradients in a session without an optimizer: keeps as many weights on the device as ``vram`` allows.

The first calls run in the initial pool, and show how much memory activations take beside it. From then on the pool has
two parts: a block for each resident unit, and a *window* through which the other units pass, once in every call. Before
each call, and at each block in it, the memory that activations have left is compared with the known need of such a
call. A cache of keys and values grows with every token: units give their blocks back before ``vram`` is exceeded. A
call with larger inputs than any so far, or with gradients, gets the initial pool.

Which units are resident: first those of unusual size (embedding, head), so that those that pass are alike and fill the
window without gaps; then blocks spread evenly over the order of use, so that the link has work all the time. Of these
come first those that are read from files."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from ..core.errors import OutOfBudget
from ..core.plan import Choice, Origin
from ..core.sizes import MiB, format_bytes, round_up
from ..memory.cuda.allocator import return_cached
from ..memory.pools.pool import GRAIN
from ..streams.bridge.lock import locked
from ..streams.gradients.stream import GradientStream
from ..streams.units import placement as placing
from ..streams.units.partition import Partition
from ..streams.weights.stream import ParameterStream
from .online import Tuning

_GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, are spread evenly, however many
_MEASURED = 2  # calls of each size whose peak is measured by itself
_NEAR = 1.25  # inputs larger by up to this factor count as measured
_RECENT = 4  # calls whose needs bound the pool's growth
_REST, _LATE = 16, 3  # calls between two attempts to arrange the pool; calls in which resident units may be missing


@dataclass
class _Seen:
    """Calls with inputs of about one size: the largest size, and the bytes they took in addition."""

    size: int
    extra_bytes: int = 0
    calls: int = 0


class Inference:
    """Decides, before each call and within it, how large the pool is and which units are resident."""

    def __init__(
        self, tuning: Tuning, partition: Partition, parameters: ParameterStream, gradients: GradientStream
    ) -> None:
        """``tuning`` knows the device's memory. Without an optimizer it changes nothing."""
        self.lock = parameters.lock
        self._tuning, self._meter, self._pool = tuning, tuning.meter, tuning.pool
        self._initial_bytes, self._limit_bytes = self._pool.capacity_bytes, tuning.limit_bytes
        self._parameters, self._residency, self._gradients = parameters, parameters.residency, gradients
        self._residency.borrowers.append(self)
        self._entries = [[unit.index for unit in entry.units] for entry in partition.entries]
        self._sizes = [round_up(unit.image_bytes, GRAIN) for unit in partition.units]
        self._wanted = _by_worth(self._sizes, [unit.image_bytes - unit.home_bytes for unit in partition.units])
        by_rows = any(unit.row_bytes for unit in partition.units)
        self._passing = "the others are loaded in every call" + (", of experts those that it needs" if by_rows else "")
        self._is_active = sum(self._sizes) > self._initial_bytes
        self._window_bytes: int | None = None  # of the arranged pool; None: the initial pool is in use
        self._gave_way = False  # gradients needed the memory of resident units
        # Calls until the pool may be arranged again; those in which resident units were missing.
        self._rest = self._late = 0
        self._seen: dict[int, _Seen] = {}
        self._recent: deque[_Seen] = deque(maxlen=_RECENT)  # of the calls before
        self._begun_at = self._peak_at = 0  # bytes in use, and the peak, when the last call began
        self._is_fresh = False  # a call has begun, and none of its blocks has run

    @locked
    def begin(self, *, training: bool, whole: bool) -> None:
        """User code calls the model, or one of its modules alone; ``training``: gradients may follow."""
        if not self._is_active:
            return
        if whole:
            self._note_peak()
        self._is_fresh = whole and not training
        if training:
            self._recent.clear()
        if training or self._gave_way:
            self._restore()

    @locked
    def enter(self, given: Any) -> None:
        """A block is about to run with the arguments ``given``."""
        if not self._is_active or torch.is_grad_enabled():
            return
        if self._is_fresh:
            self._is_fresh = False
            self._prepare(_count(given))
        elif self._window_bytes is not None and self._meter is not None:
            over = self._used_bytes() - (self._limit_bytes - self._margin_bytes // 2)
            if over > 0:  # more than calls of this size have taken so far
                self._shrink(over + self._margin_bytes // 2)

    def end(self) -> None:
        """Control returns to user code, which may reset torch's peak."""
        if self._is_active:
            self._note_peak()

    @locked
    def give_way(self) -> bool:
        """Free memory of resident units for gradients, if a call without them computes some all the same; False if
        there was none."""
        if self._window_bytes is None:
            return False
        self._residency.kept = frozenset()
        for address, _ in self._pool.singles():
            self._residency.drop_at(address)
        given = sum(self._pool.give_back(address) for address, _ in self._pool.singles())
        self._gave_way = True
        if given:
            self._pool.grow(given)
        return bool(given)

    def _prepare(self, size: int) -> None:
        """Provide the memory that a call with inputs of ``size`` elements needs, before it takes it."""
        self._rest = max(0, self._rest - 1)
        extra = self._need_bytes(size)
        missing = 0 if extra is None else -self._spare_bytes(extra)
        is_short = missing > 0 and self._window_bytes is not None
        if extra is None or (is_short and self._shrink(missing) < missing):
            if self._pool.capacity_bytes > self._initial_bytes:
                self._restore()  # activations need at least as much as the initial pool leaves them
        elif not is_short:
            self._grow(self._spare_bytes(max([extra, *(seen.extra_bytes for seen in self._recent)])))
        step = 1 << max(0, size.bit_length() - 3)  # sizes of one class differ by less than a quarter
        seen = self._seen.setdefault(round_up(size, step), _Seen(size))
        if extra is not None and size > seen.size:
            seen.size, seen.extra_bytes = size, max(seen.extra_bytes, extra)
        self._recent.append(seen)
        seen.calls += 1
        if self._meter is not None:
            if seen.calls <= _MEASURED:
                self._meter.forget_peak()
            self._begun_at = self._used_bytes()
            self._peak_at = 0 if seen.calls <= _MEASURED else self._meter.peak()

    # --- what calls need

    def _need_bytes(self, size: int) -> int | None:
        """Bytes that a call of that size takes beyond those in use; None if only smaller ones have been seen."""
        most = 0
        for key in sorted(self._seen):
            seen = self._seen[key]
            most = max(most, seen.extra_bytes)
            if size <= seen.size * _NEAR:
                return most if size <= seen.size else round(most * size / seen.size)
        return None

    def _note_peak(self) -> None:
        """Note the peak after a call and the use of its results: it may exceed the known need."""
        if self._recent and self._meter is not None:
            peak = self._meter.peak()
            if peak > self._peak_at:
                extra = peak - self._tuning.foreign_bytes - self._begun_at
                self._recent[-1].extra_bytes = max(self._recent[-1].extra_bytes, extra)

    def _used_bytes(self) -> int:
        assert self._meter is not None
        return max(0, self._meter.allocated() - self._tuning.foreign_bytes)

    def _spare_bytes(self, extra: int) -> int:
        """Bytes of the budget left beside the pool if activations take ``extra`` more; below 0: too much is taken."""
        if self._meter is None:  # the device is RAM as well, and the pool has the whole budget
            return self._initial_bytes - self._pool.capacity_bytes
        lost = self._meter.lost(self._limit_bytes + self._tuning.foreign_bytes)
        return self._limit_bytes - self._used_bytes() - extra - max(self._margin_bytes, lost)

    @property
    def _margin_bytes(self) -> int:
        """Bytes left alone; less than in training, because units can be dropped within a call."""
        return min(placing.headroom(self._limit_bytes), max(64 * MiB, self._limit_bytes // 64))

    # --- the pool

    def _window_for(self, kept: Iterable[int]) -> int:
        """The bytes through which units that are not ``kept`` pass: one is used while the next is loaded."""
        stays = set(kept)
        passing = [[self._sizes[index] for index in entry if index not in stays] for entry in self._entries]
        sizes = [size for index, size in enumerate(self._sizes) if index not in stays]
        largest = max(sizes, default=0)
        gaps = largest if len(set(sizes)) > 1 else 0  # units of several sizes leave gaps between them
        return max((sum(entry) for entry in passing), default=0) + largest + gaps

    def _grow(self, spare: int) -> None:
        """Make more units resident, in ``spare`` bytes."""
        if self._meter is not None:
            spare = min(spare, self._meter.free() - self._margin_bytes)
        if self._window_bytes is None:
            if not self._rest:
                self._arrange(self._pool.capacity_bytes + max(0, spare))
            return
        kept = self._residency.kept
        self._late = self._late + 1 if any(not self._parameters.residences[index].is_current() for index in kept) else 0
        if self._late > _LATE:  # memory that user code held was in the way
            self._restore()
            self._rest = _REST
            return
        for index in self._wanted:  # activations take less than before
            if index not in kept and self._sizes[index] <= spare:
                try:
                    self._pool.grow(self._sizes[index], single=True)
                except OutOfBudget:
                    return
                spare -= self._sizes[index]
                self._residency.kept |= {index}

    def _arrange(self, capacity: int) -> None:
        """Divide the pool into a window and a block for each resident unit."""
        kept, taken = list[int](), 0
        for index in self._wanted:
            if taken + self._sizes[index] + self._window_for([*kept, index]) <= capacity:
                kept.append(index)
                taken += self._sizes[index]
        window, self._rest = self._window_for(kept), _REST
        if not kept:
            return
        self._residency.drop_all()
        self._gradients.return_buckets()
        if self._pool.taken_bytes:  # user code holds weights
            return
        self._pool.give_back()
        return_cached(self._pool.device)
        self._window_bytes, self._late = window, 0
        try:
            if window:
                self._pool.grow(window)
            for index in kept:
                self._pool.grow(self._sizes[index], single=True)
        except OutOfBudget:  # other programs have taken the memory meanwhile
            self._restore()
            return
        self._residency.kept = frozenset(kept)
        self._parameters.load_kept()

    def _shrink(self, size: int) -> int:
        """Give back blocks of resident units, at least ``size`` bytes if possible; returns the bytes given back."""
        given = 0
        for address, block_bytes in self._pool.singles():
            if given >= size:
                break
            kept = self._residency.kept
            alike = [index for index in self._wanted if index in kept and self._sizes[index] == block_bytes]
            if not alike or self._window_for(kept - {alike[-1]}) > (self._window_bytes or 0):
                continue
            dropped = self._residency.drop_at(address)
            gone = self._pool.give_back(address)
            if gone:
                self._residency.kept = kept - {dropped if dropped in kept else alike[-1]}
                given += gone
        return given

    def _restore(self) -> None:
        """Restore the initial pool."""
        if self._window_bytes is None:
            return
        self._residency.kept = frozenset()
        self._residency.drop_all()
        self._gradients.return_buckets()
        self._pool.give_back()
        return_cached(self._pool.device)
        missing = self._initial_bytes - self._pool.capacity_bytes  # user code may hold weights
        if missing > 0:
            self._pool.grow(missing)
        self._window_bytes, self._rest, self._gave_way = None, 0, False
        if self._meter is not None:
            self._meter.forget_peak()  # that of the larger pool, which says nothing about later calls

    @property
    def choice(self) -> Choice | None:
        """Why the pool is as it is; None: it is the initial one."""
        if self._window_bytes is None:
            return None
        kept = self._residency.kept
        size = sum(self._sizes[index] for index in kept)
        return Choice(
            reason=f"{len(kept)} of {len(self._sizes)} units are resident, {format_bytes(size)} of "
            f"{format_bytes(sum(self._sizes))}; " + ("gradients need the memory" if self._gave_way else self._passing),
            origin=Origin.MEASURED,
        )


def _by_worth(sizes: Sequence[int], file_bytes: Sequence[int]) -> list[int]:
    """All units, in the order in which they should become resident. ``file_bytes``: the part of each that is read from
    a file in every call, which takes longer than a load from RAM."""
    counts = Counter(sizes)
    usual = max(counts, key=lambda size: (size * counts[size], size), default=0)
    unusual = sorted((index for index, size in enumerate(sizes) if size != usual), key=lambda index: -sizes[index])
    alike = [index for index, size in enumerate(sizes) if size == usual]
    spread = sorted(range(len(alike)), key=lambda number: (not file_bytes[alike[number]], number * _GOLDEN % 1))
    return [*unusual, *(alike[number] for number in spread)]


def _count(given: Any) -> int:
    return sum(leaf.numel() for leaf in _pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))
