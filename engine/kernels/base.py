"""The operations of one rank on a device, behind one Protocol.

Shapes: T tokens of the step, S sequences, H hidden, Q and K query and KV heads of this rank, D head
dim, B tokens per block, I MLP columns of this rank. A KV layer is `[block, 2, K, B, D]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.quantization.weight import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of one rank's attention. `scale` multiplies q . k before the softmax;
    `softcap` c replaces a score x by c tanh(x / c) then."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    dtype: torch.dtype
    softcap: float | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlace:
    """Where the KV heads of a layer lie among the `num_planes` planes of a slot on this rank, where
    layers differ in their KV heads (engine.model.kv_groups.KVPlanes). `part`: its number among the
    layers of the slot."""

    num_kv_heads: int
    head_dim: int
    num_planes: int
    plane_dim: int
    part: int

    @property
    def per_head(self) -> int:
        """Planes of a head."""
        return self.head_dim // self.plane_dim

    def planes(self) -> Tensor:
        """The planes `[k/v, head, plane of the head]`, counted over k and v."""
        heads = torch.arange(2 * self.num_kv_heads) * (self.num_planes // self.num_kv_heads)
        own = torch.arange(self.per_head) + self.part * self.per_head
        return (heads[:, None] + own).view(2, self.num_kv_heads, self.per_head)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step laid out in rows: sequences that run one token first, longer chunks after them.

    Host tensors, all int64. Sequence s runs `queries[s]` rows; afterwards `contexts[s]` tokens of
    it are in the KV, in `block_ids[s]` (exactly the blocks they need). Layers with a window have a
    StepInputs whose contexts and blocks begin with the first block that the step sees.

    token_ids, positions, slots: `[T]`; slot = block * block_size + offset of the row's KV.
    num_decodes: how many leading sequences run exactly one token.
    sample_rows: `[n]`, rows whose logits are wanted, ascending. score_rows: `[m]`, rows of prompts
    whose hidden states are.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    block_ids: tuple[tuple[int, ...], ...]
    num_decodes: int
    sample_rows: Tensor
    score_rows: Tensor

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def samples_all(self) -> bool:
        """Whether every row is sampled and no other, as in a step of decodes only."""
        return self.sample_rows.shape[0] == self.num_tokens and not self.score_rows.shape[0]


class Product(Protocol):
    """Rows times weights of this rank, stored in a form of the device's choice."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`."""


class Linear(Product, Protocol):
    """The product x W^T + b."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The sum residual + x W^T + b."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """A layer of the plain shape, whole on this rank: h += out(attention(qkv(norm(h)))), then
    h += down(gate_up(norm(h)))."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Product
    down: Linear
    eps: float


class LayerStack(Protocol):
    """Layers that run as one operation."""

    def __call__(self, h: Tensor, kv: Sequence[Tensor], plans: Sequence[Any]) -> Tensor | None:
        """`[T, H]` behind all of them, given KV and plan of each; None: this step takes them one by
        one."""


class Kernels(Protocol):
    """The operations of one rank on one device, for any model. `prepare` computes what the layers
    of a step share; the calls of each layer take it as `plan`."""

    def loaded(self) -> None:
        """Called once, after all weights were passed to `linear` and `gated_linear`."""

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """A linear product; may keep only a packed form of `weight` `[out, in]`."""

    def gated_linear(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = Activation.SILU,
    ) -> Product:
        """The product act(x gate^T + b) * (x up^T + b): `[T, H] -> [T, I]`."""

    def prepare(
        self,
        inputs: StepInputs,
        cos: Tensor,
        sin: Tensor,
        window: int | None = None,
        place: KVPlace | None = None,
    ) -> Any:
        """Work done once per step and kind of layer. cos, sin: float32 tables `[positions, D / 2]`.
        window: tokens that a row sees, itself included; None: all. place: None where all layers
        have the same KV heads."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm x / sqrt(mean(x^2) + eps) * weight of each row: `[T, H]`."""

    def rope_and_write_kv(self, qkv: Tensor, kv: Tensor, plan: Any) -> Tensor:
        """Rotate q and k of `qkv` `[T, (Q + 2 K) D]`, write k and v into `kv`; q as `[T, Q, D]`."""

    def paged_attention(self, q: Tensor, kv: Tensor, plan: Any) -> Tensor:
        """Causal attention of each row over its sequence's KV: `[T, Q, D] -> [T, Q D]`."""

    def stack(self, layers: Sequence[LayerParts]) -> LayerStack | None:
        """These layers as one operation, with the same results; None where there is none."""
