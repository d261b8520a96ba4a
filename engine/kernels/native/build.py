"""Builds kernels.cpp with the C++ compiler of the machine, once, and binds its functions.

The source includes no torch header, so this takes seconds. The library is cached under a hash of
source, compiler and processor. Without a compiler or a suitable processor there is no library, and
the engine runs on torch's operators.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
_PARTS = (_SOURCE, *map(_SOURCE.with_name, ("quantized.h", "layers.h")))
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-pthread", "-w")
#: Set to 0 to run without the library.
SWITCH = "BATON_NATIVE_KERNELS"
_AMX = "amx_bf16"
_NEEDED = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "baton_pack": (_P, _L, _L, _P),
    "baton_linear": (_P, _L, _L, _P, _L, _P, _P, _P, _I),
    "baton_gated": (_P, _L, _L, _P, _L, _P, _P, _P, _I),
    "baton_linear_int8": (_P, _L, _L, _P, _P, _L, _P, _P, _P, _I),
    "baton_gated_int8": (_P, _L, _L, _P, _P, _L, _P, _P, _P, _I),
    "baton_linear_int4": (_P, _L, _L, _P, _P, _L, _P, _P, _P, _I),
    "baton_gated_int4": (_P, _L, _L, _P, _P, _L, _P, _P, _P, _I),
    "baton_rms_norm": (_P, _L, _L, _P, _F, _P, _I),
    "baton_rms_norm_f32": (_P, _L, _L, _P, _F, _P, _I),
    "baton_rope": (_P, _L, _P, _P, _P, _P, _P, _P, _L, _I),
    "baton_attend": (_P, _P, _P, _L, _L, _P, _P, _P, _P, _P, _I),
    "baton_layers": (_P, _L, _P, _P, _L, _P, _L, _I),
}


class AttentionShape(ctypes.Structure):
    """`Attention` of kernels.cpp. row_stride: elements from a row of q to the next. window: tokens
    that a row sees, 0 for all; softcap: 0 for none."""

    _fields_ = (
        ("q_heads", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("dim", ctypes.c_long),
        ("block_size", ctypes.c_long),
        ("row_stride", ctypes.c_long),
        ("window", ctypes.c_long),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class ScaleGroups(ctypes.Structure):
    """`Groups` of quantized.h."""

    _fields_ = (
        ("size", ctypes.c_long),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("half", ctypes.c_long),
        ("input_group", ctypes.c_long),
    )


class ProductParts(ctypes.Structure):
    """`Product` of layers.h."""

    _fields_ = (
        ("bits", ctypes.c_long),
        ("weights", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("inputs", ctypes.c_long),
        ("outputs", ctypes.c_long),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
    )


class LayerStructure(ctypes.Structure):
    """`Layer` of layers.h."""

    _fields_ = (
        *((name, ProductParts) for name in ("qkv", "out", "gated", "down")),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("norms_wide", ctypes.c_long),
        ("eps", ctypes.c_float),
    )


class PlanStructure(ctypes.Structure):
    """`Plan` of layers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("shape", "cos", "sin", "positions", "slots")),
        ("sequences", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("queries", "contexts", "starts", "tables")),
    )


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The library, built on first use; None where it is not available. Safe between processes."""
    if os.environ.get(SWITCH) == "0" or not _processor_flags() >= _NEEDED:
        return None
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        log.info("no C++ compiler: the engine runs on torch's operators alone, which is slower")
        return None
    try:
        library = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()[-2000:]
        log.warning("native kernels not built, the engine runs without them: %s", reason)
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def has_matrix_unit() -> bool:
    """Whether the processor has a matrix unit, which only torch's oneDNN uses."""
    return _AMX in _processor_flags()


def _built(compiler: str) -> Path:
    home = os.environ.get("BATON_HOME")
    cache = Path(home) if home else Path.home() / ".cache" / "baton"
    path = cache / "native" / f"kernels-{_key(compiler)}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: each worker builds
            fcntl.flock(lock, fcntl.LOCK_EX)  # of those that start together one builds
        if path.exists():
            return path
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *_FLAGS, "-o", str(made), str(_SOURCE)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            made.replace(path)  # atomic: others look for it without the lock
    finally:
        os.close(lock)
    return path


def _key(compiler: str) -> str:
    parts = (
        *(part.read_bytes() for part in _PARTS),
        " ".join((compiler, *_FLAGS)).encode(),
        str(Path(compiler).resolve().stat().st_mtime_ns).encode(),
        " ".join(sorted(_processor_flags())).encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@functools.cache
def _processor_flags() -> frozenset[str]:
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
