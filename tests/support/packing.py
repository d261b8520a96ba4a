"""Writes a checkpoint in every quantised format, and beside it the same matrices dequantised.

Packing is written out bit by bit, from the formats' own descriptions; it shares no code with the
engine.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One format. group: columns of a scale, 0: whole rows, -1: whole matrices. block: rows and
    columns of a scale. ordered: columns lie by importance, not by group."""

    method: str
    bits: int = 4
    floating: bool = False
    group: int = 0
    block: int = 0
    zeros: bool = False
    ordered: bool = False
    static: bool = False

    def config(self) -> dict[str, Any]:
        """The `quantization_config` of its config.json."""
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group,
                "zero_point": self.zeros,
                "version": "gemm",
                "modules_to_not_convert": None,
            }
        if self.method.startswith("gptq"):
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": self.group or -1,
                "desc_act": self.ordered,
                "sym": not self.zeros,
                "checkpoint_format": self.method,
            }
        if self.method == "fp8":
            size = {"weight_block_size": [self.block, self.block]} if self.block else {}
            scheme = "static" if self.static else "dynamic"
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": scheme, **size}
        return self._compressed()

    def _compressed(self) -> dict[str, Any]:
        strategy = {0: "channel", -1: "tensor"}.get(self.group, "group")
        weights: dict[str, Any] = {
            "num_bits": self.bits,
            "type": "float" if self.floating else "int",
            "symmetric": not self.zeros,
            "strategy": "block" if self.block else strategy,
            "group_size": self.group if self.group > 0 else None,
            "block_structure": [self.block, self.block] if self.block else None,
            "actorder": "group" if self.ordered else None,
            "dynamic": False,
        }
        inputs = {
            "num_bits": 8,
            "type": weights["type"],
            "dynamic": not self.static,
            "strategy": "tensor" if self.static else "token",
        }
        packed = self.method == "pack-quantized"
        return {
            "quant_method": "compressed-tensors",
            "format": self.method,
            "ignore": ["lm_head", "re:.*layers.0.self_attn.k_proj"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None if packed else inputs,
                }
            },
        }


PACKINGS = {
    "fp8-channel": Packing(method="float-quantized", bits=8, floating=True),
    "fp8-static": Packing(method="float-quantized", bits=8, floating=True, group=-1, static=True),
    "fp8-blocks": Packing(method="fp8", bits=8, floating=True, block=32),
    "fp8-matrix": Packing(method="fp8", bits=8, floating=True, group=-1),
    "int8": Packing(method="int-quantized", bits=8),
    "int8-zeros": Packing(method="int-quantized", bits=8, zeros=True),
    "w4a16": Packing(method="pack-quantized", group=32),
    "w4a16-channel": Packing(method="pack-quantized"),
    "w4a16-zeros": Packing(method="pack-quantized", group=32, zeros=True),
    "w4a16-ordered": Packing(method="pack-quantized", group=32, zeros=True, ordered=True),
    "w8a16": Packing(method="pack-quantized", bits=8, group=32),
    "awq": Packing(method="awq", group=32, zeros=True),
    "awq-symmetric": Packing(method="awq", group=32),
    "gptq": Packing(method="gptq", group=32),
    "gptq-zeros": Packing(method="gptq", group=32, zeros=True),
    "gptq-v2": Packing(method="gptq_v2", group=32, zeros=True),
    "gptq-ordered": Packing(method="gptq", group=32, ordered=True),
    "gptq-channel": Packing(method="gptq"),
    "gptq-int8": Packing(method="gptq", bits=8, group=32),
}


def pack_checkpoint(source: Path, packed: Path, reference: Path, packing: Packing) -> None:
    """Write `source` in a format to `packed`, and what that means, in float32, to `reference`. The
    head, and k of layer 0 where the format has ignore lists, stay as they are."""
    tensors, meant = load_file(source / "model.safetensors"), {}
    out: Tensors = {}
    ignores = packing.config().get("ignore", ())
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        kept = ignores and module.endswith("layers.0.self_attn.k_proj")
        if tensor.dim() != 2 or "_proj" not in name or kept:
            out[name] = meant[name] = tensor
            continue
        parts, meant[name] = pack_matrix(tensor.float(), packing, seed=len(out))
        out |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    for folder, content in ((packed, out), (reference, meant)):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model*.safetensors*"))
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    path = packed / "config.json"
    raw = json.loads(path.read_text()) | {"quantization_config": packing.config()}
    path.write_text(json.dumps(raw))


