"""Integer matrices with several codes to a 32-bit word, brought to one layout.

compressed-tensors packs along the inputs of `[N, K]`; GPTQ and AWQ store `[K, N]`, packed along
inputs or outputs. The first code of a word is in its lowest bits; AWQ has its own order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.formats.stated import MatrixFormat, PackingMethod
from engine.model.formats.tensors import ModuleTensors
from engine.model.sharding import Span
from engine.quantization.weight import Encoding, QuantizedWeight, pack_nibbles

_WORD_BITS = 32
#: Which place of a word of AWQ each of its eight outputs has.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
#: Columns ordered by importance (GPTQ's act-order) get groups of so many at least.
_SMALLEST_GROUP = 16
#: Bits of a group's scale and zero point.
_TABLE_BITS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModule:
    """A slice of one module's matrix. Methods read it in the form that each method packs."""

    tensors: ModuleTensors
    kind: MatrixFormat
    shape: tuple[int, int]
    rows: Span
    columns: Span
    dtype: torch.dtype

    @property
    def _per_word(self) -> int:
        return _WORD_BITS // self.kind.bits

    @property
    def _group(self) -> int:
        return self.kind.group_size or self.shape[1]

    @property
    def _num_groups(self) -> int:
        return -(-self.shape[1] // self._group)

    def read(self, method: PackingMethod) -> QuantizedWeight:
        """The slice in the layout that all formats share."""
        if method is PackingMethod.COMPRESSED_TENSORS:
            return self._compressed()
        return self._awq() if method is PackingMethod.AWQ else self._gptq(method)

    def _compressed(self) -> QuantizedWeight:
        tensors, (n, k), per = self.tensors, self.shape, self._per_word
        stated = tensors.read("weight_shape", (2,)).tolist()
        if stated != [n, k]:
            raise tensors.fault("weight_shape", f"is {stated}, expected {[n, k]}")
        words = tensors.read(
            "weight_packed", (n, -(-k // per)), self.rows, _words(self.columns, per)
        )
        codes = _cut(_unpacked(words, self.kind.bits), self.columns, per)
        order, groups = self._order("weight_g_idx")
        scales = self._compressed_scales(groups)
        zeros = None if self.kind.symmetric else self._compressed_zeros(groups)
        return self._assembled(codes, scales, zeros, order)

    def _compressed_scales(self, groups: Span) -> Tensor:
        tensors, n = self.tensors, self.shape[0]
        if tensors.shape("weight_scale") == (1,):
            count = self.rows[1] - self.rows[0]
            return tensors.scales("weight_scale", (1,)).expand(count, 1).contiguous()
        return tensors.scales("weight_scale", (n, self._num_groups), self.rows, groups)

    def _compressed_zeros(self, groups: Span) -> Tensor:
        """Zero points in the codes' range; packed along the outputs, or signed bytes."""
        tensors, n, per = self.tensors, self.shape[0], self._per_word
        name = "weight_zero_point"
        if tensors.kind(name) == "I8":
            signed = tensors.read(name, (n, self._num_groups), self.rows, groups)
            return signed.int() + (1 << self.kind.bits - 1)
        shape = -(-n // per), self._num_groups
        words = tensors.read(name, shape, _words(self.rows, per), groups)
        return _cut(_unpacked(words.t(), self.kind.bits), self.rows, per).t()

    def _awq(self) -> QuantizedWeight:
        tensors, (n, k), per = self.tensors, self.shape, self._per_word
        words, order = _words(self.rows, per), self._no_order()
        packed = tensors.read("qweight", (k, n // per), self.columns, words)
        codes = _cut(_awq_unpacked(packed), self.rows, per).t()
        scales = tensors.scales("scales", (self._num_groups, n), order[1], self.rows).t()
        zeros = None
        if not self.kind.symmetric:
            packed = tensors.read("qzeros", (self._num_groups, n // per), order[1], words)
            zeros = _cut(_awq_unpacked(packed), self.rows, per).t()
        return self._assembled(codes, scales, zeros, order[0])

    def _gptq(self, method: PackingMethod) -> QuantizedWeight:
        tensors, (n, k), per, bits = self.tensors, self.shape, self._per_word, self.kind.bits
        words = tensors.read("qweight", (-(-k // per), n), _words(self.columns, per), self.rows)
        codes = _cut(_unpacked(words.t(), bits), self.columns, per)
        order, groups = self._order("g_idx")
        scales = tensors.scales("scales", (self._num_groups, n), groups, self.rows).t()
        shape = self._num_groups, -(-n // per)
        packed = tensors.read("qzeros", shape, groups, _words(self.rows, per))
        zeros = _cut(_unpacked(packed, bits), self.rows, per).t()
        if method is PackingMethod.GPTQ:  # stored minus 1, modulo the range of codes
            zeros = (zeros.int() + 1) & ((1 << bits) - 1)
        return self._assembled(codes, scales, zeros, order)

    def _no_order(self) -> tuple[None, Span]:
        """The groups that the columns of this slice fall into, as they lie in order."""
        first, last = self.columns
        return None, (first // self._group, -(-last // self._group))

    def _order(self, name: str) -> tuple[Tensor | None, Span]:
        """The group of each column where they do not lie in order, and the groups that the slice
        needs scales of."""
        if self.tensors.kind(name) is None:
            return self._no_order()
        index = self.tensors.read(name, (self.shape[1],), self.columns).long()
        if bool(((index < 0) | (index >= self._num_groups)).any()):
            raise self.tensors.fault(name, f"names groups outside 0 .. {self._num_groups - 1}")
        in_order = torch.arange(*self.columns, device=index.device) // self._group
        if index.equal(in_order):
            return self._no_order()
        return index, (0, self._num_groups)

    def _assembled(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None
    ) -> QuantizedWeight:
        """From codes and zero points 0 .. 2^bits - 1."""
        middle = 1 << self.kind.bits - 1
        if zeros is not None and bool((zeros == middle).all()):
            zeros = None
        first, last = self.columns
        whole = _GroupedCodes(codes=codes, scales=scales, zeros=zeros, group_size=self._group)
        if order is not None:
            whole = _by_group(whole, order, middle)
        small = self.kind.bits == 4
        shift = 0 if small else middle
        signed = whole.codes if small else (whole.codes.int() - middle).char()
        return QuantizedWeight(
            encoding=Encoding.INT4 if small else Encoding.INT8,
            codes=pack_nibbles(signed) if small else signed.contiguous(),
            scales=whole.scales.contiguous(),
            zeros=None if whole.zeros is None else (whole.zeros.int() - shift).char().contiguous(),
            group_size=whole.group_size,
            offset=0 if order is not None or self._num_groups == 1 else first % self._group,
            columns=whole.columns,
            num_inputs=last - first,
            dtype=self.dtype,
        )


def _words(span: Span, per_word: int) -> Span:
    """The words that hold a span of codes."""
    return span[0] // per_word, -(-span[1] // per_word)


def _cut(codes: Tensor, span: Span, per_word: int) -> Tensor:
    """The columns of a span, out of the codes of its words."""
    skipped = span[0] % per_word
    return codes[:, skipped : skipped + span[1] - span[0]]


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 `[A, W]` as uint8 `[A, W * codes of a word]`."""
    shifts = torch.arange(0, _WORD_BITS, bits, device=words.device, dtype=torch.int32)
    codes: Tensor = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.byte().flatten(1)


def _awq_unpacked(words: Tensor) -> Tensor:
    codes: Tensor = _unpacked(words, 4).unflatten(1, (-1, len(_AWQ_PLACES)))
    return codes[..., list(_AWQ_PLACES)].flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupedCodes:
    """Codes `[N, K]`, scales and zero points `[N, G]` of columns that lie by group. `columns`: the
    input of each."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    columns: Tensor | None = None


def _by_group(stored: _GroupedCodes, group_of: Tensor, middle: int) -> _GroupedCodes:
    """Columns sorted by group. A rank's slice may have any number of columns of a group: groups are
    halved and filled with columns of value 0 until all have one size, by the size that takes the
    fewest bytes."""
    num_groups = stored.scales.shape[1]
    counts = torch.bincount(group_of, minlength=num_groups)
    size = _best_size(counts, stored.group_size)
    parts = -(-counts // size)
    begins = (parts.cumsum(0) - parts) * size
    order = group_of.argsort(stable=True)
    sorted_groups = group_of[order]
    rank_in_group = torch.arange(len(order), device=order.device) - (
        counts.cumsum(0) - counts
    ).take(sorted_groups)
    places = begins.take(sorted_groups) + rank_in_group

    tables = torch.arange(num_groups, device=order.device).repeat_interleave(parts)
    scales = stored.scales[:, tables]
    zeros = None if stored.zeros is None else stored.zeros[:, tables]
    width = int(parts.sum()) * size
    if zeros is None:
        codes = stored.codes.new_full((stored.codes.shape[0], width), middle)
    else:
        codes = zeros.to(stored.codes.dtype).repeat_interleave(size, 1)
    codes[:, places] = stored.codes[:, order]
    columns = torch.zeros(width, dtype=torch.int64, device=order.device)
    columns[places] = order
    return _GroupedCodes(codes=codes, scales=scales, zeros=zeros, group_size=size, columns=columns)


def _best_size(counts: Tensor, group_size: int) -> int:
    sizes = [group_size]
    while sizes[-1] % 2 == 0 and sizes[-1] > _SMALLEST_GROUP:
        sizes.append(sizes[-1] // 2)

    def bits(size: int) -> int:
        parts = int((-(-counts // size)).sum())
        return parts * (4 * size + _TABLE_BITS)

    return min(sizes, key=bits)
