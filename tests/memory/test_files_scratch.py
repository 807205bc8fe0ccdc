"""Scratch files: charged before they exist, divided into extents, gone with the process."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch.core.budget import Budget
from stormtorch.core.errors import OutOfBudget, SettingError, StorageError
from stormtorch.core.sizes import MiB, round_up
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.disk.calls import SystemCalls
from stormtorch.memory.disk.scratch import FileExtent, ScratchFile, create_scratch

from ..forkserver import Popen
from .made import needs_threads

REAL = SystemCalls()


def aligned(size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]


def noise(size: int, seed: int) -> torch.Tensor:
    content = bytearray(random.Random(seed).randbytes(max(size, 1)))
    return aligned(size).copy_(torch.frombuffer(content, dtype=torch.uint8)[:size])


def open_ledger(limit: int = 64 * MiB) -> Ledger:
    return Ledger(Budget(tier=Tier.DISK, limit_bytes=limit, given="disk='test'"))


def scratch(directory: Path, size: int, **options: object) -> ScratchFile:
    return create_scratch(directory, size, ledger=open_ledger(), tag=Tag.OPTIMIZER, **options)  # type: ignore[arg-type]


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_the_ledger_refuses_before_a_file_exists(tmp_path: Path) -> None:
    opened: list[str] = []

    def record(path: str) -> int:
        opened.append(path)
        return REAL.open_unnamed(path)

    ledger = open_ledger(MiB)
    with pytest.raises(OutOfBudget, match=r"2\.0 MiB on the disk for OPTIMIZER"):
        create_scratch(tmp_path, 2 * MiB, ledger=ledger, tag=Tag.OPTIMIZER, calls=SystemCalls(open_unnamed=record))
    assert not opened
    with create_scratch(tmp_path, MiB, ledger=ledger, tag=Tag.OPTIMIZER, calls=SystemCalls(open_unnamed=record)):
        assert opened


def test_the_charge_is_the_space_on_disk_until_close(tmp_path: Path) -> None:
    ledger = open_ledger()
    fds: list[int] = []

    def record(path: str) -> int:
        fds.append(REAL.open_unnamed(path))
        return fds[-1]

    file = create_scratch(tmp_path, MiB + 1, ledger=ledger, tag=Tag.OPTIMIZER, calls=SystemCalls(open_unnamed=record))
    assert ledger.used_bytes(Tier.DISK) == file.size_bytes == MiB + 4096
    assert os.fstat(fds[0]).st_blocks * 512 >= MiB + 4096, "not preallocated"
    file.close()
    file.close()
    assert ledger.used_bytes(Tier.DISK) == 0
    ledger.check()


def test_the_charge_of_a_forgotten_file_goes_back_with_its_descriptor(tmp_path: Path) -> None:
    ledger = open_ledger()
    file = create_scratch(tmp_path, MiB, ledger=ledger, tag=Tag.OPTIMIZER)
    extent = file.take(4096)
    extent.write(aligned(4096))
    with pytest.warns(ResourceWarning, match="unclosed file"):
        del file, extent  # no cycle: the file must not wait for the garbage collector
    assert ledger.used_bytes(Tier.DISK) == 0
    ledger.check()


@needs_threads
def test_a_forgotten_file_is_charged_as_long_as_a_request_holds_it(tmp_path: Path) -> None:
    opened, arrived, armed = threading.Event(), threading.Event(), False

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        if armed:
            arrived.set()
            assert opened.wait(300)
        return REAL.pwrite(fd, view, offset)

    ledger = open_ledger()
    file = create_scratch(tmp_path, MiB, ledger=ledger, tag=Tag.OPTIMIZER, calls=SystemCalls(pwrite=pwrite))
    armed = True
    future = file.pwrite(aligned(4096), 0)
    assert arrived.wait(300)
    del file
    gc.collect()
    assert ledger.used_bytes(Tier.DISK) == MiB

    deadline = time.perf_counter() + 300

    def finish() -> None:
        opened.set()
        assert future.result() == 4096
        while not recorded and time.perf_counter() < deadline:
            time.sleep(0.01)  # the pool's thread drops the request, and with it the last reference

    with pytest.warns(ResourceWarning, match="unclosed file") as recorded:
        finish()
    recorded.clear()  # they hold the file
    while ledger.used_bytes(Tier.DISK) and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert ledger.used_bytes(Tier.DISK) == 0


# --- extents ----------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(sizes=st.lists(st.integers(0, 60_000), max_size=25), buffered=st.booleans())
def test_extents_keep_their_content(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], buffered: bool) -> None:
    live: list[tuple[FileExtent, torch.Tensor]] = []
    directory = tmp_path_factory.mktemp("extents")
    with scratch(directory, 256 * 1024, direct=False if buffered else "auto", block_bytes=8192) as file:
        for seed, size in enumerate(sizes):
            try:
                extent = file.take(size)
            except OutOfBudget:
                assert round_up(size, 4096) > file.free_bytes
                continue
            content = noise(size, seed)
            extent.write(content)
            live.append((extent, content))
            assert extent.offset % 4096 == 0
            taken = sum(round_up(extent.size_bytes, 4096) for extent, _ in live)
            assert file.free_bytes == file.size_bytes - taken
        for extent, content in live:
            back = aligned(extent.size_bytes)
            assert extent.read(back) == extent.size_bytes
            assert torch.equal(back, content)


def test_a_full_file_says_how_full(tmp_path: Path) -> None:
    with scratch(tmp_path, 4 * 4096) as file:
        for size in (4096, 8192, 1):
            file.take(size)
        with pytest.raises(OutOfBudget, match=r"16.0 KiB of 16.0 KiB taken\)"):
            file.take(1)


def test_extents_of_a_closed_file_are_refused(tmp_path: Path) -> None:
    file = scratch(tmp_path, 8192)
    extent = file.take(4096)
    file.close()
    with pytest.raises(StorageError, match="is closed"):
        extent.read(aligned(4096))


def test_part_of_an_extent_is_written_without_harm_to_the_rest(tmp_path: Path) -> None:
    with scratch(tmp_path, 64 * 1024) as file:
        before, extent, after = file.take(4096), file.take(20_000), file.take(4096)
        contents = [noise(size, seed) for seed, size in enumerate((4096, 20_000, 4096))]
        for place, content in zip((before, extent, after), contents, strict=True):
            place.write(content)
        part = noise(5_000, 9)
        extent.write(part, 4096)
        contents[1][4096:9096] = part
        for place, content in zip((before, extent, after), contents, strict=True):
            back = aligned(content.nbytes)
            place.read(back)
            assert torch.equal(back, content)


def test_a_whole_extent_is_written_without_reading(tmp_path: Path) -> None:
    reads: list[int] = []

    def pread(fd: int, view: memoryview, offset: int) -> int:
        reads.append(offset)
        return REAL.pread(fd, view, offset)

    with scratch(tmp_path, 64 * 1024, calls=SystemCalls(pread=pread)) as file:
        extent = file.take(5000)
        reads.clear()
        extent.write(aligned(5000))
        assert not reads


def test_requests_stay_inside_their_extent(tmp_path: Path) -> None:
    with scratch(tmp_path, 64 * 1024, direct=False) as file:
        extent = file.take(5000)
        for offset, size in ((-1, 10), (4096, 905), (0, 5001)):
            with pytest.raises(SettingError, match="not inside an extent of 5000 bytes"):
                extent.pread(bytearray(size), offset)
        with pytest.raises(SettingError, match="read-only"):
            extent.pread(b"abc")


# --- nothing is left --------------------------------------------------------------------------------------------------


def test_the_file_has_no_name(tmp_path: Path) -> None:
    with scratch(tmp_path, MiB) as file:
        extent = file.take(10_000)
        extent.write(noise(10_000, 1))
        assert not list(tmp_path.iterdir())
        back = aligned(10_000)
        extent.read(back)
        assert torch.equal(back, noise(10_000, 1))


def test_a_forked_child_does_not_touch_the_parents_extents(tmp_path: Path) -> None:
    """No hang on a lock that was held at the fork, no second owner of the space; to close is harmless."""

    def child() -> int:
        wrong = 0
        for use in (extent.read, extent.pwrite):
            with contextlib.suppress(StorageError):
                use(aligned(4096))
                wrong += 1
        with contextlib.suppress(StorageError):
            file.take(4096)
            wrong += 1
        file.close()
        return wrong + (ledger.used_bytes(Tier.DISK) != 0)

    ledger = open_ledger()
    with create_scratch(tmp_path, 8192, ledger=ledger, tag=Tag.OPTIMIZER) as file:
        extent = file.take(4096)
        extent.write(noise(4096, 3))
        with file._extents_lock, file._lock:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is just what is tested
                pid = os.fork()
            if not pid:
                try:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.setitimer(signal.ITIMER_REAL, 5)
                    os._exit(child())
                finally:
                    os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        back = aligned(4096)
        extent.read(back)
        assert torch.equal(back, noise(4096, 3))
        assert file.free_bytes == 4096
        assert ledger.used_bytes(Tier.DISK) == 8192


CHILD = """
import sys, time
from pathlib import Path
from stormtorch.core.budget import Budget
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.disk.scratch import create_scratch

ledger = Ledger(Budget(tier=Tier.DISK, limit_bytes=1 << 30, given=""))
file = create_scratch(Path(sys.argv[1]), 32 << 20, ledger=ledger, tag=Tag.OPTIMIZER, direct=False)
future = file.take(32 << 20).pwrite(bytearray(32 << 20))
print("ready", flush=True)
time.sleep(60)
"""


def test_kill_9_leaves_no_file(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.kill()
        assert child.wait(300) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
