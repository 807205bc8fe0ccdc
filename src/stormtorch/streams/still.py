"""Keeps what is being saved as it was, while training goes on.

A save names its *pieces*: tensors in home memory, by the unit that they belong to. From then on whoever is about to
change a unit calls `before_change`. Pieces that are not in their file yet are then copied, as far as the budget for RAM
has room, and waited for where it has none. The reader of a piece takes it with `lend`, which gives the copy where there
is one. Training sees the same numbers either way, and so does the file.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..core.errors import OutOfBudget
from ..core.tags import Tag, Tier
from ..memory.ledger import Ledger, Reservation


@dataclass(eq=False)
class Piece:
    """One tensor of a save. ``unit``: the index of the unit whose changes it must survive; None: it is not streamed."""

    tensor: torch.Tensor
    unit: int | None = None
    state: str = "waiting"  # "lent", "copying", "copied" or "done"
    charge: Reservation | None = field(default=None, repr=False)


class Still:
    """The pieces of the save that is under way, if there is one. Thread-safe; takes no other lock."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changed = threading.Condition()
        self._pieces: dict[int | None, list[Piece]] = {}  # by unit
        self.copied_bytes = 0  # of the last save

    def hold(self, pieces: Sequence[Piece]) -> None:
        """Let nobody change these until they are done."""
        with self._changed:
            assert not self._pieces
            self.copied_bytes = 0
            for piece in pieces:
                self._pieces.setdefault(piece.unit, []).append(piece)

    def copy_loose(self, pieces: Sequence[Piece]) -> None:
        """Copy what belongs to no unit, and may change unseen. Raises OutOfBudget where there is no room."""
        for piece in pieces:
            if piece.unit is None:
                piece.charge = self._ledger.reserve(Tier.HOST, Tag.CHECKPOINT, piece.tensor.nbytes)
                piece.tensor, piece.state = piece.tensor.detach().to("cpu", copy=True), "copied"

    def before_change(self, unit: int | None) -> None:
        """The unit is about to change; with None, anything may. Copies, or waits, until that does no harm."""
        if not self._pieces:  # nearly always
            return
        for piece in [p for key, group in list(self._pieces.items()) if unit in (None, key) for p in group]:
            self._set_free(piece)

    def _set_free(self, piece: Piece) -> None:
        with self._changed:
            if piece.state == "waiting":
                try:
                    piece.charge = self._ledger.reserve(Tier.HOST, Tag.CHECKPOINT, piece.tensor.nbytes)
                    piece.state = "copying"
                except OutOfBudget:
                    pass
            if piece.state != "copying":
                self._changed.wait_for(lambda: piece.state in ("copied", "done"))
                return
        copy = None
        try:
            copy = piece.tensor.clone(memory_format=torch.preserve_format)
        finally:
            with self._changed:
                if copy is not None:
                    piece.tensor, piece.state = copy, "copied"
                    self.copied_bytes += copy.nbytes
                else:  # no memory, or Ctrl-C
                    self._uncharge(piece)
                    piece.state = "waiting"
                self._changed.notify_all()

    @contextlib.contextmanager
    def lend(self, piece: Piece) -> Iterator[torch.Tensor]:
        """The piece as it was when it was held, to read. It is done afterwards, and so is the copy."""
        with self._changed:
            self._changed.wait_for(lambda: piece.state in ("waiting", "copied"))
            was_copied = piece.state == "copied"
            if not was_copied:
                piece.state = "lent"
        try:
            yield piece.tensor
        finally:
            with self._changed:
                piece.state = "done"
                piece.tensor = _NOTHING
                self._uncharge(piece)
                self._changed.notify_all()

    def release(self) -> None:
        """The save is over, well or not: everything may change."""
        with self._changed:
            pieces, self._pieces = self._pieces, {}
            for group in pieces.values():
                for piece in group:
                    piece.state, piece.tensor = "done", _NOTHING
                    self._uncharge(piece)
            self._changed.notify_all()

    def _uncharge(self, piece: Piece) -> None:
        if piece.charge is not None:
            piece.charge.release()
            piece.charge = None


_NOTHING = torch.empty(0, dtype=torch.uint8)
