"""Limits of this machine: RAM under the cgroup limit, lockable memory, VRAM, disk space.

Every call reads the system again and changes nothing. ``psutil`` alone is not enough: inside a container it reports the
host's RAM, and a process that believes it is killed without a message.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from pathlib import Path

import psutil
import torch

from ...core.errors import SettingError, StorageError
from ...native.cores import read_text as _read_text
from ..cuda.allocator import allowed_bytes, untaken_bytes

_OCTAL = re.compile(r"\\([0-7]{3})")  # the kernel's escapes for blanks in a path
_CGROUP_UNLIMITED = 1 << 60  # cgroup v1 reports "no limit" as a number near 2^63


def host_available_bytes() -> int:
    """RAM that can be taken without swapping or exceeding the cgroup's limit."""
    rooms = (max(0, limit - used) for limit, used in _cgroup_levels())
    return min([int(psutil.virtual_memory().available), *rooms])


def host_total_bytes() -> int:
    """RAM of the machine, or of the cgroup if that is less."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_levels())])


def cgroup_limit_bytes() -> int | None:
    """The tightest memory limit on the way from this process's cgroup to the root; None without one."""
    return min((limit for limit, _ in _cgroup_levels()), default=None)


def _cgroup_levels(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """(limit, in use) of every limited cgroup above this process. File cache counts as free: the kernel drops it
    first."""
    levels: list[tuple[int, int]] = []
    for line in _read_text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name, cache_key = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_key = "total_inactive_file"
        else:
            continue
        folder = base / path.strip("/")
        # Inside a container the path may be the host's view and not exist; its own root is mounted at base.
        folders = [f for f in (folder, *folder.parents) if f == base or base in f.parents] or [base]
        for level in folders:
            limit = _read_text(level / limit_name).strip()
            if not limit.isdigit() or int(limit) >= _CGROUP_UNLIMITED:
                continue
            used = int(_read_text(level / usage_name).strip() or 0)
            statistics = dict(entry.split() for entry in _read_text(level / "memory.stat").splitlines())
            levels.append((int(limit), max(0, used - int(statistics.get(cache_key, 0)))))
    return levels


def memlock_limit_bytes() -> int | None:
    """RLIMIT_MEMLOCK, or None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def is_wsl() -> bool:
    return "microsoft" in platform.release().lower()


def in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "container" in os.environ


def page_lock_limit() -> str:
    """The most likely cause of a refused page-lock, in words that tell a user where to look."""
    memlock = memlock_limit_bytes()
    if is_wsl():
        return "WSL, which allows about half of its RAM to be page-locked (raise memory= in .wslconfig)"
    if memlock is not None and os.geteuid() != 0:
        return f"memlock, {memlock >> 10} KiB for this user (ulimit -l; raise it in limits.conf)"
    if in_container():
        return "the container's memory or memlock limit (docker run --ulimit memlock=-1)"
    return "the driver (too little free RAM, or memory that is already registered)"


def check_one_device(device: object) -> None:
    """Raise SettingError for a list of devices, which other programs accept."""
    given = device.split(",") if isinstance(device, str) else device
    if isinstance(given, list | tuple | set | frozenset) and not (isinstance(device, str) and len(given) == 1):
        raise SettingError(
            f"device={device!r} is a list, and STORM streams to one device. Name one, such as 'cuda:0'; the rest of "
            "the model lies in RAM."
        )


def usable_device(device: torch.device | str | int) -> torch.device:
    """``device`` with its index, if STORM can use it; else raises SettingError with the list of usable ones. "auto" is
    the GPU that torch uses now, or the CPU; a number is a GPU, as for torch."""
    check_one_device(device)
    if type(device) is int:
        device = f"cuda:{device}"
    accepted = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else str(device)
    if name == "cuda" and len(accepted) > 1:
        name = f"cuda:{torch.cuda.current_device()}"
    if name not in accepted:
        raise SettingError(f"device={name!r} cannot be used here{_why_not(name)}. Accepted: {', '.join(accepted)}.")
    return torch.device(name)


def _why_not(name: str) -> str:
    """Why torch has no CUDA device, for an error about one; empty if that is not the reason."""
    if not name.startswith("cuda") or torch.cuda.device_count():
        return ""
    if torch.version.cuda is None:
        return f": torch {torch.__version__} was built without CUDA"
    return ": torch sees no CUDA device (storm doctor, nvidia-smi)"


def device_memory_bytes(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of ``device`` for this process. For a CPU device these are the host's."""
    if device.type == "cpu":
        return host_available_bytes(), host_total_bytes()
    # Cached by torch, but free to reuse.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return untaken_bytes(device) + cached, allowed_bytes(device)


def disk_bytes(directory: Path) -> tuple[int, int]:
    """(free, total) bytes of the filesystem of ``directory``; free is what this user may still write."""
    try:
        usage = shutil.disk_usage(directory)
        return usage.free, usage.total
    except OSError as error:
        raise StorageError(
            f"Cannot tell how much space is free in {directory}: {error.strerror}. Is it still there?"
        ) from error


def filesystem_type(path: Path) -> str:
    """The type of the filesystem that holds ``path`` ("ext4", "tmpfs", ...); "unknown" if /proc does not list it."""
    target = path.resolve()
    best, kind = -1, "unknown"
    for line in _read_text(Path("/proc/self/mountinfo")).splitlines():
        fields = line.split()
        mount = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        if (target == mount or mount in target.parents) and len(mount.parts) >= best:
            best, kind = len(mount.parts), fields[fields.index("-") + 1]
    return kind
