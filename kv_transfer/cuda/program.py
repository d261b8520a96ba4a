"""Compiles CUDA source at run time (NVRTC) and launches it through the driver: a launch takes
microseconds of CPU time, triton's tens of them."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from kv_transfer.cuda.driver import DriverError, check, driver, quick

_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


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
        code = _compiled(source, f"sm_{major}{minor}", tuple(defines.items()))
        self._threads = threads
        self._shared_bytes = shared_bytes
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        library = driver()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the driver needs a current context
            check("cuModuleLoadData", library.cuModuleLoadData(ctypes.byref(self._module), code))
            check(
                "cuModuleGetFunction",
                library.cuModuleGetFunction(
                    ctypes.byref(self._function), self._module, name.encode()
                ),
            )
            if shared_bytes:
                check(
                    "cuFuncSetAttribute",
                    library.cuFuncSetAttribute(self._function, _DYNAMIC_SHARED, shared_bytes),
                )

    def launch(self, blocks: int, stream: int, *args: ctypes.Structure) -> None:
        """Queue it on a raw stream of its device, which must be the current one."""
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        code = quick().cuLaunchKernel(
            self._function,
            blocks,
            1,
            1,
            self._threads,
            1,
            1,
            self._shared_bytes,
            stream,
            pointers,
            None,
        )
        check("cuLaunchKernel", code)


@cache
def _compiled(source: Path, architecture: str, defines: tuple[tuple[str, int], ...]) -> bytes:
    compiler = _compiler()
    program = ctypes.c_void_p()
    text = source.read_bytes()
    _try(
        compiler.nvrtcCreateProgram(
            ctypes.byref(program), text, source.name.encode(), 0, None, None
        )
    )
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
