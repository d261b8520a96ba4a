"""The few calls of the CUDA driver that share one process's GPU memory with another.

torch shares tensors too, but opens them under the owner's device, where a kernel of another device
may not address them; opened here they belong to the importer's current device.
"""

from __future__ import annotations

import ctypes
from functools import cache

_LAZY_PEER_ACCESS = 1
HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class DriverError(RuntimeError):
    """A call of the driver failed; the text names call and error."""


@cache
def driver() -> ctypes.CDLL:
    """The driver. Raises DriverError when there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from error
    library.cuIpcOpenMemHandle_v2.argtypes = (
        ctypes.POINTER(ctypes.c_uint64),
        _Handle,
        ctypes.c_uint,
    )
    library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), ctypes.c_uint64)
    library.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuModuleLoadData.argtypes = (pointer, pointer)
    library.cuModuleGetFunction.argtypes = (pointer, pointer, ctypes.c_char_p)
    library.cuFuncSetAttribute.argtypes = (pointer, ctypes.c_int, ctypes.c_int)
    library.cuLaunchKernel.argtypes = (pointer, *[number] * 7, pointer, pointer, pointer)
    library.cuMemGetAddressRange_v2.argtypes = (
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_uint64,
    )
    return library


def check(name: str, code: int) -> None:
    """Raise DriverError when a call's code is one of an error."""
    if code == 0:
        return
    text = ctypes.c_char_p()
    driver().cuGetErrorName(code, ctypes.byref(text))
    raise DriverError(f"{name}: {(text.value or b'error').decode()} ({code})")


def export_memory(address: int) -> tuple[bytes, int]:
    """The handle of the allocation that holds `address`, and the offset of `address` in it."""
    library = driver()
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
    check("cuMemGetAddressRange", code)
    handle = _Handle()
    check("cuIpcGetMemHandle", library.cuIpcGetMemHandle(ctypes.byref(handle), base.value))
    return bytes(handle.data), address - base.value


def open_memory(handle: bytes) -> int:
    """Map another process's allocation under the current device; its address here."""
    address = ctypes.c_uint64()
    raw = _Handle.from_buffer_copy(handle)
    code = driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), raw, _LAZY_PEER_ACCESS)
    check("cuIpcOpenMemHandle", code)
    return address.value


def close_memory(address: int) -> None:
    """Undo open_memory. Nothing may be reading or writing it."""
    check("cuIpcCloseMemHandle", driver().cuIpcCloseMemHandle(address))
