"""``storm doctor``: reports this machine's memory, devices and disk, and the remedy for missing features."""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..core.budget import Budget
from ..core.errors import SettingError
from ..core.sizes import format_bytes
from ..core.tags import Tag, Tier

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--disk",
        type=Path,
        nargs="+",
        action="extend",
        metavar="DIR",
        help="directories to measure, in about 10 s each with at most 2 GiB, and what a step with states on them costs",
    )
    parser.add_argument(
        "--parameters",
        metavar="COUNT",
        help="with --disk: the cost for so many trained parameters, such as 8e9, 8B or 500M (default: a table)",
    )


def run(options: argparse.Namespace) -> int:
    import torch

    from ..memory.books import limits
    from ..native.library import describe
    from .doctor_disk import parse_count, report_disks

    for directory in options.disk or ():
        if not directory.is_dir():
            raise SettingError(f"--disk {directory} is not a directory. Name one that exists.")
    count = None if options.parameters is None else parse_count(options.parameters)
    if count is not None and not options.disk:
        raise SettingError("--parameters needs a disk to measure. Add --disk DIR.")
    print(f"storm {__version__}, torch {torch.__version__}, Python {platform.python_version()} on {platform.machine()}")
    print(describe())
    free, total = format_bytes(limits.host_available_bytes()), format_bytes(limits.host_total_bytes())
    print(f"host: {free} RAM free of {total}{' (the cgroup limit)' if limits.cgroup_limit_bytes() is not None else ''}")
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        memory = "{} free of {}".format(*map(format_bytes, limits.device_memory_bytes(device)))
        print(f"device {device}: {torch.cuda.get_device_name(index)}, {memory}; {_signals(device)}")
    if not torch.cuda.is_available():
        print("device: no CUDA device that torch can use; STORM runs on the CPU device")
    if options.disk:
        return report_disks(list(dict.fromkeys(options.disk)), count, has_gpu=torch.cuda.is_available())
    _report_temporary(Path(tempfile.gettempdir()))
    return 0


def _report_temporary(directory: Path) -> None:
    """Say how the directory for temporary files is accessed, without measuring it."""
    from ..memory.books import limits
    from ..memory.books.ledger import Ledger
    from ..memory.disk.scratch import create_scratch

    free, kind = limits.disk_bytes(directory)[0], limits.filesystem_type(directory)
    ledger = Ledger(Budget(tier=Tier.DISK, limit_bytes=1 << 20, given="storm doctor"))
    with create_scratch(directory, 1 << 16, ledger=ledger, tag=Tag.STAGING) as file:
        io_mode = f"{file.mode} I/O ({file.mode_reason})"
    print(f"disk: {format_bytes(free)} free in {directory} ({kind}); {io_mode}; --disk {directory} measures it")


def _signals(device: torch.device) -> str:
    """Test page-locking and stream flags; returns the result as one phrase, with the remedy."""
    from ..memory.books import limits
    from ..memory.books.ledger import Ledger
    from ..memory.host.pinning import page_lock_for
    from ..memory.lanes.flags import Flags

    ledger = Ledger(Budget(tier=Tier.HOST, limit_bytes=1 << 20, given="storm doctor"))
    flags = Flags(1, ledger=ledger, device=device, page_lock=page_lock_for(device))
    on_stream, pinned = flags.on_stream, ledger.pinned_bytes > 0
    flags.close()
    if on_stream:
        return "page-lock and stream flags work"
    if pinned:
        return "the driver cannot wait for flags on a stream: the host waits, which is slower"
    return f"no page-lock: copies need the slower staged lanes; the limit is {limits.page_lock_limit()}"
