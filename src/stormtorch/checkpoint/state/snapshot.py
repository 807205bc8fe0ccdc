"""Keeps a snapshot of the state that a save writes, while training goes on.

A save registers its *pieces*: tensors in home memory, grouped by unit. From then on, code that is about to change a
unit calls `before_change`. That copies pieces which are not in their file yet, if the RAM budget has room, and waits
until the writer has written the others. The writer borrows a piece with `lend`, which gives the copy if there is one.
Neither training nor the file sees a difference.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ...core.errors import OutOfBudget
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger, Reservation
from ...memory.disk.mapped import FileTensor
from ...memory.disk.stored import StoredTensor
from ...streams.bridge.handlers import undisturbed


class Released(Exception):
    """The save was cancelled while a thread waited for one of its pieces. Never leaves the package."""


@dataclass(eq=False)
class Piece:
    """One tensor of a save. ``unit``: the index of the unit that holds it; None: it is not streamed.

    ``frozen``: no optimizer step changes it. ``stored``: it lies in a file, and is read from there; nothing copies it,
    so a change of its unit waits until it is written. ``in_file``: nothing changes it at all."""

    tensor: torch.Tensor
    unit: int | None = None
    frozen: bool = False
    stored: StoredTensor | None = None
    in_file: FileTensor | None = None
    state: str = "waiting"  # "lent", "copying", "copied" or "done"
    charge: Reservation | None = field(default=None, repr=False)  # of RAM for copies; the last piece to go ends it


class Still:
    """The pieces of the running save, if there is one. Thread-safe; takes no other lock."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Enter the lock, not the condition: Ctrl-C may come inside a condition's __enter__. Re-entrant: the handler of
        # another signal may write a weight.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pieces: dict[int | None, list[Piece]] = {}  # by unit
        self.copied_bytes = 0  # of the last save

    def hold(self, pieces: Sequence[Piece]) -> None:
        """Protect these from changes until they are written."""
        by_unit: dict[int | None, list[Piece]] = {}
        for piece in pieces:
            by_unit.setdefault(piece.unit, []).append(piece)
        with self._lock:
            assert not self._pieces
            self.copied_bytes = 0
            self._pieces = by_unit

    def copy_unstreamed(self, pieces: Sequence[Piece]) -> None:
        """Copy pieces that belong to no unit: they may change unnoticed. Raises OutOfBudget if there is no room."""
        unstreamed = [piece for piece in pieces if piece.unit is None]
        charge = self._reserve(unstreamed)
        for piece in unstreamed:
            piece.tensor, piece.charge, piece.state = _copy(piece.tensor), charge, "copied"

    def before_change(self, unit: int | None, *, by_step: bool = False) -> None:
        """Copy the unit's pieces, or wait until they are written. None: those of all units.

        ``by_step``: an optimizer makes the change, so frozen pieces are safe."""
        if not self._pieces:  # nearly always
            return
        for key, group in list(self._pieces.items()):
            if unit in (None, key):
                fixed = [piece for piece in group if piece.in_file is not None or (by_step and piece.frozen)]
                self._copy_or_wait([piece for piece in group if piece not in fixed])

    def _copy_or_wait(self, group: list[Piece]) -> None:
        waiting = [piece for piece in group if piece.state == "waiting" and piece.stored is None]
        try:
            charge = self._reserve(waiting)
        except OutOfBudget:
            waiting, charge = [], None
        for piece in waiting:
            self._copy_piece(piece, charge)
        del charge  # the pieces have it
        with self._lock:
            self._changed.wait_for(lambda: all(piece.state in ("copied", "done") for piece in group))

    @undisturbed  # a handler that writes the same weight would wait forever for this copy
    def _copy_piece(self, piece: Piece, charge: Reservation | None) -> None:
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
                self._changed.notify_all()
        except BaseException:  # out of memory, or Ctrl-C
            with self._lock:
                if mine and piece.state == "copying":
                    piece.state = "waiting"
                self._changed.notify_all()
            raise

    def _reserve(self, pieces: Sequence[Piece]) -> Reservation | None:
        """RAM for the copies of several pieces, as one entry: a ledger is made for dozens of them."""
        size = sum(piece.tensor.nbytes for piece in pieces)
        return self._ledger.reserve(Tier.HOST, Tag.CHECKPOINT, size) if size else None

    @contextlib.contextmanager
    def lend(self, piece: Piece) -> Iterator[torch.Tensor]:
        """Yield the piece, with the values that it had at ``hold``, for reading; then release its copy.

        Raises Released if the save was cancelled."""
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
        """End the save, successful or not: everything may change. ``others``: pieces that may not be held yet."""
        with self._lock:
            held, self._pieces = self._pieces, {}
            for group in (*held.values(), others):
                for piece in group:
                    _end(piece)
            self._changed.notify_all()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _end(piece: Piece) -> None:
    piece.state, piece.tensor, piece.charge = "done", _NOTHING, None


_NOTHING = torch.empty(0, dtype=torch.uint8)
