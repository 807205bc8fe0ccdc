"""A file to try requests on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

import pytest

from stormtorch.memory.disk.files import File, FileOptions, owned
from stormtorch.native.library import library

needs_threads = pytest.mark.skipif(library() is None, reason="without the C library, a request is done when it is made")


def create_file(path: Path, size: int, **options: Unpack[FileOptions]) -> File:
    """A new file of ``size`` zero bytes, open like a scratch file, but with a name; it remains after ``close``."""
    with owned(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)) as raw:
        os.posix_fallocate(raw.fileno(), 0, size)
        return File(raw, str(path), where=path, size_bytes=size, writable=True, **options)
