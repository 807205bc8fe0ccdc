"""Tries GPUDirect Storage on a file in a directory: ``python gds_child.py DIRECTORY SECONDS``. gds.py starts it.

It prints one line of JSON. SIGALRM ends it after SECONDS if the process that started it is gone by then. It imports
nothing of STORM, so that it starts at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import signal
import sys
import tempfile
from typing import Any

_OPAQUE_FD = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD


class _Descriptor(ctypes.Structure):
    """CUfileDescr_t. Versions of cuda.bindings wrap it differently; cuFile's own interface does not change."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle", ctypes.c_void_p),  # a union: the descriptor is in its first four bytes
        ("fs_ops", ctypes.c_void_p),
    )


def main(directory: str) -> tuple[bool, str]:
    """Whether a file of the directory can be registered, and why or why not."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
        cufile: Any = importlib.import_module("cuda.bindings.cufile")
    except ImportError as error:
        return False, f"the package cuda-bindings with cuFile cannot be imported ({error})"
    try:
        _use_gpu(driver)
        cufile.driver_open()
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(bytes(4096))
            number = file.fileno()
            fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_DIRECT)
            descriptor = _Descriptor(type=_OPAQUE_FD, handle=number)
            cufile.handle_deregister(cufile.handle_register(ctypes.addressof(descriptor)))
    except Exception as error:  # of any kind: the answer is that it does not work
        return False, f"cuFile refused it ({type(error).__name__}: {error})"
    return True, "cuFile registered a file there"


def _use_gpu(driver: Any) -> None:
    """Make the first GPU's context the current one. Without a driver, cuFile would spin."""
    _checked(driver.cuInit(0))
    (context,) = _checked(driver.cuDevicePrimaryCtxRetain(0))
    _checked(driver.cuCtxSetCurrent(context))


def _checked(answer: Any) -> Any:
    status, *values = answer
    if int(status):
        raise RuntimeError(f"CUDA driver error {int(status)}")
    return values


if __name__ == "__main__":
    signal.alarm(int(sys.argv[2]))
    works, reason = main(sys.argv[1])
    sys.stdout.write(json.dumps({"works": works, "reason": reason}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # at its end, the driver may wait for threads of its own
