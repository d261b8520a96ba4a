"""What `quantization_config` of a config.json says about the matrices of a checkpoint.

Sources: the configurations of compressed-tensors, AutoAWQ, GPTQModel and DeepSeek-V3 as they are
published on the Hub.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.model.reading import Raw, optional_positive, positive, refused

_FIELD = "quantization_config"
_EVERY = "Linear"  # the class of all matrices
_AT_LOAD = "serve the unquantised checkpoint with --quantization int4, int8 or fp8"
_COMPRESS = (
    f"quantise the unquantised checkpoint with llm-compressor (W4A16, FP8_DYNAMIC), or {_AT_LOAD}"
)
#: Formats that are not served, and what to do instead.
_REFUSED = {
    "bitsandbytes": _AT_LOAD,
    "mxfp4": _COMPRESS,
    "nvfp4": _COMPRESS,
    "modelopt": _COMPRESS,
    "gguf": "convert it to safetensors with transformers (from_pretrained(gguf_file=...))",
    "torchao": _COMPRESS,
    "fbgemm_fp8": _COMPRESS,
    "hqq": _AT_LOAD,
    "eetq": _AT_LOAD,
    "quanto": _AT_LOAD,
}
_COMPRESSED_FORMATS = (
    *("float-quantized", "int-quantized", "pack-quantized"),
    *("naive-quantized", "mixed-precision", "dense"),
)


class PackingMethod(StrEnum):
    """How the tensors of matrices are named and packed."""

    COMPRESSED_TENSORS = "compressed-tensors"
    FP8 = "fp8"
    AWQ = "awq"
    GPTQ = "gptq"  # stores zero points minus 1
    GPTQ_V2 = "gptq_v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFormat:
    """Matrices of one kind. floating: e4m3 codes, else integers of `bits`.

    group_size: columns of a scale, None: whole rows. block: rows and columns of a scale.
    quantizes_input, static_input: whether products quantise their inputs, too, and by a stored
    scale.
    """

    bits: int
    floating: bool = False
    group_size: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    quantizes_input: bool = False
    static_input: bool = False

    def describe(self) -> str:
        kind = "fp8" if self.floating else f"int{self.bits}"
        if self.block is not None:
            return f"{kind} {self.block[0]}x{self.block[1]}"
        return kind if self.group_size is None else f"{kind} g{self.group_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """A quantised checkpoint: its matrix formats with the modules that each is meant for. Which
    modules really are quantised is what their tensors say."""

    method: PackingMethod
    groups: tuple[tuple[tuple[str, ...], MatrixFormat], ...]

    def of(self, module: str) -> MatrixFormat:
        """The format of a module: that of the first group that names it, or else its class."""
        by_class = self.groups[0][1]
        for targets, kind in reversed(self.groups):
            if _EVERY in targets:
                by_class = kind
        return next(
            (
                kind
                for targets, kind in self.groups
                if any(names_module(target, module) for target in targets if target != _EVERY)
            ),
            by_class,
        )

    def describe(self) -> str:
        """For users, and for the fingerprint: `awq int4 g128`."""
        kinds = " + ".join(dict.fromkeys(kind.describe() for _, kind in self.groups))
        return kinds if self.method is PackingMethod.FP8 else f"{self.method} {kinds}"


def names_module(target: str, module: str) -> bool:
    """Whether a target of compressed-tensors names a module: `re:` and a pattern that matches from
    the start, a whole name, or its end."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target or module.endswith(f".{target}")


def parse_quantization(raw: Raw) -> CheckpointFormat | None:
    """The format of a config.json; None where nothing is quantised. Raises ModelRefused naming
    the format and what converts it."""
    stated = raw.get(_FIELD) or raw.get("compression_config")
    if not stated:
        return None
    if not isinstance(stated, Mapping):
        raise refused(_FIELD, f"expected an object, got {stated!r}")
    method = str(stated.get("quant_method", "")).lower()
    if method in _REFUSED:
        raise _not_served(method, _REFUSED[method])
    parsers = {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "awq": _awq,
        "gptq": _gptq,
    }
    if method not in parsers:
        raise _not_served(method, _COMPRESS)
    return parsers[method](stated)


