"""Finds and loads the C library. It was built when the package was installed; nothing is compiled at run time."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

ABI = 13  # STORM_ABI in csrc/storm.h
FILE_RANGES = 4  # STORM_FILE_RANGES
_FALLBACK_SLOWDOWN = 6  # measured per core: 5 for fp32 weights, 7 for bf16 with a split master


def _all(kind: type, names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names.split())


class Scalars(ctypes.Structure):
    """``storm_scalars`` of csrc/adamw.h, field by field."""

    _fields_ = (
        *_all(ctypes.c_float, "grad_scale l2 decay lerp_weight beta2 grad_sq_weight root_bias2 eps minus_step_size"),
        ("flags", ctypes.c_uint32),
    )


class Update(ctypes.Structure):
    """``storm_update`` of csrc/adamw.h."""

    _fields_ = (
        *_all(ctypes.c_void_p, "weight master exp_avg exp_avg_sq grad grad_factor"),
        ("count", ctypes.c_int64),
        *_all(ctypes.c_uint32, "weight_kind grad_kind"),
        ("scalars", Scalars),
        *_all(ctypes.c_void_p, "weight_from master_from exp_avg_from exp_avg_sq_from"),
    )


class FlagWord(ctypes.Structure):
    """``storm_flag`` of csrc/storm.h. A null address means no flag."""

    _fields_ = (("address", ctypes.c_void_p), ("value", ctypes.c_uint32))


class PoolStats(ctypes.Structure):
    """``storm_pool_stats`` of csrc/storm.h."""

    _fields_ = (
        ("busy_s", ctypes.c_double),
        *_all(ctypes.c_int64, "elements finished abandoned pending"),
        ("file_s", ctypes.c_double),
        *_all(ctypes.c_int64, "read_bytes written_bytes"),
    )


class FileRange(ctypes.Structure):
    """``storm_file_range`` of csrc/storm.h."""

    _fields_ = _all(ctypes.c_int64, "fd offset bytes at")


class FilePart(ctypes.Structure):
    """``storm_file_part`` of csrc/storm.h."""

    _fields_ = (
        ("ranges", FileRange * FILE_RANGES),
        *_all(ctypes.c_int64, "unit has_weights"),
        ("target", ctypes.c_void_p),
        ("written", FlagWord),
    )


class FileFailure(ctypes.Structure):
    """``storm_file_failure`` of csrc/storm.h."""

    _fields_ = _all(ctypes.c_int64, "error fd offset bytes got write")


class SamplerCounts(ctypes.Structure):
    """``storm_sampler_counts`` of csrc/storm.h."""

    _fields_ = _all(ctypes.c_int64, "asked counted_ns idle_ns launches watched_ns stops exposed_ns")


class RowsOutcome(ctypes.Structure):
    """``storm_rows_outcome`` of csrc/storm.h."""

    _fields_ = (
        ("state", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        *_all(ctypes.c_int64, "piece got begin_ns end_ns"),
    )


_P, _I32, _I64, _F64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_SIGNATURES = {
    "storm_isa_count": (_I32, ()),
    "storm_isa_name": (ctypes.c_char_p, (_I32,)),
    "storm_isa_supported": (_I32, (_I32,)),
    "storm_isa_best": (_I32, ()),
    "storm_adamw": (_I32, (ctypes.POINTER(Update), _I32, _I32)),
    "storm_pool_open": (_I32, (ctypes.POINTER(_I32), _I32, _I32, _I32, ctypes.POINTER(_P))),
    "storm_pool_submit": (_I32, (_P, ctypes.POINTER(Update), _I64, _I32, FlagWord, FlagWord, FlagWord, FlagWord)),
    "storm_pool_reap": (_I64, (_P, ctypes.POINTER(_I64), _I64)),
    "storm_pool_submit_file": (
        _I32,
        (_P, ctypes.POINTER(FilePart), _P, _I64, _I64, _I32, FlagWord, FlagWord, FlagWord, FlagWord),
    ),
    "storm_pool_lend": (None, (_P, _P, _I64)),
    "storm_pool_replace": (None, (_P, _P, _P)),
    "storm_pool_read_failure": (None, (_P, ctypes.POINTER(FileFailure))),
    "storm_pool_read_stats": (None, (_P, ctypes.POINTER(PoolStats))),
    "storm_pool_stop": (_I64, (_P,)),
    "storm_pool_free": (None, (_P,)),
    "storm_touch": (_I32, (_P, ctypes.c_size_t, _I32)),
    "storm_wait_flag": (_I32, (FlagWord, _F64)),
    "storm_sampler_open": (_I32, (_P, _I32, _P, _P, _P, _P, _I64, _I64, ctypes.POINTER(_P))),
    "storm_sampler_close": (None, (_P,)),
    "storm_rows_map": (_I32, (_I32, ctypes.c_size_t, ctypes.POINTER(_P))),
    "storm_rows_unmap": (None, (_P, ctypes.c_size_t)),
    "storm_rows_open": (_I32, (_I32, _I64, ctypes.POINTER(_P))),
    "storm_rows_replace": (None, (_P, _P, _P)),
    "storm_rows_submit": (_I32, (_P, _P, _I64, _I32, _I32, ctypes.POINTER(RowsOutcome))),
    "storm_rows_wait": (_I32, (_P, ctypes.POINTER(RowsOutcome), _F64, _I32)),
    "storm_rows_cancel": (None, (_P, ctypes.POINTER(RowsOutcome))),
    "storm_rows_stop": (None, (_P,)),
    "storm_rows_free": (None, (_P,)),
}
# These take nanoseconds: giving up the GIL for them would cost a wait of milliseconds to get it back.
_AT_ONCE = {
    "storm_load_flag": (ctypes.c_uint32, (_P,)),
    "storm_set_flag": (None, (FlagWord,)),
    "storm_sampler_watch": (None, (_P, _P)),
    "storm_sampler_read": (None, (_P, ctypes.POINTER(SamplerCounts))),
}


@dataclass(frozen=True, kw_only=True)
class Library:
    """The loaded library. ``isas``: names of those this CPU can run; ``isa``: the fastest of them."""

    c: ctypes.CDLL
    isas: dict[str, int]
    isa: str


def _open(path: Path) -> Library | str:
    """The library at ``path``, or the reason why it cannot be used."""
    try:
        c = ctypes.CDLL(str(path))
        c.storm_abi.restype = ctypes.c_uint32
        c.storm_update_size.restype = ctypes.c_size_t
        if (found := c.storm_abi()) != ABI or c.storm_update_size() != ctypes.sizeof(Update):
            return f"{path.name} has ABI {found}, this version needs {ABI}; install the package again"
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(c, name)
            function.restype, function.argtypes = result, arguments
        for name, (result, arguments) in _AT_ONCE.items():
            setattr(c, name, ctypes.PYFUNCTYPE(result, *arguments)((name, c)))
    except (OSError, AttributeError) as error:
        return f"{path.name} does not load: {error}"
    isas = {c.storm_isa_name(i).decode(): i for i in range(c.storm_isa_count()) if c.storm_isa_supported(i)}
    return Library(c=c, isas=isas, isa=c.storm_isa_name(c.storm_isa_best()).decode())


@functools.cache
def _load() -> Library | str:
    found = sorted(Path(__file__).parent.glob("_storm*.so"))
    if not found:
        return "installed without a working C compiler"
    outcomes = [_open(path) for path in found]
    return next((outcome for outcome in outcomes if isinstance(outcome, Library)), outcomes[0])


def library() -> Library | None:
    """The C library, loaded at the first call, or None if it cannot be used."""
    loaded = _load()
    return loaded if isinstance(loaded, Library) else None


def describe() -> str:
    """One line for reports: which kernels run; for the fallback, why and what it costs."""
    loaded = _load()
    if isinstance(loaded, Library):
        return f"native kernels: {loaded.isa}"
    return f"native kernels: not in use ({loaded}); using the torch fallback, about {_FALLBACK_SLOWDOWN} times slower"
