"""What NVIDIA's management library says of the GPU's time: the share in which kernels ran, in samples of the driver's
own, of about 20 to 200 ms. It counts the kernels of all processes."""

from __future__ import annotations

import ctypes
import time

import torch

_UTILIZATION = 1  # NVML_GPU_UTILIZATION_SAMPLES


class _Sample(ctypes.Structure):
    _fields_ = (("at_us", ctypes.c_ulonglong), ("value", ctypes.c_ulonglong))


class Utilization:
    """Looks from construction to ``end``."""

    def __init__(self) -> None:
        self._began_us = time.time_ns() // 1000

    def end(self) -> str:
        """The mean of the samples, with their number; or why there is none."""
        ended_us = time.time_ns() // 1000
        try:
            samples = _samples(self._began_us)
        except (OSError, RuntimeError) as error:
            return f"none ({error})"
        shares = [sample.value & 0xFFFFFFFF for sample in samples if self._began_us < sample.at_us <= ended_us]
        return f"{sum(shares) / len(shares):.1f}% of {len(shares)} samples" if shares else "none (no samples)"


def _samples(since_us: int) -> list[_Sample]:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle, kind, count = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint()
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
    _call(library, "nvmlInit_v2")
    _call(library, "nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(handle))
    asked = (handle, ctypes.c_int(_UTILIZATION), ctypes.c_ulonglong(since_us), ctypes.byref(kind), ctypes.byref(count))
    _call(library, "nvmlDeviceGetSamples", *asked, None)
    found = (_Sample * max(1, count.value))()
    _call(library, "nvmlDeviceGetSamples", *asked, found)
    return list(found[: count.value])


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(library, name)(*arguments)
    if code:
        raise RuntimeError(f"{name}: error {code}")
