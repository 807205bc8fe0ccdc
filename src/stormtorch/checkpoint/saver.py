"""The steps of `Session.save` and `Session.load`, in order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..core.errors import OutOfBudget, StormError
from ..core.notices import say_once
from ..memory.disk.calls import storage_errors
from ..streams.bridge.handlers import handler_here, inside_step
from .content.parts import gather
from .content.pretrained import write_configs
from .folders import folder
from .loading.checkpoint import load_into
from .saving.draft import Draft, place_of
from .saving.writing import Writing, check_space
from .state.session_state import Durable

Directory = Path | str | os.PathLike[str]


class Saver:
    """Saves and loads one session's model and optimizer; knows the running save."""

    def __init__(self, model: nn.Module, durable: Durable, count_steps: Callable[[], int]) -> None:
        self._model, self._durable, self._count_steps = model, durable, count_steps
        self._steps_before = 0
        self._writing: Writing | None = None
        self._is_busy = False  # a signal handler may call save during a save
        self._damaged: str | None = None  # the checkpoint that was loaded only in part

    def save(
        self,
        directory: Directory,
        *,
        also: Mapping[str, Any] | None,
        files: Callable[[Path], None] | None,
        wait: bool,
        optimizer: bool = True,
    ) -> None:
        with self._exclusive("save"):
            self._durable.check_idle(loading=False)
            self._finish()
            if self._damaged is not None:
                raise StormError(
                    f"Cannot save: only a part of {self._damaged} was loaded. Load a whole checkpoint first."
                )
            durable = self._durable
            if durable.has_unused_gradients:
                say_once(
                    "A checkpoint holds no gradients. Some have not been used by a step: a run that resumes from this "
                    "checkpoint loses them. Save after optimizer.step()."
                )
            durable.settle()
            content = gather(self._model, durable, step=self.steps, also=also or {}, with_states=optimizer)
            pieces = content.pieces
            folder.sweep(place_of(directory).parent)
            draft = None
            try:
                draft = Draft(directory)
                draft.make()
                check_space(content, draft)
                self._write_beside(draft.path, files)
                if not wait:
                    try:
                        durable.still.copy_unstreamed(pieces)
                    except OutOfBudget:
                        wait = True
                self._writing = Writing(content, draft, durable.still)
                durable.still.hold(pieces)
                self._writing.start()
                if wait:
                    self._finish()
            except BaseException:
                writing, self._writing = self._writing, None
                if writing is not None:  # Ctrl-C came before its wait
                    writing.give_up()
                durable.still.release(pieces)
                if draft is not None:
                    draft.discard()
                raise

    def _write_beside(self, path: Path, files: Callable[[Path], None] | None) -> None:
        """Write the configs, and the files that user code adds."""
        with storage_errors(f"write files to {path}"):
            write_configs(self._model, path)
            if files is not None:
                files(path)

    @property
    def steps(self) -> int:
        """Optimizer steps, including those before the loaded checkpoint."""
        return self._steps_before + self._count_steps()

    def load(self, directory: Directory, *, also: Mapping[str, Any] | None) -> dict[str, Any]:
        with self._exclusive("load"):
            self._durable.check_idle(loading=True)
            self._finish()
            path = Path(directory)
            step, rest = load_into(self._model, self._durable, path, also or {}, self._begin_changing)
            self._damaged = None
            self._steps_before = step - self._count_steps()
            return rest

    def _begin_changing(self, path: Path) -> None:
        self._damaged = str(path)

    def finish(self) -> None:
        """Wait for a running save, if there is one, and raise its error."""
        with self._exclusive("wait for a save"):
            self._finish()

    @contextlib.contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        """Refuse a call from a signal handler that interrupted one of these methods: it would change its state."""
        if self._is_busy and handler_here():
            raise inside_step(what)
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    def _finish(self) -> None:
        if self._writing is not None:
            try:
                self._writing.wait()
            finally:
                self._writing = None
