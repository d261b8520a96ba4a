"""CPU operations: few torch calls a layer, weights packed for oneDNN where that is faster.

Shapes as in engine.kernels.base.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.activation import Activation
from engine.kernels.base import Geometry, KVPlace, Linear, Product, StepInputs
from engine.kernels.cpu.huge_pages import advise_huge_pages
from engine.quantization.weight import Weight, dense
from engine.torch_private import mkldnn_operators

#: KV in one byte a value, e4m3 with the scale 1; what is larger than 448 becomes that.
CODES = torch.float8_e4m3fn
#: Rows of queries that one attention product of a prompt chunk takes.
_QUERY_TILE = 128
#: A decode group is cut where padding would exceed this share of its longest context.
_MAX_PADDING = 0.5
_ROWS_HINT = 16  # rows of x that the packed layout is chosen for; others work as well


_supported, _pack, _product = mkldnn_operators()


def packs(dtype: torch.dtype) -> bool:
    """Whether packed products exist here and pay: bfloat16 only, float32 gains nothing."""
    if dtype is not torch.bfloat16 or None in (_supported, _pack, _product):
        return False
    return torch.backends.mkldnn.is_available() and bool(_supported())


class PackedLinear:
    """The product x W^T + b, the sum with a residual fused into it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight: Tensor = _pack(weight, _ROWS_HINT)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = _product(x, self.weight, self._bias, "none", [], "")
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = _product.binary(x, residual, self.weight, self._bias, "add")
        return out


class PackedGated:
    """The gated product silu(x gate^T + b) * (x up^T + b), silu and the product fused."""

    def __init__(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None
    ) -> None:
        self.gate: Tensor = _pack(gate, _ROWS_HINT)
        self.up: Tensor = _pack(up, _ROWS_HINT)
        self._gate_bias = gate_bias
        self._up_bias = up_bias

    def __call__(self, x: Tensor) -> Tensor:
        gate = _product(x, self.gate, self._gate_bias, "swish", [], "")
        out: Tensor = _product.binary(x, gate, self.up, self._up_bias, "mul")
        return out


