"""The errors that users see.

An error has four parts: what failed, the numbers, which setting set the limit, what to do.
"""

from __future__ import annotations


class StormError(Exception):
    """Base of every error that STORM raises on purpose. Catch this to catch them all."""


class SettingError(StormError, ValueError):
    """A value given by the user is not valid; the message lists what is accepted."""


class OutOfBudget(StormError, MemoryError):
    """A tier has no room for a reservation. Raised before anything is allocated, so nothing has to be undone."""

    def __init__(self, what: str, numbers: str, limit: str, remedy: str) -> None:
        super().__init__(f"{what} ({numbers}). {limit} {remedy}")
        self.what, self.numbers, self.limit, self.remedy = what, numbers, limit, remedy

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.numbers, self.limit, self.remedy)


class StorageError(StormError, OSError):
    """A file could not be read or written; names the file, the byte range and the cause. ``errno`` is set when
    known."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.args, {"errno": self.errno}


class CheckpointError(StormError):
    """A checkpoint or a folder of weights cannot be used: incomplete, damaged, or not one; names the file."""


class WrongModel(CheckpointError):
    """The files are whole, but for another model or optimizer: names, shapes or dtypes differ; lists the first few."""


class StaleGraph(StormError, RuntimeError):
    """A backward pass needs weights that have changed since its forward."""


class LaneError(StormError, RuntimeError):
    """Work queued on a lane or on the optimizer's worker failed; the cause is chained. Later work on it is refused."""


class InsideStep(StormError, RuntimeError):
    """A signal handler has interrupted a step, and asks for something that cannot be done in the middle of it. Set a
    flag in the handler, and act on it in the loop, after ``optimizer.step()``."""
