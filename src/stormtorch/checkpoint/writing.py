"""Writes a checkpoint from home memory, on threads of its own; whoever wants to, waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from ..core.errors import StorageError
from ..core.sizes import format_bytes
from ..streams.still import Piece, Still
from . import disk
from .content import Content, TensorFile
from .disk import FileWriter, Record, Stopped
from .folder import Draft, describe_versions
from .tensor_files import bytes_of
from .threads import Task, run_all

_KEPT_FREE = 1 << 20  # names, manifest, blocks that are not full


class Writing:
    """One save under way. The draft is published or gone when it ends, and everything may change again."""

    def __init__(self, content: Content, draft: Draft, still: Still) -> None:
        self._content, self._draft, self._still = content, draft, still
        self._stop, self._ended, self._begun = threading.Event(), threading.Event(), False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="storm-save")  # no daemon: a save outlives the script

    def start(self) -> None:
        self._begun = True
        try:
            self._thread.start()
        except RuntimeError:  # no thread to be had
            self._begun = False
            raise

    def wait(self) -> None:
        """Block until it has ended; raises what went wrong. Ctrl-C gives it up."""
        try:
            while not self._ended.wait(1.0):
                pass
        except BaseException:
            self.give_up()
            raise
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def give_up(self) -> None:
        """End it early; the draft is removed. Blocks for a moment."""
        self._stop.set()
        while self._begun and not self._ended.wait(5.0) and self._thread.ident is not None:
            pass  # without a number it never came to life: Ctrl-C was quicker
        self._error = None

    def _run(self) -> None:
        try:
            self._write()
        except Stopped:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._still.release()
            self._draft.discard()
            self._ended.set()

    def _write(self) -> None:
        folder, records = self._draft.path, dict[str, Record]()
        for name, data in self._content.small.items():
            records[name] = disk.write_file(folder / name, data)
        tasks = [self._task(file, records) for file in self._content.files]
        run_all(tasks, self._stop)
        if self._stop.is_set():
            raise Stopped
        self._draft.publish(self._content.step, records, describe_versions())

    def _task(self, file: TensorFile, records: dict[str, Record]) -> Task:
        def task(stop: threading.Event) -> None:
            records[file.name] = write_tensors(self._draft.path / file.name, file, self._still.lend, stop)

        return task


def write_tensors(
    path: Path,
    file: TensorFile,
    lend: Callable[[Piece], contextlib.AbstractContextManager[object]],
    stop: threading.Event | None = None,
) -> Record:
    """A new file; each piece is borrowed while it is written."""
    path.parent.mkdir(exist_ok=True)
    with contextlib.closing(FileWriter(path, stop)) as writer:
        writer.write(file.header)
        for piece in file.pieces:
            with lend(piece):
                writer.write(bytes_of(piece.tensor.to("cpu").contiguous()))
        return writer.finish()


def check_space(content: Content, folder: Path) -> None:
    """Raise StorageError if the disk has no room for ``content``."""
    free = disk.CALLS.free_bytes(str(folder))
    needed = content.size + _KEPT_FREE
    if needed > free:
        error = StorageError(
            f"Cannot save to {folder.parent}: the checkpoint needs {format_bytes(needed)}, and "
            f"{format_bytes(free)} are free there. Free space, keep fewer checkpoints, or name a directory on another "
            "disk."
        )
        error.errno = 28  # ENOSPC
        raise error
