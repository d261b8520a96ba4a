"""Launches of triton kernels that skip triton's own look at every argument of every call.

That look decides which compiled variant a call needs, and takes several times as long as the launch
itself. A step with prompt chunks launches five kernels a layer one by one: with short prompts the
device waited for them. Kernels inside CUDA graphs have no use for this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

#: What triton specialises pointers for, in bytes.
_ALIGNED = 16


def power_of_2(number: int) -> int:
    """The least one from `number` on. Triton's own function takes 3 us, as long as a launch."""
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up; as fast."""
    return -(-number // divisor)


class Repeated:
    """A kernel, called as triton's own: kernel[grid](*args, **constants and options).

    The first call with arguments of a kind goes through triton, and names the variant for all
    others. Of one kind are calls with equal numbers, constants and options, tensors of equal types
    whose addresses are equal modulo 16, and descriptors of equal blocks. Every constant is given by
    name.
    """

    def __init__(self, kernel: Any) -> None:
        """`kernel`: a triton.jit function; its interpreter's are called as they are."""
        self._kernel = kernel
        self._variants: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        self._compiled = isinstance(kernel, JITFunction)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """What launches it on this grid."""
        return partial(self._launch, grid) if self._compiled else self._kernel[grid]

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        device = driver.active.get_current_device()
        kind: list[Any] = [device, *named.values()]
        values = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                address = arg.data_ptr()
                values.append(address)
                kind += (arg.dtype, address % _ALIGNED)
            elif isinstance(arg, TensorDescriptor):
                values.append(arg)
                kind += (arg.base.dtype, *arg.block_shape)
            else:
                values.append(arg)
                kind.append(arg)
        key = tuple(kind)
        known = self._variants.get(key)
        if known is None:
            variant = self._kernel[grid](*args, **named)
            constants = tuple(named[name] for name in self._kernel.arg_names[len(args) :])
            self._variants[key] = variant, constants
            return
        variant, constants = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        function, packed = variant.function, variant.packed_metadata
        variant.run(x, y, z, stream, function, packed, None, None, None, *values, *constants)
