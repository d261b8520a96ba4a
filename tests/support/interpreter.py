"""A faster triton interpreter, which runs kernels on machines without a GPU."""

from __future__ import annotations

from typing import Any

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
