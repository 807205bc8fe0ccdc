"""Writes a checkpoint from home memory, on background threads."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
from functools import partial

from ...core.errors import StorageError
from ...core.notices import say_once
from ...core.sizes import format_bytes
from ...memory.disk.buffers import bytes_of
from ...memory.disk.calls import storage_errors
from ...memory.disk.mapped import FileTensor
from ...memory.disk.stored import StoredTensor
from ..content.parts import Content, TensorFile
from ..files import disk
from ..files.disk import FileWriter, Record, Stopped
from ..files.threads import run_all
from ..folders.manifest import describe_versions
from ..state.snapshot import Released, Still
from .draft import Draft

_NICE = 5
_OVERHEAD_BYTES = 1 << 20  # names, manifest, partial blocks


class Writing:
    """One running save. At its end it publishes or removes the draft, and releases the snapshot."""

    def __init__(self, content: Content, draft: Draft, still: Still) -> None:
        self._content, self._draft, self._still, self._process = content, draft, still, os.getpid()
        self._stop, self._ended, self._begun = threading.Event(), threading.Event(), False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="storm-save")  # not a daemon: a save outlives the script

    def start(self) -> None:
        self._begun = True
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread left
            self._begun = False
            raise

    def wait(self) -> None:
        """Block until the save has ended; raises its error, once. Ctrl-C cancels the save."""
        if os.getpid() != self._process:
            return  # forked: the save is the parent's
        try:
            while not self._ended.wait(1.0):
                pass
            self._thread.join()
        except BaseException:
            self.give_up()
            raise
        error, self._error = self._error, None
        if error is not None:
            atexit.unregister(self._report_at_exit)
            raise error

    def give_up(self) -> None:
        """Cancel the save and remove the draft. Blocks for a moment."""
        self._stop.set()
        self._still.release()
        while self._begun and not self._ended.wait(5.0) and self._thread.ident is not None:
            pass  # without an ident the thread never started: Ctrl-C came first
        self._error = None

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError):  # this thread, and those that it starts, yield to training
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self._write()
        except (Stopped, Released):
            pass
        except BaseException as error:
            self._error = _with_remedy(error, self._content)
            atexit.register(self._report_at_exit)
        finally:
            self._still.release()
            self._draft.discard()
            self._ended.set()

    def _report_at_exit(self) -> None:
        """Report an error that no call has raised, because the script ended without closing the session."""
        if self._error is not None and os.getpid() == self._process:
            say_once(f"A save in the background failed: {self._error}")

    def _write(self) -> None:
        folder, records = self._draft.path, dict[str, Record]()
        for name, data in self._content.small.items():
            records[name] = disk.write_file(folder / name, data)
        run_all([partial(self._write_tensors, file, records) for file in self._content.files], self._stop)
        self._draft.publish(self._content.step, records, describe_versions())

    def _write_tensors(self, file: TensorFile, records: dict[str, Record], stop: threading.Event) -> None:
        """Write a new file; borrows each piece while it writes it."""
        path = self._draft.path / file.name
        with storage_errors(f"create {path.parent}"):
            path.parent.mkdir(exist_ok=True)
        with FileWriter(path, stop) as writer:
            writer.write(file.header)
            for piece in file.pieces:
                with self._still.lend(piece) as tensor:
                    elsewhere = piece.stored or piece.in_file
                    if elsewhere is not None:
                        _copy(elsewhere, writer)
                        continue
                    writer.write(bytes_of(tensor.to("cpu").resolve_conj().resolve_neg().contiguous()))
            records[file.name] = writer.finish()


def _copy(stored: StoredTensor | FileTensor, writer: FileWriter) -> None:
    """Copy a tensor from one file to another."""
    buffer = memoryview(bytearray(min(disk.CHUNK, stored.nbytes)))
    for at in range(0, stored.nbytes, disk.CHUNK):
        part = buffer[: stored.nbytes - at]
        stored.read(part, at)
        writer.write(part)


def check_space(content: Content, draft: Draft) -> None:
    """Raise StorageError if the disk has no room for ``content``."""
    free = disk.CALLS.free_bytes(str(draft.path))
    needed = content.size + _OVERHEAD_BYTES
    if needed > free:
        error = StorageError(
            f"Cannot save to {draft.directory}: the checkpoint needs {format_bytes(needed)}, and "
            f"{format_bytes(free)} are free there. Free space, keep fewer checkpoints, or name a directory on another "
            f"disk.{_smaller_save(content)}"
        )
        error.errno = errno.ENOSPC
        raise error


def _smaller_save(content: Content) -> str:
    states = content.optimizer_bytes
    if not states:
        return ""
    return (
        f" The weights alone need {format_bytes(content.size - states)}: save(..., optimizer=False), or storm train "
        "--no-save-optimizer; the optimizer then starts again."
    )


def _with_remedy(error: BaseException, content: Content) -> BaseException:
    """If the disk filled up during the write, add a remedy to its error."""
    if not isinstance(error, StorageError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    longer = StorageError(f"{error}{_smaller_save(content)}")
    longer.errno, longer.__cause__ = error.errno, error.__cause__
    return longer
