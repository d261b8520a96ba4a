"""A faster and more exact triton interpreter, which runs kernels on machines without a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter


def patch_language_once() -> None:
    """Let the interpreter patch `triton.language` once for each module of kernels.

    By default it does so at every call of a device function, which is most of a kernel's time.
    """
    patch, patched = interpreter._patch_lang, set()

    def once(kernel: Any) -> interpreter._LangPatchScope:
        module = id(kernel.__globals__)
        if module not in patched:
            patched.add(module)
            patch(kernel)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once


def round_e4m3_exactly() -> None:
    """Let the interpreter round to e4m3 codes as the cards do, to the nearest.

    Its own conversion loses the carry of a mantissa that is rounded up.
    """
    convert = interpreter._convert_float

    def exact(value: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target != tl.float8e4nv:
            return convert(value, source, target, rounding)
        codes = torch.from_numpy(value.copy()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8).numpy()

    interpreter._convert_float = exact
