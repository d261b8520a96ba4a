"""Calls of the CUDA driver: shared GPU memory, kernels compiled at run time (NVRTC), and fast
versions of frequent calls of torch.

torch shares tensors too, but opens them under the owner's device, where a kernel of another device
may not address them; opened here they belong to the importer's current device. A launch through the
driver takes microseconds of CPU time, through triton tens of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType

import torch

_NAME = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_NO_TIMING = 2
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class DriverError(RuntimeError):
    """A call of the driver failed."""


@cache
def driver() -> ctypes.CDLL:
    """The driver. Raises DriverError when there is none."""
    try:
        library = ctypes.CDLL(_NAME)
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from error
    pointer, number, address = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64
    to_address, to_size = ctypes.POINTER(address), ctypes.POINTER(ctypes.c_size_t)
    library.cuIpcOpenMemHandle_v2.argtypes = (to_address, _Handle, number)
    library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), address)
    library.cuIpcCloseMemHandle.argtypes = (address,)
    library.cuModuleLoadData.argtypes = (pointer, pointer)
    library.cuModuleGetFunction.argtypes = (pointer, pointer, ctypes.c_char_p)
    library.cuFuncSetAttribute.argtypes = (pointer, ctypes.c_int, ctypes.c_int)
    library.cuEventCreate.argtypes = (pointer, number)
    library.cuEventDestroy_v2.argtypes = (pointer,)
    library.cuCtxGetCurrent.argtypes = (ctypes.POINTER(pointer),)
    library.cuMemGetAddressRange_v2.argtypes = (to_address, to_size, address)
    return library


@cache
def quick() -> ctypes.PyDLL:
    """Calls that only queue work. They keep the interpreter's lock: getting it back from a busy
    event loop takes ten times as long as the call."""
    library = ctypes.PyDLL(_NAME)
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = (pointer, *[number] * 7, pointer, pointer, pointer)
    library.cuEventRecord.argtypes = (pointer, pointer)
    library.cuStreamWaitEvent.argtypes = (pointer, pointer, number)
    library.cuMemcpyHtoDAsync_v2.argtypes = (ctypes.c_uint64, pointer, ctypes.c_size_t, pointer)
    library.cuMemcpyDtoHAsync_v2.argtypes = (pointer, ctypes.c_uint64, ctypes.c_size_t, pointer)
    library.cuCtxPushCurrent_v2.argtypes = (pointer,)
    library.cuCtxPopCurrent_v2.argtypes = (ctypes.POINTER(pointer),)
    return library


class Context:
    """Makes a device the current one, in any thread: `torch.cuda.device`, twenty times as fast."""

    def __init__(self, device: torch.device) -> None:
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # there is a context after the first call
            code = driver().cuCtxGetCurrent(ctypes.byref(self._handle))
        check("cuCtxGetCurrent", code)

    def __enter__(self) -> None:
        check("cuCtxPushCurrent", quick().cuCtxPushCurrent_v2(self._handle))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        popped = ctypes.c_void_p()
        check("cuCtxPopCurrent", quick().cuCtxPopCurrent_v2(ctypes.byref(popped)))


class Event:
    """A point in a stream of the current device, for other streams to wait for."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        check("cuEventCreate", driver().cuEventCreate(ctypes.byref(self._handle), _NO_TIMING))

    def record(self, stream: torch.cuda.Stream) -> None:
        """Move it to the end of the work queued on `stream`."""
        check("cuEventRecord", quick().cuEventRecord(self._handle, stream.cuda_stream))

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make later work on `stream` wait for it, unless it was never recorded."""
        code = quick().cuStreamWaitEvent(stream.cuda_stream, self._handle, 0)
        check("cuStreamWaitEvent", code)

    def __del__(self) -> None:
        if self._handle:
            driver().cuEventDestroy_v2(self._handle)


def check(name: str, code: int) -> None:
    """Raise DriverError, naming the call, unless `code` is success."""
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


class Kernel:
    """One kernel for one device; `defines` are macros of its source."""

    def __init__(
        self,
        source: Path,
        name: str,
        device: torch.device,
        *,
        threads: int,
        shared_bytes: int,
        **defines: int,
    ) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        binary = _compiled(source, f"sm_{major}{minor}", tuple(defines.items()))
        self._threads = threads
        self._shared_bytes = shared_bytes
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        library = driver()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the driver needs a current context
            check("cuModuleLoadData", library.cuModuleLoadData(ctypes.byref(self._module), binary))
            found = ctypes.byref(self._function)
            code = library.cuModuleGetFunction(found, self._module, name.encode())
            check("cuModuleGetFunction", code)
            if shared_bytes:
                code = library.cuFuncSetAttribute(self._function, _DYNAMIC_SHARED, shared_bytes)
                check("cuFuncSetAttribute", code)

    def launch(self, blocks: int, stream: int, *args: ctypes.Structure) -> None:
        """Queue it on a raw stream of its device, which must be the current one."""
        pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        grid, block = (blocks, 1, 1), (self._threads, 1, 1)
        code = quick().cuLaunchKernel(
            self._function, *grid, *block, self._shared_bytes, stream, pointers, None
        )
        check("cuLaunchKernel", code)


@cache
def _compiled(source: Path, architecture: str, defines: tuple[tuple[str, int], ...]) -> bytes:
    compiler = _compiler()
    program = ctypes.c_void_p()
    text, name = source.read_bytes(), source.name.encode()
    _try(compiler.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
    flags = [f"--gpu-architecture={architecture}", *(f"-D{name}={n}" for name, n in defines)]
    options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    if compiler.nvrtcCompileProgram(program, len(flags), options):
        size = ctypes.c_size_t()
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        raise DriverError(f"{source.name} does not compile: {log.value.decode()}")
    size = ctypes.c_size_t()
    _try(compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    code = ctypes.create_string_buffer(size.value)
    _try(compiler.nvrtcGetCUBIN(program, code))
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def _try(code: int) -> None:
    if code:
        raise DriverError(f"NVRTC: error {code}")


@cache
def _compiler() -> ctypes.CDLL:
    for name in _libraries():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError("no NVRTC: it comes with torch's CUDA wheels and with the CUDA toolkit")


def _libraries() -> Iterator[str]:
    """Names for the loader's own search, then files in torch's wheels."""
    major = (torch.version.cuda or "0").partition(".")[0]
    yield f"libnvrtc.so.{major}"
    wheels = importlib.util.find_spec("nvidia")
    for folder in [] if wheels is None else wheels.submodule_search_locations or []:
        for path in sorted(Path(folder).rglob(f"libnvrtc.so.{major}")):
            yield str(path)