class DenseLinear:
    """x W^T + b with the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if self._bias is not None:
            residual = residual + self._bias
        return torch.addmm(residual, x, self._transposed)


class DenseGated:
    """act(x gate^T + b) * (x up^T + b) as two products."""

    def __init__(
        self, gate: Product, up: Product, activation: Activation = Activation.SILU
    ) -> None:
        self._gate = gate
        self._up = up
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H] -> [T, I]`."""
        gate = self._gate(x)
        if self._activation is Activation.GELU_TANH:
            return functional.gelu(gate, approximate="tanh").mul_(self._up(x))
        return functional.silu(gate, inplace=True).mul_(self._up(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Sequences of one step that attend together: rows `rows`, `queries` of them per sequence.

    pages: rows of the KV layer seen as `[(block, k/v, head), B D]`, ordered (k/v, sequence, head,
    block), so that gathering them gives dense k and v (of heads in several planes: `_pages`).
    mask: added to the scores, `[sequences K, 1, length]`; of a chunk to one tile of them,
    `[tile, 1, tile]`. unused: rows of what is gathered, seen as `[(k/v, sequence, head, token),
    D]`, that decodes do not see. window: tokens that a row of a chunk sees, itself included; None:
    all.
    """

    rows: slice
    num_sequences: int
    queries: int
    length: int
    pages: Tensor
    mask: Tensor
    unused: Tensor
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    """What the layers of one step share."""

    geometry: Geometry
    cos: Tensor
    sin: Tensor
    kv_rows: Tensor
    groups: tuple[AttentionGroup, ...]
    planes_per_head: int


class CpuKernels:
    """engine.kernels.base.Kernels on the CPU."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._packs = packs(geometry.dtype)
        self._weights: list[Tensor] = []

    def use_threads(self, count: int) -> None:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def loaded(self) -> None:
        advise_huge_pages(self._weights)
        self._weights.clear()

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        weight = dense(weight)
        if not self._packs:
            return DenseLinear(weight, bias)
        linear = PackedLinear(weight, bias)
        self._weights.append(linear.weight)
        return linear

    def gated_linear(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = Activation.SILU,
    ) -> Product:
        gate, up = dense(gate), dense(up)
        if activation is not Activation.SILU:
            return DenseGated(self.linear(gate, gate_bias), self.linear(up, up_bias), activation)
        if self._packs:
            packed = PackedGated(gate, up, gate_bias, up_bias)
            self._weights += (packed.gate, packed.up)
            return packed
        return DenseGated(DenseLinear(gate, gate_bias), DenseLinear(up, up_bias))

    def prepare(
        self,
        inputs: StepInputs,
        cos: Tensor,
        sin: Tensor,
        window: int | None = None,
        place: KVPlace | None = None,
    ) -> CpuPlan:
        """Row indexes, masks and rotations of the step: once what every layer needs."""
        geometry = self.geometry
        if place is None:
            place = _plain_place(geometry)
        else:
            geometry = replace(geometry, num_kv_heads=place.num_kv_heads, head_dim=place.head_dim)
        row_cos, row_sin = cos[inputs.positions], sin[inputs.positions]
        blocks = inputs.slots // geometry.block_size
        offsets = inputs.slots % geometry.block_size
        planes = place.planes().flatten()  # (k/v, head, plane of the head), as qkv has them
        kv_rows = (blocks[:, None] * (2 * place.num_planes) + planes) * geometry.block_size
        return CpuPlan(
            geometry=geometry,
            planes_per_head=place.per_head,
            cos=torch.cat((row_cos, row_cos), -1)[:, None].to(geometry.dtype),
            sin=torch.cat((-row_sin, row_sin), -1)[:, None].to(geometry.dtype),
            kv_rows=kv_rows + offsets[:, None],
            groups=(
                *_decode_groups(inputs, geometry, window, place),
                *_chunk_groups(inputs, geometry, window, place),
            ),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def rope_and_write_kv(self, qkv: Tensor, kv: Tensor, plan: CpuPlan) -> Tensor:
        """Rotate q and k in place, write k and v, return q `[T, Q, D]`, a view of `qkv`."""
        geometry = plan.geometry
        q_heads, dim = geometry.num_q_heads, geometry.head_dim
        heads = qkv.view(qkv.shape[0], q_heads + 2 * geometry.num_kv_heads, dim)
        turning = heads[:, : q_heads + geometry.num_kv_heads]
        # x cos + (x with its halves swapped) (-sin | sin) is the rotate-half rotation.
        swapped = turning.roll(dim // 2, -1)
        torch.addcmul(turning * plan.cos, swapped, plan.sin, out=turning)
        new = qkv[:, q_heads * dim :].unflatten(1, (*plan.kv_rows.shape[1:], -1))
        if kv.dtype is CODES:
            kv, new = kv.view(torch.uint8), new.clamp(-448.0, 448.0).to(CODES).view(torch.uint8)
        kv.view(-1, new.shape[-1]).index_put_((plan.kv_rows,), new)
        return heads[:, :q_heads]

    def stack(self, layers: object) -> None:
        """One by one: a step lasts longer than its calls."""

    def paged_attention(self, q: Tensor, kv: Tensor, plan: CpuPlan) -> Tensor:
        geometry = plan.geometry
        pages = kv.view(-1, geometry.block_size * geometry.head_dim // plan.planes_per_head)
        parts = [
            _attend(q[group.rows], pages, group, geometry, plan.planes_per_head)
            for group in plan.groups
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of each row; in float32 where the weight is."""
    if weight.dtype is not x.dtype:
        return functional.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _plain_place(geometry: Geometry) -> KVPlace:
    """A plane for each head."""
    heads, dim = geometry.num_kv_heads, geometry.head_dim
    return KVPlace(num_kv_heads=heads, head_dim=dim, num_planes=heads, plane_dim=dim, part=0)


def _decode_groups(
    inputs: StepInputs, geometry: Geometry, window: int | None, place: KVPlace
) -> list[AttentionGroup]:
    """Decodes, longest context first, cut into groups that can be padded to one length."""
    groups = []
    first = 0
    while first < inputs.num_decodes:
        shortest = len(inputs.block_ids[first]) * (1 - _MAX_PADDING)
        last = first + 1
        while last < inputs.num_decodes and len(inputs.block_ids[last]) >= shortest:
            last += 1
        groups.append(_decode_group(inputs, first, last, geometry, window, place))
        first = last
    return groups


def _decode_group(
    inputs: StepInputs,
    first: int,
    last: int,
    geometry: Geometry,
    window: int | None,
    place: KVPlace,
) -> AttentionGroup:
    longest = max(map(len, inputs.block_ids[first:last]))
    # A shorter sequence is padded with its own last block: masked, and never another's KV.
    tables = [ids + ids[-1:] * (longest - len(ids)) for ids in inputs.block_ids[first:last]]
    contexts = torch.tensor(inputs.contexts[first:last])
    length = longest * geometry.block_size
    positions = torch.arange(length)[None, :]
    hidden = positions >= contexts[:, None]
    if window is not None:
        hidden |= positions < contexts[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=geometry.dtype).masked_fill_(hidden, -torch.inf)
    return AttentionGroup(
        rows=slice(first, last),
        num_sequences=last - first,
        queries=1,
        length=length,
        pages=_pages(torch.tensor(tables), place),
        mask=mask.repeat_interleave(geometry.num_kv_heads, 0)[:, None],
        unused=hidden[:, None].expand(2, -1, geometry.num_kv_heads, -1).flatten().nonzero()[:, 0],
    )


def _chunk_groups(
    inputs: StepInputs, geometry: Geometry, window: int | None, place: KVPlace
) -> list[AttentionGroup]:
    """Each longer chunk on its own; the mask covers one tile of its rows."""
    groups = []
    row = inputs.num_decodes
    for s in range(inputs.num_decodes, len(inputs.queries)):
        queries = inputs.queries[s]
        tile = min(queries, _QUERY_TILE)
        future = torch.ones(tile, tile, dtype=torch.bool).triu_(1)
        mask = torch.zeros(tile, tile, dtype=geometry.dtype).masked_fill_(future, -torch.inf)
        groups.append(
            AttentionGroup(
                rows=slice(row, row + queries),
                num_sequences=1,
                queries=queries,
                length=inputs.contexts[s],
                pages=_pages(torch.tensor([inputs.block_ids[s]]), place),
                mask=mask[:, None],
                unused=torch.empty(0, dtype=torch.int64),
                window=window,
            )
        )
        row += queries
    return groups


def _pages(tables: Tensor, place: KVPlace) -> Tensor:
    """Page rows in the order (k/v, sequence, head, block, plane of the head) of block tables
    `[sequences, blocks]`."""
    planes = place.planes()[:, None, :, None, :]
    return (tables[None, :, None, :, None] * (2 * place.num_planes) + planes).flatten()


def _attend(
    q: Tensor, pages: Tensor, group: AttentionGroup, geometry: Geometry, planes_per_head: int
) -> Tensor:
    if pages.dtype is CODES:
        codes = pages.view(torch.uint8).index_select(0, group.pages)
        gathered = codes.view(CODES).to(q.dtype)
    else:
        gathered = pages.index_select(0, group.pages)
    if planes_per_head > 1:  # a token's dims lie in several pages
        parts = gathered.view(
            -1, planes_per_head, geometry.block_size, pages.shape[1] // geometry.block_size
        )
        gathered = parts.transpose(1, 2).contiguous()
    k, v = gathered.view(
        2, group.num_sequences * geometry.num_kv_heads, -1, geometry.head_dim
    ).unbind()
    if group.queries == 1:
        # Stale KV may be NaN, which no mask and no weight of 0 keeps out of a sum.
        gathered.view(-1, geometry.head_dim).index_fill_(0, group.unused, 0.0)
        return _attend_decodes(q, k, v, group.mask, geometry)
    return _attend_chunk(q, k, v, group, geometry)


def _attend_decodes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, geometry: Geometry) -> Tensor:
    """One query per sequence. Queries that share a KV head are the rows of one product."""
    num_sequences = q.shape[0]
    q = q.reshape(k.shape[0], geometry.group_size, geometry.head_dim)
    if geometry.softcap is None:
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=geometry.scale)
    else:
        scores = _capped(torch.bmm(q, k.transpose(1, 2)) * geometry.scale, geometry) + mask
    out = torch.bmm(scores.softmax(-1), v)
    return out.reshape(num_sequences, -1)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, geometry: Geometry
) -> Tensor:
    """A chunk of one sequence, tile by tile: no product covers more future than one tile."""
    kv_heads, size, dim = geometry.num_kv_heads, geometry.group_size, geometry.head_dim
    q = q.reshape(group.queries, kv_heads, size, dim)
    history = group.length - group.queries
    out = torch.empty(group.queries, kv_heads, size, dim, dtype=q.dtype)
    nothing = torch.zeros(1, 1, 1, dtype=q.dtype)
    for first in range(0, group.queries, _QUERY_TILE):
        last = min(first + _QUERY_TILE, group.queries)
        rows, seen = last - first, history + last
        start = 0 if group.window is None else max(0, history + first + 1 - group.window)
        tile = q[first:last].transpose(0, 1).reshape(kv_heads, rows * size, dim)
        scores = torch.baddbmm(
            nothing, tile, k[:, start:seen].transpose(1, 2), beta=0, alpha=geometry.scale
        )
        if geometry.softcap is not None:
            scores = _capped(scores, geometry)
        by_row = scores.view(kv_heads, rows, size, seen - start)
        by_row[..., seen - start - rows :] += group.mask[:rows, :, :rows]
        if group.window is not None:
            by_row.masked_fill_(
                _before_window(history + first, rows, start, seen, group), -torch.inf
            )
        result = torch.bmm(scores.softmax(-1), v[:, start:seen])
        out[first:last] = result.view(kv_heads, rows, size, dim).transpose(0, 1)
    return out.view(group.queries, -1)


def _before_window(
    position: int, rows: int, start: int, seen: int, group: AttentionGroup
) -> Tensor:
    """Which of the tokens start .. seen each row, from `position` on, is too far from:
    `[rows, 1, seen - start]`."""
    assert group.window is not None
    last_hidden = torch.arange(position, position + rows) - group.window
    return (torch.arange(start, seen)[None, :] <= last_hidden[:, None])[:, None]


def _capped(scores: Tensor, geometry: Geometry) -> Tensor:
    """c tanh(x / c) of each score (Gemma 2)."""
    assert geometry.softcap is not None
    return scores.div_(geometry.softcap).tanh_().mul_(geometry.softcap)
