"""What the laws about strangers' files share: files outside that must stay as they are, and code that must not run."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from stormtorch.core.errors import StormError

DEEP = "[" * 200_000
SPARSE_BYTES = 1 << 43  # more than any RAM, and nothing on the disk


class Outside:
    """A folder beside the stranger's, with files of the user's; nothing may touch it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.file = folder / "thesis.txt"
        self.file.write_text("years of work\n")
        self.empty = folder / "empty"
        self.empty.mkdir()
        self.ran = folder / "ran"

    def seen(self) -> dict[str, tuple[Any, ...]]:
        return {str(path): _look(path) for path in sorted([self.folder, *self.folder.rglob("*")])}


def _look(path: Path) -> tuple[Any, ...]:
    status = path.lstat()
    return status.st_mode, status.st_mtime_ns, status.st_ino, path.read_bytes() if path.is_file() else None


class Code:
    """Pickled, it is a call that leaves a file behind."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._canary),)


def pickled(outside: Outside, **more: Any) -> bytes:
    return pickle.dumps({"code": Code(outside.ran), **more})


def zipped(content: bytes) -> bytes:
    """A file as torch.save writes it, around any pickle."""
    import io

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


@contextmanager
def untouched(outside: Outside) -> Iterator[None]:
    """In here nothing outside changes, no code of a file runs, and no one is called."""
    before, path = outside.seen(), list(sys.path)
    called: list[object] = []

    def connect(_: object, address: object) -> NoReturn:
        called.append(address)
        raise OSError("the network is not to be used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        patch.setattr(socket.socket, "connect_ex", connect)
        patch.setattr(socket, "getaddrinfo", connect)
        patch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
        yield
    assert not outside.ran.exists(), "code of a stranger's file has run"
    assert outside.seen() == before
    assert not called
    assert sys.path == path


def refused(attempt: Callable[[], object], words: str = "") -> str:
    """The attempt raises one of our errors, in one line that holds ``words``; returns it."""
    try:
        found = attempt()
    except StormError as error:
        said = str(error)
    else:
        raise AssertionError(f"nothing was raised: {found!r}")
    assert "\n" not in said
    assert 20 < len(said) < 1200, said
    assert words in said, said
    return said


def sparse(path: Path, size: int = SPARSE_BYTES) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def make_pipe(path: Path) -> None:
    """Where a file was, or is expected."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link_to(path: Path, target: Path) -> None:
    """A link to ``target`` where a file was, or is expected."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


def tensor_file(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file with a header of one's own: bytes, or what is written as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def sign(folder: Path, **changes: Any) -> None:
    """Make the manifest of a checkpoint fit its files again: a stranger knows what a sum is."""
    path = folder / "storm" / "manifest.json"
    manifest = json.loads(path.read_text())
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != path]
    manifest["files"] = {str(file.relative_to(folder)): _record(file) for file in files}
    path.write_text(json.dumps(manifest | changes))


def _record(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "storm" / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def flip(path: Path, at: int = -1) -> None:
    """Another byte, at the same time as far as anyone can see."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
