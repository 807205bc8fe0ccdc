"""Ctrl-C at a line of one's choice: for tests that press it at every line in turn."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Keyboard:
    """Presses Ctrl-C at line number ``at`` that is run in ``files`` (the ends of their paths); counts the lines."""

    def __init__(self, at: int, files: tuple[str, ...]) -> None:
        self.at, self.files, self.lines, self.where = at, files, 0, ""

    @property
    def was_pressed(self) -> bool:
        return bool(self.where)

    def during(self, action: Callable[[], object]) -> bool:
        """Whether the action came to its end."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            action()
        except KeyboardInterrupt:
            return False
        finally:
            sys.settrace(before)
        return True

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        # The interpreter looks for signals after calls and at the ends of loops: not at a "try", nor between the last
        # line of a "with" and its end, where a trace would see the line again.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith(("with ", "try:")):
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace
