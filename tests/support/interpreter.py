"""triton's interpreter, which runs kernels on a machine without a GPU, made fit for many tests."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def patch_language_once() -> None:
    """Let the interpreter patch `triton.language` once for each module of kernels, and for good.

    It does so again at every call of a device function, which is most of a kernel's time.
    """
    patch, patched = interpreter._patch_lang, set()

    def once(kernel: Any) -> interpreter._LangPatchScope:
        module = id(kernel.__globals__)
        if module not in patched:
            patched.add(module)
            patch(kernel)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once
