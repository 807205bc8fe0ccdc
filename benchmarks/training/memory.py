"""The machine's RAM, made to exist before the first case.

In a virtual machine the first touch of a page may be the host's too, and the first process pays for it: then set-up
times would tell the order of the cases. So a process that belongs to no case writes once to nearly all of it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

from stormtorch.core.sizes import GiB
from stormtorch.memory.books.limits import host_available_bytes

_LEFT_BYTES = 8 * GiB
_LIMIT_S = 60
_TOUCH = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
size, pieces = int(sys.argv[1]), 256
torch.set_num_threads(1)
memory = torch.empty(size, dtype=torch.uint8)
with ThreadPoolExecutor() as pool:
    list(pool.map(lambda piece: piece.fill_(1), memory.chunk(pieces)))
"""


def touch_all() -> None:
    """Takes some seconds. Never fails: a machine that refuses is measured as it is."""
    size = host_available_bytes() - _LEFT_BYTES
    if size > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, "-c", _TOUCH, str(size)], timeout=_LIMIT_S, check=False)
