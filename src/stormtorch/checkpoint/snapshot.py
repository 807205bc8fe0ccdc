"""Keeps a snapshot of what is being saved, while training goes on.

A save names its *pieces*: tensors in home memory, by the unit that they belong to. From then on, code that is about to
change a unit calls `before_change`. It copies pieces that are not in their file yet, as far as the RAM budget has room,
and waits for the others to be written. The reader of a piece takes it with `lend`, which gives the copy if there is
one. Training sees the same numbers either way, and so does the file.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..core.errors import OutOfBudget
from ..core.tags import Tag, Tier
from ..memory.books.ledger import Ledger, Reservation
from ..streams.bridge.handlers import undisturbed


class Released(Exception):
    """The save was given up while a thread waited for one of its pieces. Never leaves the package."""


class Charge:
    """RAM for the copies of several pieces, given back with the last of them: ledgers are for dozens of entries."""

    def __init__(self, reservation: Reservation | None, pieces: int) -> None:
        self._reservation, self._pieces = reservation, pieces

    def end_one(self) -> None:
        self._pieces -= 1
        if self._pieces <= 0 and self._reservation is not None:
            self._reservation.release()


@dataclass(eq=False)
class Piece:
    """One tensor of a save. ``unit``: the index of the unit whose changes it must survive; None: it is not streamed.

    ``steady``: no optimizer step changes it, because it is frozen."""

    tensor: torch.Tensor
    unit: int | None = None
    steady: bool = False
    state: str = "waiting"  # "lent", "copying", "copied" or "done"
    charge: Charge | None = field(default=None, repr=False)


class Still:
    """The pieces of the running save, if there is one. Thread-safe; takes no other lock."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # The lock itself is entered: Ctrl-C may come inside of a condition's own __enter__. Re-entrant: another signal
        # may come too, whose handler writes a weight.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pieces: dict[int | None, list[Piece]] = {}  # by unit
        self.copied_bytes = 0  # of the last save

    def hold(self, pieces: Sequence[Piece]) -> None:
        """Protect these from changes until they are done."""
        by_unit: dict[int | None, list[Piece]] = {}
        for piece in pieces:
            by_unit.setdefault(piece.unit, []).append(piece)
        with self._lock:
            assert not self._pieces
            self.copied_bytes = 0
            self._pieces = by_unit

    def copy_loose(self, pieces: Sequence[Piece]) -> None:
        """Copy pieces that belong to no unit and may change unnoticed. Raises OutOfBudget if there is no room."""
        loose = [piece for piece in pieces if piece.unit is None]
        charge = self._room_for(loose)
        for piece in loose:
            piece.tensor, piece.charge, piece.state = _copy(piece.tensor), charge, "copied"

    def before_change(self, unit: int | None, *, by_step: bool = False) -> None:
        """Prepare for a change of the unit; with None, of anything. Copies its pieces, or waits until they are written.

        ``by_step``: an optimizer makes the change, so frozen pieces are safe."""
        if not self._pieces:  # nearly always
            return
        for key, group in list(self._pieces.items()):
            if unit in (None, key):
                self._set_free([piece for piece in group if not (by_step and piece.steady)])

    def _set_free(self, group: list[Piece]) -> None:
        waiting = [piece for piece in group if piece.state == "waiting"]
        try:
            charge = self._room_for(waiting)
        except OutOfBudget:
            waiting = []
        for piece in waiting:
            self._set_aside(piece, charge)
        with self._lock:
            self._changed.wait_for(lambda: all(piece.state in ("copied", "done") for piece in group))

    @undisturbed  # a handler that writes the same weight would wait for a copy that cannot go on
    def _set_aside(self, piece: Piece, charge: Charge) -> None:
        """Copy a piece, unless another thread has begun to copy or write it."""
        mine = False
        try:
            with self._lock:
                mine = piece.state == "waiting"
                if mine:
                    piece.state = "copying"
            copy = _copy(piece.tensor) if mine else None
            with self._lock:
                if copy is not None and piece.state == "copying":  # else the save is over
                    piece.tensor, piece.charge, piece.state = copy, charge, "copied"
                    self.copied_bytes += copy.nbytes
                else:
                    charge.end_one()
                self._changed.notify_all()
        except BaseException:  # out of memory, or Ctrl-C
            with self._lock:
                if mine and piece.state == "copying":
                    piece.state = "waiting"
                self._changed.notify_all()
            raise

    def _room_for(self, pieces: Sequence[Piece]) -> Charge:
        size = sum(piece.tensor.nbytes for piece in pieces)
        return Charge(self._ledger.reserve(Tier.HOST, Tag.CHECKPOINT, size) if size else None, len(pieces))

    @contextlib.contextmanager
    def lend(self, piece: Piece) -> Iterator[torch.Tensor]:
        """The piece with the values it had when it was held, for reading. Afterwards it is done, and its copy is
        released.

        Raises Released if the save was given up."""
        with self._lock:
            self._changed.wait_for(lambda: piece.state != "copying")
            if piece.state == "done":
                raise Released
            if piece.state == "waiting":
                piece.state = "lent"
        try:
            yield piece.tensor
        finally:
            with self._lock:
                _end(piece)
                self._changed.notify_all()

    def release(self, others: Sequence[Piece] = ()) -> None:
        """End the save, successful or not: everything may change. ``others``: pieces that perhaps were not held yet."""
        with self._lock:
            held, self._pieces = self._pieces, {}
            for group in (*held.values(), others):
                for piece in group:
                    _end(piece)
            self._changed.notify_all()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _end(piece: Piece) -> None:
    charge, piece.charge = piece.charge, None
    piece.state, piece.tensor = "done", _NOTHING
    if charge is not None:
        charge.end_one()


_NOTHING = torch.empty(0, dtype=torch.uint8)
