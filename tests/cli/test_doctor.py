"""What ``storm doctor --disk`` says of disks that are fast, shared, in RAM, remote or broken."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stormtorch.cli import doctor_disk
from stormtorch.cli.doctor_disk import parse_count, print_costs
from stormtorch.cli.main import main
from stormtorch.core.errors import SettingError, StorageError
from stormtorch.core.sizes import MiB
from stormtorch.memory.books import limits
from stormtorch.memory.disk.calls import SystemCalls
from stormtorch.memory.disk.filesystems import Place
from stormtorch.planner.measure.disk import DiskMeasurement, Rates, measure_disk
from stormtorch.planner.measure.gds import GdsFinding

from ..forkserver import Popen

RATES = Rates(
    write_bytes_per_s=2.6e9,
    read_bytes_per_s=2.4e9,
    mixed_bytes_per_s=2e9,
    request_bytes=8 * MiB,
    file_bytes=2048 * MiB,
    seconds=2.5,
    from_disk=1.0,
)


def found(directory: Path, **changes: Any) -> DiskMeasurement:
    usual = DiskMeasurement(
        directory=directory,
        free_bytes=100 * 10**9,
        total_bytes=200 * 10**9,
        device=1,
        filesystem="ext4",
        place=Place.DISK,
        direct=True,
        reason="ext4 passed an aligned trial",
        threads=4,
        rates=RATES,
    )
    return replace(usual, **changes)


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the doctor find given measurements instead of measuring."""

    def use(*measurements: DiskMeasurement | Exception, together: float = 0.0) -> None:
        left = iter(measurements)

        def measured(_directory: Path, **_: object) -> DiskMeasurement:
            if isinstance(now := next(left), Exception):
                raise now
            return now

        monkeypatch.setattr(doctor_disk, "measure_disk", measured)
        monkeypatch.setattr(doctor_disk, "measure_together", lambda *_, **__: together)

    return use


def failing(code: int) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def test_a_disk_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_disk, "LIMIT_BYTES", 64 * MiB)
    monkeypatch.setattr(doctor_disk, "LIMIT_S", 1.0)
    if limits.filesystem_type(tmp_path) == "tmpfs":
        pytest.skip("the temporary directory lies in RAM")
    assert main(["doctor", "--disk", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for word in ("I/O", "writes ", "reads ", "both at once", "GPUDirect Storage: ", "32e9", "600 TBW"):
        assert word in out
    assert not list(tmp_path.iterdir())


def test_the_lines_of_a_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], disks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_disk, "probe_gds", lambda *_, **__: GdsFinding(True, "cuFile registered a file there"))
    disks(found(tmp_path))
    assert main(["doctor", "--disk", str(tmp_path), "--parameters", "8B"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("disk: "))
    assert lines[start : start + 4] == [
        f"disk: {tmp_path}: 93.1 GiB free of 186.3 GiB (ext4); direct I/O (ext4 passed an aligned trial)",
        f"disk: {tmp_path}: writes 2.60 GB/s, reads 2.40 GB/s, both at once 2.00 GB/s in all",
        f"disk: {tmp_path}: by blocks of 8 MiB, 4 at a time, 2.0 GiB in 2.5 s; drives can be slower after tens of GiB",
        "GPUDirect Storage: works: cuFile registered a file there. STORM does not use it yet",
    ]
    assert "A step of AdamW on 8,000,000,000 parameters" in lines[start + 5]
    assert [line.split()[0] for line in lines[start + 6 : start + 10]] == ["weights", "bf16", "fp16", "fp32"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"filesystem": "nfs4", "place": Place.NETWORK}, "a network file system"),
        ({"filesystem": "cifs", "place": Place.NETWORK}, "a network file system"),
        ({"filesystem": "fuse.sshfs", "place": Place.PROGRAM}, "FUSE"),
        ({"filesystem": "9p", "place": Place.HOST}, "a folder of the machine's host"),
        ({"filesystem": "overlay", "place": Place.LAYER}, "the layer of a container"),
        ({"rates": replace(RATES, from_disk=0.03)}, "counted 3% of the reads as reads of a device: the rate may be"),
        ({"direct": False, "reason": "zfs refuses it here"}, "without direct I/O"),
    ],
)
def test_what_is_said_of_a_disk(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    disks: Callable[..., None],
    changes: dict[str, Any],
    words: str,
) -> None:
    disks(found(tmp_path))
    assert main(["doctor", "--disk", str(tmp_path)]) == 0
    assert words not in capsys.readouterr().out
    disks(found(tmp_path, **changes))
    assert main(["doctor", "--disk", str(tmp_path)]) == 0
    assert words in capsys.readouterr().out


def test_ram_is_no_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = SystemCalls(filesystem_type=lambda _: "tmpfs", open_unnamed=failing(errno.EIO))
    monkeypatch.setattr(doctor_disk, "measure_disk", partial(measure_disk, calls=calls))
    assert main(["doctor", "--disk", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"disk: {tmp_path} was not measured: tmpfs lies in RAM" in out
    assert "A step of AdamW" not in out, "there is no rate"


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (SystemCalls(open_unnamed=failing(errno.EROFS)), "the filesystem is read-only [EROFS]"),
        (SystemCalls(fallocate=failing(errno.ENOSPC)), "no space is left on the filesystem [ENOSPC]"),
        (SystemCalls(pwrite=failing(errno.EIO)), "the disk reported an I/O error [EIO]"),
    ],
)
def test_a_disk_that_fails_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, calls: SystemCalls, words: str
) -> None:
    calls = replace(calls, filesystem_type=lambda _: "ext4")
    monkeypatch.setattr(doctor_disk, "measure_disk", partial(measure_disk, calls=calls))
    assert main(["doctor", "--disk", str(tmp_path)]) == 1
    caught = capsys.readouterr()
    assert caught.err.startswith("storm doctor: Cannot ")
    assert caught.err.count("\n") == 1
    assert words in caught.err
    assert "A step of AdamW" not in caught.out