def pack_matrix(matrix: torch.Tensor, packing: Packing, seed: int) -> tuple[Tensors, torch.Tensor]:
    """A matrix `[N, K]` as tensors of its module, and the values that they mean."""
    if packing.block:
        return _blocks(matrix, packing.block)
    if packing.floating or packing.method == "int-quantized":
        return _scaled(matrix, packing)
    k = matrix.shape[1]
    group = packing.group or k
    order = torch.arange(k)
    if packing.ordered:
        order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    group_of = torch.empty(k, dtype=torch.int64)
    group_of[order] = torch.arange(k) // group  # the most important columns share a group
    codes, scales, zeros = _grouped(matrix, group_of, packing)
    meant = (codes - zeros[:, group_of]) * scales.float()[:, group_of]
    if packing.method == "pack-quantized":
        return _compressed(codes, scales, zeros, group_of, packing), meant
    if packing.method == "awq":
        parts = {
            "qweight": _words(codes.t(), 4, _AWQ_ORDER),
            "scales": scales.half().t(),
            "qzeros": _words(zeros.t(), 4, _AWQ_ORDER),
        }
        return parts, meant
    stored = (zeros - 1) % (1 << packing.bits) if packing.method == "gptq" else zeros
    parts = {
        "qweight": _words(codes, packing.bits).t(),
        "scales": scales.t(),
        "qzeros": _words(stored.t(), packing.bits),
        "g_idx": group_of.int(),
    }
    return parts, meant


def _blocks(matrix: torch.Tensor, block: int) -> tuple[Tensors, torch.Tensor]:
    n, k = matrix.shape
    scales = torch.empty(-(-n // block), -(-k // block))
    codes, meant = torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(n, k)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scales[i, j] = matrix[at].abs().max() / 448
            codes[at] = (matrix[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[at] = codes[at].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, meant


def _scaled(matrix: torch.Tensor, packing: Packing) -> tuple[Tensors, torch.Tensor]:
    limit = 448.0 if packing.floating else 127.0
    low, high = matrix.amin(1, keepdim=True), matrix.amax(1, keepdim=True)
    zeros = torch.zeros_like(low)
    if packing.zeros:
        scales = ((high - low) / 255).bfloat16()
        zeros = (-128 - low / scales.float()).round().clamp(-128, 127)
    else:
        scales = (torch.maximum(-low, high) / limit).bfloat16()
    if packing.group == -1:
        scales = scales.max().reshape(1)
    codes = matrix / scales.float() + zeros
    if packing.floating:
        stored = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        stored = codes.round().clamp(-128, 127).char()
    parts = {"weight": stored, "weight_scale": scales}
    if packing.zeros:
        parts["weight_zero_point"] = zeros.char()
    if packing.static:
        parts["input_scale"] = torch.tensor([0.02])
    return parts, (stored.float() - zeros) * scales.float()


def _grouped(
    matrix: torch.Tensor, group_of: torch.Tensor, packing: Packing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 on, scales in float16, zero points."""
    top, count = (1 << packing.bits) - 1, int(group_of.max()) + 1
    scales = torch.empty(matrix.shape[0], count, dtype=torch.float16)
    zeros = torch.full((matrix.shape[0], count), (top + 1) // 2)
    codes = torch.empty(matrix.shape, dtype=torch.int64)
    for number in range(count):
        part = matrix[:, group_of == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if packing.zeros:
            scales[:, number] = ((high - low) / top).half()
            zeros[:, number] = (-low / scales[:, number].float()).round().clamp(1, top).long()
        else:
            scales[:, number] = (torch.maximum(-low, high) / (top // 2)).half()
        steps = (part / scales[:, number, None].float()).round().long() + zeros[:, number, None]
        codes[:, group_of == number] = steps.clamp(0, top)
    return codes, scales, zeros


def _compressed(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group_of: torch.Tensor,
    packing: Packing,
) -> Tensors:
    parts = {
        "weight_packed": _words(codes, packing.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape),
    }
    if packing.zeros:
        parts["weight_zero_point"] = _words(zeros.t(), packing.bits).t()
    if packing.ordered:
        parts["weight_g_idx"] = group_of.int()
    return parts


def _words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """`[A, B]` as int32 `[A, ceil(B / codes of a word)]`; place i has the code order[i]."""
    per = 32 // bits
    out = torch.zeros(codes.shape[0], -(-codes.shape[1] // per), dtype=torch.int64)
    for column in range(codes.shape[1]):
        place = column % per if order is None else order.index(column % per)
        out[:, column // per] |= codes[:, column].long() << (bits * place)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).int()
