from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from stormtorch.core.errors import SettingError
from stormtorch.core.sizes import GiB
from stormtorch.memory.books import limits


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def levels(tmp_path: Path, membership: str) -> list[tuple[int, int]]:
    write(tmp_path / "membership", membership)
    return limits._cgroup_levels(tmp_path / "fs", tmp_path / "membership")


def test_cgroup_v2_takes_every_limited_ancestor_and_counts_cache_as_free(tmp_path: Path) -> None:
    fs = tmp_path / "fs"
    write(fs / "user" / "job" / "memory.max", "max")
    write(fs / "user" / "memory.max", 8 * GiB)
    write(fs / "user" / "memory.current", 5 * GiB)
    write(fs / "user" / "memory.stat", f"anon 1\ninactive_file {2 * GiB}")
    assert levels(tmp_path, "0::/user/job") == [(8 * GiB, 3 * GiB)]


def test_cgroup_v1_and_its_number_for_no_limit(tmp_path: Path) -> None:
    fs = tmp_path / "fs" / "memory"
    write(fs / "memory.limit_in_bytes", 9223372036854771712)
    write(fs / "box" / "memory.limit_in_bytes", 4 * GiB)
    write(fs / "box" / "memory.usage_in_bytes", GiB)
    assert levels(tmp_path, "5:cpu:/box\n4:memory:/box") == [(4 * GiB, GiB)]


def test_a_container_that_shows_the_hosts_path_is_read_at_its_own_root(tmp_path: Path) -> None:
    write(tmp_path / "fs" / "memory.max", 2 * GiB)
    write(tmp_path / "fs" / "memory.current", 0)
    assert levels(tmp_path, "0::/../../outside/docker-abc") == [(2 * GiB, 0)]


def test_a_machine_without_cgroups_has_no_limit(tmp_path: Path) -> None:
    assert limits._cgroup_levels(tmp_path / "none", tmp_path / "neither") == []


def test_the_cgroup_caps_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_cgroup_levels", lambda: [(3 * GiB, GiB), (GiB, 2 * GiB)])
    assert limits.host_total_bytes() == GiB
    assert limits.host_available_bytes() == 0


def test_without_a_cgroup_limit_the_machine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_cgroup_levels", list)
    assert limits.host_total_bytes() == psutil.virtual_memory().total
    assert 0 < limits.host_available_bytes() <= limits.host_total_bytes()


@pytest.mark.parametrize(
    ("wsl", "memlock", "uid", "container", "word"),
    [
        (True, None, 1000, False, "WSL"),
        (False, 65536, 1000, True, "memlock, 64 KiB"),
        (False, 65536, 0, True, "container"),
        (False, None, 1000, False, "driver"),
    ],
)
def test_the_page_lock_limit_is_named(
    monkeypatch: pytest.MonkeyPatch, wsl: bool, memlock: int | None, uid: int, container: bool, word: str
) -> None:
    monkeypatch.setattr(limits, "is_wsl", lambda: wsl)
    monkeypatch.setattr(limits, "memlock_limit_bytes", lambda: memlock)
    monkeypatch.setattr(limits, "in_container", lambda: container)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert word in limits.page_lock_limit()


def test_filesystem_types() -> None:
    assert limits.filesystem_type(Path("/proc/self")) == "proc"
    if Path("/dev/shm").is_mount():
        assert limits.filesystem_type(Path("/dev/shm/not-there-yet")) == "tmpfs"


def test_mounts_with_blanks_and_letters_beyond_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /m\\040\u00fc rw - tmpfs t rw\n3 1 0:3 / /b\udce9 rw - xfs t rw\n"
    )
    monkeypatch.setattr(limits, "_read_text", lambda _: table)
    assert limits.filesystem_type(Path("/m \u00fc/file")) == "tmpfs"
    assert limits.filesystem_type(Path("/elsewhere")) == "ext4"


@pytest.mark.parametrize(
    ("built_for", "words"), [(None, "was built without CUDA"), ("12.8", "torch sees no CUDA device")]
)
def test_a_gpu_that_is_not_there_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(SettingError, match=rf"^device='cuda' cannot be used here: .*{words}.*\. Accepted: cpu\.$"):
        limits.usable_device("cuda")
    with pytest.raises(SettingError, match=r"^device='tpu' cannot be used here\. Accepted: cpu\.$"):
        limits.usable_device("tpu")
