"""A decoder's configuration, as its family reads it from config.json."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum

from engine.kernels.activation import Activation
from engine.model.formats.stated import CheckpointFormat
from engine.model.rope import RopeConfig


class QkNorm(StrEnum):
    """RMS norm of queries and keys before they are rotated."""

    NONE = "none"
    HEAD = "head"  # of each head by itself, one weight for all (Qwen 3, Gemma 3)
    ALL = "all"  # over all heads together (OLMo 2)


class NormPlacement(StrEnum):
    """Where a layer's RMS norms stand around attention and around the MLP."""

    BEFORE = "before"  # Llama
    AFTER = "after"  # OLMo 2: of the output, before it is added to the residual stream
    AROUND = "around"  # Gemma 2 and 3: both


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer.

    rope: None where positions are not encoded. window: a token attends to itself and to the
    window - 1 tokens before it; None to all of them. num_kv_heads, head_dim: where they are not the
    model's. values_are_keys: values are the products of the keys' projection.
    """

    rope: RopeConfig | None
    window: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    values_are_keys: bool = False


#: Fields that no KV depends on, or that a fingerprint has by themselves.
_NOT_DESCRIBED = frozenset(
    {
        *("vocab_size", "max_position_embeddings", "tie_word_embeddings", "fused_weights"),
        *("final_softcap", "logit_scale", "num_kv_heads", "head_dim", "layers"),
        "quantization",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder. Head counts are those of the whole model.

    attention_scale multiplies q . k; a softcap c replaces a score or logit x by c tanh(x / c).
    embedding_scale, residual_scale and logit_scale multiply the embeddings, what attention and MLP
    add to the residual stream, and the logits. norm_offset is added to the weights of RMS norms,
    which multiply in float32 where it is not None. normed_values: heads of values are normed, too,
    without a weight. scaled_layers: each has a factor of its output.
    fused_weights: the checkpoint stores q, k, v in one tensor, and gate and up in another.
    quantization: how it stores matrices, None: as they are.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused_weights: bool = False
    quantization: CheckpointFormat | None = None
    activation: Activation = Activation.SILU
    norms: NormPlacement = NormPlacement.BEFORE
    norm_offset: float | None = None
    qk_norm: QkNorm = QkNorm.NONE
    normed_values: bool = False
    scaled_layers: bool = False
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """KV heads and head size of each layer."""
        return tuple(
            (layer.num_kv_heads or self.num_kv_heads, layer.head_dim or self.head_dim)
            for layer in self.layers
        )

    def of_layer(self, index: int) -> ModelConfig:
        """The model as one of its layers has it."""
        num_kv_heads, head_dim = self.kv_shapes[index]
        layer = self.layers[index]
        return replace(self, num_kv_heads=num_kv_heads, head_dim=head_dim, layers=(layer,))

    def windows(self, max_model_len: int) -> list[int | None]:
        """The window of each layer, None where no context of so many tokens exceeds it."""
        return [
            x.window if x.window is not None and x.window < max_model_len else None
            for x in self.layers
        ]

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that turn, the same in all layers that encode positions where these
        have heads of one size."""
        turned = {x.rope.rotary_dim(self.head_dim) for x in self.layers if x.rope is not None}
        (dim,) = turned or {self.head_dim}
        return dim

    def describe(self) -> str:
        """What determines KV besides the weights and positions, for fingerprints."""
        stated = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return " ".join(
            f"{name}={value!s}"
            for name, value, default in stated
            if value != default and name not in _NOT_DESCRIBED
        )

    def describe_positions(self, max_model_len: int) -> str:
        """A text that is equal for two deployments exactly when positions mean the same."""
        kinds: dict[str, list[int]] = {}
        windows = self.windows(max_model_len)
        for index, (layer, window) in enumerate(zip(self.layers, windows, strict=True)):
            rope, (heads, dim) = layer.rope, self.kv_shapes[index]
            text = "none" if rope is None else rope.fixed(max_model_len, dim).describe()
            text += "" if window is None else f" window={window}"
            text += "" if layer.head_dim is None else f" kv={heads}x{dim}"
            kinds.setdefault(text, []).append(index)
        if len(kinds) == 1:
            return next(iter(kinds))
        return "; ".join(f"{text} layers={layers}" for text, layers in kinds.items())
