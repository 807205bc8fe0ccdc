"""A cache of prepared arrays: written under another name and renamed, like checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...checkpoint.files.disk import sync_folder
from ...checkpoint.folders.folder import beside, lock
from ...memory.disk.contained import inside, parse_json, read_small, replace_file

_DIGESTS = "digests.cache"  # not the name of a data file: the cache may be in a directory of data


@contextmanager
def being_written(cache: Path, name: str) -> Iterator[Path]:
    """Yield a directory, which becomes ``cache/name`` when the block succeeds, and is removed otherwise.

    It has the name and the lock of a checkpoint's draft: the sweep of checkpoints removes what a killed process left.
    """
    directory = beside(cache / name, "writing")
    directory.mkdir()
    held = lock(directory)
    try:
        yield directory
        sync_folder(directory)
        try:
            directory.rename(cache / name)
        except OSError:
            if not (cache / name).is_dir():  # else another process made the same in the meantime
                raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if held is not None:
            os.close(held)


def digest_of(files: Sequence[Path], cache: Path) -> list[str]:
    """A hash of each file's content. Reads a file again only if its size, time or inode changed."""
    try:
        known = parse_json(read_small(inside(cache, _DIGESTS)))
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    found: dict[str, list[object]] = {}
    digests = []
    for file in files:
        status = file.stat()
        mark = [status.st_size, status.st_mtime_ns, status.st_ino]
        before = known.get(str(file.resolve()))
        if isinstance(before, list) and before[:-1] == mark:
            digest = str(before[-1])
        else:
            with file.open("rb", buffering=0) as stream:
                digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        found[str(file.resolve())] = [*mark, digest]
        digests.append(digest)
    if any(known.get(name) != value for name, value in found.items()):
        replace_file(cache / _DIGESTS, json.dumps(known | found))
    return digests