def _compressed_tensors(stated: Raw) -> CheckpointFormat | None:
    groups = stated.get("config_groups")
    if not groups and stated.get("kv_cache_scheme"):
        return None  # scales of KV are all that was added
    if not isinstance(groups, Mapping) or not groups:
        raise refused(f"{_FIELD}.config_groups", "names no group of matrices")
    formats = [stated.get("format", "dense"), *(g.get("format") for g in groups.values())]
    for name in filter(None, formats):
        if name not in _COMPRESSED_FORMATS:
            raise _not_served(str(name), _COMPRESS)
    for field in ("transform_config", "sparsity_config"):
        value = stated.get(field)
        if value and value.get("format") != "dense":
            raise refused(f"{_FIELD}.{field}", "rotated and sparse weights are not served")
    return CheckpointFormat(
        method=PackingMethod.COMPRESSED_TENSORS,
        groups=tuple(_compressed_group(name, group) for name, group in groups.items()),
    )


def _compressed_group(name: str, group: Raw) -> tuple[tuple[str, ...], MatrixFormat]:
    field = f"{_FIELD}.config_groups.{name}"
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise refused(f"{field}.weights", f"expected an object, got {weights!r}")
    bits, floating = positive(weights, "num_bits"), weights.get("type", "int") == "float"
    if bits not in ((8,) if floating else (4, 8)):
        kind = "float" if floating else "int"
        raise _not_served(f"{kind}{bits}", _COMPRESS)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise refused(f"{field}.weights.strategy", f"{strategy!r} is not served")
    quantizes = isinstance(inputs, Mapping) and inputs.get("num_bits") == 8 and bits == 8
    targets = group.get("targets") or [_EVERY]
    return tuple(map(str, targets)), MatrixFormat(
        bits=bits,
        floating=floating,
        group_size=positive(weights, "group_size") if strategy == "group" else None,
        block=_block(weights.get("block_structure")) if strategy == "block" else None,
        symmetric=bool(weights.get("symmetric", True)),
        quantizes_input=quantizes,
        static_input=quantizes and inputs is not None and inputs.get("dynamic") is False,
    )


def _fp8(stated: Raw) -> CheckpointFormat:
    """DeepSeek-V3's, and what AutoFP8 wrote: a scale per block, or per matrix."""
    if str(stated.get("fmt", "e4m3")) != "e4m3":
        raise _not_served(f"fp8 {stated['fmt']}", _COMPRESS)
    size = stated.get("weight_block_size")
    kind = MatrixFormat(
        bits=8,
        floating=True,
        block=None if size is None else _block(size),
        quantizes_input=True,
        static_input=stated.get("activation_scheme") == "static",
    )
    return CheckpointFormat(method=PackingMethod.FP8, groups=(((_EVERY,), kind),))


def _awq(stated: Raw) -> CheckpointFormat:
    bits, version = positive(stated, "bits", positive(stated, "w_bit", 4)), stated.get("version")
    if bits != 4:
        raise _not_served(f"awq with {bits} bits", _COMPRESS)
    if str(version or "gemm").lower() != "gemm":
        raise _not_served(f"awq {version}", "pack it with AutoAWQ's version gemm")
    size = _group_size(stated, positive(stated, "q_group_size", 128))
    kind = MatrixFormat(bits=4, group_size=size, symmetric=not stated.get("zero_point", True))
    return CheckpointFormat(method=PackingMethod.AWQ, groups=(((_EVERY,), kind),))


def _gptq(stated: Raw) -> CheckpointFormat:
    bits = positive(stated, "bits", 4)
    if bits not in (4, 8):
        raise _not_served(f"gptq with {bits} bits", _COMPRESS)
    version = str(stated.get("checkpoint_format", "gptq")).lower()
    methods = {"gptq": PackingMethod.GPTQ, "gptq_v2": PackingMethod.GPTQ_V2}
    if version not in methods:
        raise _not_served(f"gptq as {version}", "save it with GPTQModel's FORMAT.GPTQ")
    kind = MatrixFormat(bits=bits, group_size=_group_size(stated, 128))
    return CheckpointFormat(method=methods[version], groups=(((_EVERY,), kind),))


def _group_size(stated: Raw, default: int) -> int | None:
    """Columns of a scale; -1 states whole rows."""
    if stated.get("group_size") == -1:
        return None
    return optional_positive(stated, "group_size") or default


def _block(stated: Any) -> tuple[int, int]:
    if isinstance(stated, str):
        stated = [int(size) for size in stated.split("x")]
    if (
        not isinstance(stated, list)
        or len(stated) != 2
        or not all(isinstance(size, int) and size > 0 for size in stated)
    ):
        raise refused(f"{_FIELD}.weight_block_size", f"expected two sizes, got {stated!r}")
    return stated[0], stated[1]


def _not_served(name: str, instead: str) -> Exception:
    return refused(f"{_FIELD}.quant_method", f"{name or 'none'} is not served: {instead}")