def test_a_disk_that_fails_does_not_keep_another_from_being_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], disks: Callable[..., None]
) -> None:
    good = tmp_path / "good"
    good.mkdir()
    disks(StorageError("Cannot write there."), found(good))
    assert main(["doctor", "--disk", str(tmp_path), str(good)]) == 1
    caught = capsys.readouterr()
    assert caught.err == "storm doctor: Cannot write there.\n"
    assert f"disk: {good}: writes" in caught.out
    assert "A step of AdamW" in caught.out


@pytest.mark.parametrize(
    ("together", "devices", "shared", "free"),
    [(3.9e9, (1, 2), False, "200 GB"), (2.1e9, (1, 1), True, "100 GB")],
    ids=["two disks", "one disk"],
)
def test_several_directories_are_measured_together(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    disks: Callable[..., None],
    together: float,
    devices: tuple[int, int],
    shared: bool,
    free: str,
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    first, second = found(tmp_path, device=devices[0]), found(other, device=devices[1])
    disks(first, second, together=together)
    command = ["doctor", "--disk", str(tmp_path), "--disk", str(other), str(tmp_path), "--parameters", "32e9"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"all 2 at once, in equal parts: {together / 1e9:.2f} GB/s in all" in out
    assert ("they share a disk" in out) is shared
    assert f"free on disk ({free})" in out, "directories of one filesystem share its free space"
    assert out.count("GPUDirect Storage") == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8e9", 8 * 10**9),
        ("8E9", 8 * 10**9),
        ("8B", 8 * 10**9),
        ("8b", 8 * 10**9),
        ("1.5B", 1_500_000_000),
        ("8_000_000_000", 8 * 10**9),
        ("8000000000", 8 * 10**9),
        ("500M", 500_000_000),
        ("70 k", 70_000),
        ("1t", 10**12),
        ("8.03e9", 8_030_000_000),
    ],
)
def test_counts_of_parameters(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "0", "-8e9", "8Q", "8GiB", "eight", "nan", "inf", "1e99", "8,0", "1__0", "0.1", "B"]
)
def test_no_counts_of_parameters(text: str) -> None:
    with pytest.raises(SettingError, match=r"--parameters .* is not a number of parameters\. Accepted: 8e9, 8B"):
        parse_count(text)


def test_the_table_of_costs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "host_total_bytes", lambda: 32 * 10**9)
    print_costs(2e9, 100 * 10**9, None)
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split()[0]: line.split()[1:] for line in lines if "e9 " in line}
    assert list(cells) == ["1e9", "3e9", "8e9", "14e9", "32e9"]
    # on disk, seconds, written in 1,000 steps, share of a drive's life, RAM, and that of step="backward"
    assert " ".join(cells["3e9"]) == "30.0 GB 30.0 s 30.0 TB 5.0% 12.0 GB 8.1 GB"
    assert " ".join(cells["8e9"]) == "80.0 GB 80.0 s 80.0 TB 13.3% 32.0 GB 21.6 GB"
    assert " ".join(cells["14e9"]) == "140 GB* 2.3 min 140 TB 23.3% 56.0 GB* 37.8 GB*"
    assert lines[-1].startswith("*: more than what is free on disk (100 GB), or than the RAM here (32.0 GB)")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parameters", "8B"], ["--parameters needs a disk to measure", "--disk DIR"]),
        (["--disk", "/", "--parameters", "many"], ["--parameters many", "Accepted"]),
        (["--disk", "/", "/no/such/place"], ["/no/such/place", "is not a directory"]),
    ],
)
def test_settings_that_are_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], disks: Callable[..., None], arguments: list[str], words: list[str]
) -> None:
    disks()  # none may be measured
    assert main(["doctor", *arguments]) == 1
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.count("\n") == 1
    assert all(word in caught.err for word in words)


@pytest.mark.parametrize(("flag", "meant"), [("--disc", "--disk"), ("--params", "--parameters")])
def test_flags_that_do_not_exist(capsys: pytest.CaptureFixture[str], flag: str, meant: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", flag, "/tmp"])
    assert ended.value.code == 2
    assert f"Did you mean {meant}?" in capsys.readouterr().err


def test_ctrl_c_ends_a_measurement_and_leaves_nothing(tmp_path: Path) -> None:
    if limits.filesystem_type(tmp_path) == "tmpfs":
        pytest.skip("the temporary directory lies in RAM")
    code = "import sys; from stormtorch.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "doctor", "--disk", str(tmp_path)]
    process = Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 60
    while not _writes_in(process.pid, tmp_path) and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "storm doctor: interrupted\n")
    assert not list(tmp_path.iterdir())


def _writes_in(pid: int, directory: Path) -> bool:
    """Whether a process has a file of the directory open."""
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]  # noqa: PTH115
    except OSError:
        return False
    return any(link.startswith(str(directory)) for link in links)
