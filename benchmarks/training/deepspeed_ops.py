"""DeepSpeed compiles what it uses at first use, in a minute or more; later cases find it built."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from .packages import folder


def build(device: str, *builders: str) -> None:
    """Compile and load the extensions of these builders. The process must have touched the device before."""
    nvcc = shutil.which("nvcc")
    os.environ.setdefault("CUDA_HOME", str(Path(nvcc).parents[1]) if nvcc else "/usr/local/cuda")
    os.environ.update(DS_ACCELERATOR=device, DS_SKIP_CUDA_CHECK="1")
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    ninja = folder() / "bin" / "ninja"
    if shutil.which("ninja") is None and ninja.exists():
        ninja.chmod(0o755)
        os.environ["PATH"] = f"{ninja.parent}{os.pathsep}{os.environ['PATH']}"
    built = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{tempfile.gettempdir()}/storm_peers_{os.getuid()}"))
    for lock in built.glob("**/lock"):  # of a process that was stopped while it compiled: torch would wait for ever
        lock.unlink()
    libaio = folder() / "libaio"
    _add_to("CPATH", libaio)
    _add_to("LIBRARY_PATH", libaio)
    if device == "cuda":
        _add_to("LIBRARY_PATH", _driver_names(built / "lib"))
    importlib.import_module("deepspeed")
    ops: Any = importlib.import_module("deepspeed.ops.op_builder")
    for name in builders:
        if name == "AsyncIOBuilder" and not ops.AsyncIOBuilder().is_compatible():
            raise RuntimeError(
                f"DeepSpeed's access to files needs libaio: neither {libaio} nor the system has libaio.h and a "
                "library to link. benchmarks/offline.sh brings both"
            )
        getattr(ops, name)().load()


def _add_to(variable: str, where: Path) -> None:
    """g++ itself reads these variables: extensions that torch compiles do not see CFLAGS and LDFLAGS."""
    os.environ[variable] = os.pathsep.join(filter(None, (str(where), os.environ.get(variable))))


def _driver_names(where: Path) -> Path:
    """Links named ``libcuda.so`` and ``libcudart.so`` to the libraries that this process has loaded: machines that only
    run CUDA programs have them under other names, and torch's own runtime lies in a wheel."""
    where.mkdir(parents=True, exist_ok=True)
    ctypes.CDLL("libcuda.so.1")
    for name, library in cuda_libraries(Path("/proc/self/maps").read_text()).items():
        link = where / f"{name}.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    return where


def cuda_libraries(maps: str) -> dict[str, str]:
    """Of ``libcuda`` and ``libcudart``, those that a process has mapped, with their paths."""
    return {name: path for path, name in re.findall(r"(/\S*/(libcuda|libcudart)[.-]\S*)$", maps, re.MULTILINE)}
