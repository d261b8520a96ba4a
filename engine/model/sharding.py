"""The part of a model that each tensor-parallel rank holds; computed before weights load."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ModelRefused
from engine.model.config import ModelConfig

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One rank's half-open ranges of heads, MLP columns and vocabulary rows.

    `vocab_rows` is the same on every rank; rows past the end of `vocab` are padding.
    """

    rank: int
    size: int
    kv_heads: Span
    q_heads: Span
    intermediate: Span
    vocab: Span
    vocab_rows: int

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def num_q_heads(self) -> int:
        return self.q_heads[1] - self.q_heads[0]


def allowed_degrees(model: ModelConfig) -> tuple[int, ...]:
    """The tensor-parallel degrees of a model, ascending.

    Up to the number of KV heads every degree works: ranks get whole KV heads, as evenly as
    possible. Beyond it KV heads are replicated, which needs equal slices of each head's queries.
    Where layers differ in their KV heads, ranks get equal shares of all.
    """
    counts = {heads for heads, _ in model.kv_shapes}
    if len(set(model.kv_shapes)) > 1:
        return tuple(n for n in range(1, min(counts) + 1) if all(x % n == 0 for x in counts))
    grouped = range(1, model.num_kv_heads + 1)
    split = range(2, model.group_size + 1)
    replicated = [model.num_kv_heads * n for n in split if model.group_size % n == 0]
    return (*grouped, *replicated)


def share_of(model: ModelConfig, rank: int, size: int) -> RankShare:
    """What `rank` of `size` holds. Raises ModelRefused naming the allowed degrees."""
    allowed = allowed_degrees(model)
    if size not in allowed:
        raise ModelRefused(
            f"tp_size {size} cannot split {model.num_heads} query heads over {_kv_heads(model)} "
            f"KV heads; allowed: {', '.join(map(str, allowed))}",
            param="tp_size",
        )
    kv_heads, q_heads = _heads(model, rank, size)
    rows = -(-model.vocab_size // size)
    return RankShare(
        rank=rank,
        size=size,
        kv_heads=kv_heads,
        q_heads=q_heads,
        intermediate=_even(model.intermediate_size, rank, size),
        vocab=(min(rank * rows, model.vocab_size), min((rank + 1) * rows, model.vocab_size)),
        vocab_rows=rows,
    )


def rank_heads(model: ModelConfig, size: int) -> tuple[Span, ...]:
    return tuple(share_of(model, rank, size).kv_heads for rank in range(size))


def _kv_heads(model: ModelConfig) -> str:
    return " or ".join(map(str, sorted({heads for heads, _ in model.kv_shapes})))


def _even(total: int, rank: int, size: int) -> Span:
    return total * rank // size, total * (rank + 1) // size


def _heads(model: ModelConfig, rank: int, size: int) -> tuple[Span, Span]:
    group = model.group_size
    if size <= model.num_kv_heads:
        first, last = _even(model.num_kv_heads, rank, size)
        return (first, last), (first * group, last * group)
    copies = size // model.num_kv_heads
    head = rank // copies
    queries = group // copies
    return (head, head + 1), (rank * queries, (rank + 1) * queries)
