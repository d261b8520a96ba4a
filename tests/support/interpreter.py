"""A faster and more exact triton interpreter, which runs kernels on machines without a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

core = tl.core


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


def remember_types() -> None:
    """Let the interpreter make each shape, and what follows from it, once.

    By default every operation makes and checks the shapes of its operands and of its result anew,
    through lists of constants: half of a kernel's time.
    """
    _unwrap_quickly()
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast, same_block = TritonSemantic.broadcast_impl_value, core.block_type.__eq__
    cast, result = TritonSemantic.cast, TritonSemantic.computation_type_impl
    np_type = interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    sizes: dict[int, tuple[Any, Any, Any]] = {}  # by the identity of a shape, which is kept
    np_types: dict[str, Any] = {}
    results: dict[Any, Any] = {}

    def block(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, *[core._unwrap_if_constexpr(size) for size in shape])
        if key not in blocks:
            make_block(self, element, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key], element_ty=element)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        known = sizes.get(id(shape))
        if known is None:
            make_tensor(self, handle, type)
            sizes[id(shape)] = shape, self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, self.numel = known

    def broadcast_others(self: Any, left: Any, right: Any) -> Any:
        types = left.type, right.type
        shapes = [type.shape if type.is_block() else None for type in types]
        return (left, right) if shapes[0] is shapes[1] else broadcast(self, left, right)

    def same(self: Any, other: Any) -> bool:
        if type(other) is core.block_type and other.shape is self.shape:
            return bool(self.element_ty == other.element_ty)
        return bool(same_block(self, other))

    def np_type_of(type: Any) -> Any:
        name = type.scalar.name
        if name not in np_types:
            np_types[name] = np_type(type)
        return np_types[name]

    def cast_others(self: Any, value: Any, type: Any, fp_downcast_rounding: Any = None) -> Any:
        if value.type.scalar is type and fp_downcast_rounding is None:
            return value
        return cast(self, value, type, fp_downcast_rounding)

    def computed(self: Any, *operands: Any) -> Any:
        key = tuple(getattr(operand, "name", operand) for operand in operands)
        if key not in results:
            results[key] = result(self, *operands)
        return results[key]

    core.block_type.__init__, core.block_type.__eq__ = block, same
    core.tensor.__init__ = tensor
    TritonSemantic.broadcast_impl_value = broadcast_others
    TritonSemantic.cast, TritonSemantic.computation_type_impl = cast_others, computed
    interpreter._get_np_dtype = np_type_of


def _unwrap_quickly() -> None:
    unwrap = core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrapped
