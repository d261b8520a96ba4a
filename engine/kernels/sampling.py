"""Sampling with counter-based noise: the same ids in any batch, on any worker, after preemption.

The noise of (seed, position, token) is a hash: no state is kept from token to token. A sampled row
takes argmax(logits / temperature + Gumbel noise) over the tokens that its filters leave, which
draws from the softmax (Gumbel, 1954). Hashes use 32-bit integers, which wrap alike everywhere.

Logits change first, in vLLM's order: tokens that are banned, logit_bias, repetition penalty (as
transformers' RepetitionPenaltyLogitsProcessor), frequency and presence penalty (as OpenAI defines
them); then come temperature, top-k, top-p and min-p. The changes are in float32 and reach each
(row, token) once, so results are equal on every device and in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.batch import SequenceStep
from protocol.sampling import SamplingParams

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
#: Highest logits that are tried before the whole row.
_SHORT_SORT = 256
#: Bins of a longer nucleus and their width: 32 nats in all.
_BINS = 4096
_BINS_PER_NAT = 128
#: Values that one step of `argmax` covers.
_RUN = 256
#: Ids that one program of the mask kernel covers.
_MASK_CHUNK = 4096


def mask_bytes(vocab_size: int) -> int:
    """Length of a mask: one bit per id, in whole 32-bit words."""
    return -(-vocab_size // 32) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """The masked rows of a step.

    rows: int64 `[m]`, which rows of the logits; words: int32 `[m, words]`, bit i & 31 of word
    i >> 5 says whether id i may be chosen. Every row leaves at least one id.
    """

    rows: Tensor
    words: Tensor

    @staticmethod
    def build(allowed: Sequence[bytes | None], *, pinned: bool = False) -> TokenMasks | None:
        """From one mask per row, None for all ids; None when no row has a mask."""
        rows = [row for row, mask in enumerate(allowed) if mask is not None]
        if not rows:
            return None
        packed = np.frombuffer(b"".join(filter(None, allowed)), dtype="<i4").copy()
        words = torch.from_numpy(packed).view(len(rows), -1)
        return TokenMasks(
            rows=torch.tensor(rows, pin_memory=pinned),
            words=words.pin_memory() if pinned else words,
        )

    def apply(self, logits: Tensor, *, first_id: int = 0) -> None:
        """Set logits of other ids to -inf, in place. `logits` `[rows, n]` begin at id first_id."""
        if logits.is_cuda:
            device = logits.device
            rows = self.rows.to(device, non_blocking=True)
            mask_on_device(logits, rows, self.words.to(device, non_blocking=True), first_id)
            return
        last_id = first_id + logits.shape[1]
        for row, words in zip(self.rows.tolist(), self.words.numpy(), strict=True):
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[first_id:last_id]
            logits[row].masked_fill_(torch.from_numpy(bits == 0), -torch.inf)


def mask_on_device(logits: Tensor, rows: Tensor, words: Tensor, first_id: int) -> None:
    """`TokenMasks.apply` as one kernel; every tensor is on the device of `logits`."""
    # Only here: an engine on a CPU needs no triton.
    import triton

    from engine.kernels.jit.sampling import mask_rows

    grid = (rows.shape[0], triton.cdiv(logits.shape[1], _MASK_CHUNK))
    mask_rows[grid](
        logits,
        logits.stride(0),
        rows,
        words,
        words.shape[1],
        logits.shape[1],
        first_id,
        BLOCK=_MASK_CHUNK,
        num_warps=4,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Biases and penalties of a step's rows, as flat lists of (row, token) entries on the host.

    bias_at: int64 `[2, b]`, rows and tokens; bias: float32 `[b]`. seen_at: int64 `[2, s]`, the
    tokens that penalties apply to; seen: float32 `[4, s]`: count of the token in the output, and
    repetition, frequency and presence penalty of the row.
    """

    bias_at: Tensor
    bias: Tensor
    seen_at: Tensor
    seen: Tensor

    @staticmethod
    def build(steps: Sequence[SequenceStep], *, pinned: bool = False) -> Penalties | None:
        """From one sampled sequence per row; None without any. `pinned`: for copies to a GPU."""
        rows = [
            (row, step, params)
            for row, step in enumerate(steps)
            if (params := step.sampling) and (step.seen or params.logit_bias)
        ]
        if not rows:
            return None
        # By numpy: thousands per row are too many for lists, and too few for torch's threads, which
        # may have to wait for a core.
        numbers = chain.from_iterable(chain.from_iterable(p.logit_bias for _, _, p in rows))
        pairs = np.fromiter(numbers, np.float64).reshape(-1, 2)
        tokens = np.frombuffer(b"".join(step.seen for _, step, _ in rows), np.int32)
        bias_at, seen_at = (np.empty((2, len(of)), np.int64) for of in (pairs, tokens))
        bias_at[1], seen_at[1] = pairs[:, 0], tokens
        seen = np.empty((4, len(tokens)), np.float32)
        seen[0] = np.frombuffer(b"".join(step.counts for _, step, _ in rows), np.int32)
        biased = penalised = 0
        for row, step, p in rows:
            bias_at[0, slice(biased, biased := biased + len(p.logit_bias))] = row
            part = slice(penalised, penalised := penalised + len(step.seen) // 4)
            seen_at[0, part] = row
            seen[1:, part] = [[p.repetition_penalty], [p.frequency_penalty], [p.presence_penalty]]
        parts = map(torch.from_numpy, (bias_at, pairs[:, 1].astype(np.float32), seen_at, seen))
        at, values, looked, table = (part.pin_memory() if pinned else part for part in parts)
        return Penalties(bias_at=at, bias=values, seen_at=looked, seen=table)

    def apply(self, logits: Tensor) -> None:
        """Change `logits` `[rows, vocabulary]`, float32, in place. Does not wait for the device."""
        device = logits.device
        if self.bias.shape[0]:
            rows, tokens = self.bias_at.to(device, non_blocking=True)
            logits[rows, tokens] += self.bias.to(device, non_blocking=True)
        if self.seen.shape[1]:
            rows, tokens = self.seen_at.to(device, non_blocking=True)
            count, repetition, frequency, presence = self.seen.to(device, non_blocking=True)
            value = logits[rows, tokens]
            value = torch.where(value > 0, value / repetition, value * repetition)
            logits[rows, tokens] = value - frequency * count - presence * (count > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """How each row is sampled. Host tensors, `[sampled rows]`; greedy rows are in none of them.

    banned: (row, token) pairs that must not be chosen. masks: rows with a grammar. penalties: other
    changes of logits. rows: the sampled rows. keys: `[rows, 2]` int32 from (seed, position).
    filtered: whether any row has top_k, top_p or min_p set.
    """

    num_rows: int
    banned: tuple[tuple[int, int], ...]
    penalties: Penalties | None
    masks: TokenMasks | None
    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    filtered: bool

    @staticmethod
    def build(
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        banned: Sequence[Sequence[int]],
        penalties: Penalties | None = None,
        allowed: Sequence[bytes | None] = (),
    ) -> SamplingInputs:
        """One entry per row: parameters, position of the sampled token, banned ids, mask."""
        rows = [row for row, p in enumerate(params) if not p.greedy]
        chosen = [params[row] for row in rows]
        keys = [noise_key(params[row].seed, positions[row]) for row in rows]
        return SamplingInputs(
            num_rows=len(params),
            banned=tuple((row, token) for row, ids in enumerate(banned) for token in ids),
            penalties=penalties,
            masks=TokenMasks.build(allowed),
            rows=torch.tensor(rows, dtype=torch.int64),
            temperature=torch.tensor([p.temperature for p in chosen], dtype=torch.float32),
            top_k=torch.tensor([p.top_k for p in chosen], dtype=torch.int64),
            top_p=torch.tensor([p.top_p for p in chosen], dtype=torch.float32),
            min_p=torch.tensor([p.min_p for p in chosen], dtype=torch.float32),
            keys=torch.tensor(keys, dtype=torch.int32).view(-1, 2),
            filtered=any(p.filtered for p in chosen),
        )


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit keys of (seed, position), by splitmix64 (Steele et al., 2014)."""
    mixed = _mix64(_mix64(seed + _GOLDEN64) + position * _GOLDEN64)
    return _signed32(mixed & 0xFFFFFFFF), _signed32(mixed >> 32)


def _mix64(value: int) -> int:
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _signed32(value: int) -> int:
    return value - (1 << 32) if value & 0x80000000 else value


def _mix32(x: Tensor, key: Tensor | None = None) -> Tensor:
    """MurmurHash3's 32-bit finaliser in place on int32, `key` xored in half-way."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed32(0x85EBCA6B)
    if key is not None:
        x ^= key
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= _signed32(0xC2B2AE35)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 `[rows, tokens]`, of keys `[rows, 2]` and token ids, int32.
    23 bits give u in (0, 1), exact in float32: the noise is at most 16.7."""
    spread = _mix32(tokens * _signed32(0x9E3779B1))
    bits = _mix32(spread ^ keys[:, :1], keys[:, 1:])
    bits = (bits >> 9).bitwise_and_(0x7FFFFF)
    uniform = bits.float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def argmax(x: Tensor) -> Tensor:
    """Index of each row's highest value, the first of equals: `[rows, n] -> [rows]`.

    In two levels: torch's CPU maximum is vectorised, its arg-maximum is not, which makes this at
    least twice as fast on rows of a vocabulary.
    """
    whole = x.shape[1] // _RUN * _RUN
    if x.is_cuda or whole == 0:
        best: Tensor = x.max(dim=-1).indices
        return best
    runs = x[:, :whole].unflatten(1, (-1, _RUN))
    run = runs.amax(dim=-1).max(dim=-1).indices[:, None]
    value, inner = runs.gather(1, run[:, :, None].expand(-1, 1, _RUN))[:, 0].max(dim=-1)
    index: Tensor = run[:, 0] * _RUN + inner
    if whole == x.shape[1]:
        return index
    rest, offset = x[:, whole:].max(dim=-1)
    return torch.where(rest > value, offset + whole, index)


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """The next token of each row, int64 `[n]`. `logits` `[n, vocabulary]` may be written to.

    Ties go to the lowest id. No row's result depends on another row.
    """
    if inputs.banned:
        pairs = torch.tensor(inputs.banned, device=logits.device)
        logits[pairs[:, 0], pairs[:, 1]] = -torch.inf
    if inputs.penalties is not None:
        logits = logits.float()
        inputs.penalties.apply(logits)
    if inputs.masks is not None:
        inputs.masks.apply(logits)
    num_sampled = inputs.rows.shape[0]
    if num_sampled == 0:
        return argmax(logits)
    if num_sampled == inputs.num_rows:
        return _sample_rows(logits.float(), inputs)
    tokens = argmax(logits)
    rows = inputs.rows.to(logits.device)
    tokens[rows] = _sample_rows(logits[rows].float(), inputs)
    return tokens


def _sample_rows(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    keys = inputs.keys.to(logits.device)
    scaled = logits.div_(inputs.temperature.to(logits.device)[:, None])
    if not inputs.filtered:
        return _best_of_all(scaled, keys)
    head, ids = scaled.topk(min(scaled.shape[1], _SHORT_SORT), dim=-1)
    floor = _lowest_kept(head, scaled, inputs)
    kept = head + gumbel_noise(keys, ids.int())
    kept.masked_fill_(head < floor[:, None], -torch.inf)
    tokens = ids.gather(1, argmax(kept)[:, None])[:, 0]
    # Rows whose kept tokens may go beyond the head.
    long = (floor <= head[:, -1]).nonzero()[:, 0]
    if long.shape[0]:
        part = scaled[long]
        part.masked_fill_(part < floor[long, None], -torch.inf)
        tokens[long] = _best_of_all(part, keys[long])
    return tokens


def _best_of_all(scaled: Tensor, keys: Tensor) -> Tensor:
    ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    return argmax(scaled.add_(gumbel_noise(keys, ids)))


def _lowest_kept(head: Tensor, scaled: Tensor, inputs: SamplingInputs) -> Tensor:
    """The lowest scaled logit that top-k, then top-p, then min-p leave in each row, `[rows]`.

    `head`: the highest logits in order. Equal logits are kept or dropped together, so the order of
    a sort never matters.
    """
    device, vocabulary = scaled.device, scaled.shape[1]
    top_k, top_p = inputs.top_k.to(device), inputs.top_p.to(device)
    top_k = torch.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k)
    floor, known = _floor_from_head(head, scaled, top_k, top_p)
    whole = top_k == vocabulary
    min_p_floor = head[:, 0] + inputs.min_p.to(device).log()
    known |= whole & (min_p_floor > head[:, -1])  # top-p's floor is below the head, so below this
    rows = (~known & whole).nonzero()[:, 0]
    if rows.shape[0]:
        floor[rows] = _nucleus_floor(scaled[rows], top_p[rows])
    rows = (~known & ~whole).nonzero()[:, 0]
    if rows.shape[0]:
        ordered = scaled[rows].sort(dim=-1, descending=True).values
        floor[rows], _ = _floor_from_head(ordered, scaled[rows], top_k[rows], top_p[rows])
    return torch.maximum(floor, min_p_floor)


def _nucleus_floor(scaled: Tensor, top_p: Tensor) -> Tensor:
    """The lowest logit of each row's nucleus, `[rows]`, without sorting rows.

    A token is in the nucleus when those above it weigh less than top_p of all. Weights are summed
    in bins by distance from the top; only the bin that reaches top_p is sorted.
    """
    num_rows = scaled.shape[0]
    depth = scaled.amax(dim=-1, keepdim=True) - scaled
    bins = (depth * _BINS_PER_NAT).clamp_(max=_BINS - 1).long()
    weights = depth.neg_().exp_().double()
    flat = bins + torch.arange(num_rows, device=scaled.device)[:, None] * _BINS
    mass = flat.flatten().bincount(weights.flatten(), num_rows * _BINS).view(num_rows, _BINS)
    running = mass.cumsum(dim=-1)
    target = top_p.double() * running[:, -1]
    reached = (running - mass < target[:, None]).sum(dim=-1) - 1
    floor = torch.empty_like(scaled[:, 0])
    for row, last in enumerate(reached.tolist()):
        inside = bins[row] == last
        values, order = scaled[row][inside].sort(descending=True)
        weight = weights[row][inside][order]
        before = running[row, last] - mass[row, last] + weight.cumsum(0) - weight
        kept = int((before < target[row]).sum())
        floor[row] = values[max(kept, 1) - 1]
    return floor


def _floor_from_head(
    head: Tensor, scaled: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """(floor, whether `head` was long enough for it), from the highest logits in order."""
    width, vocabulary = head.shape[1], scaled.shape[1]
    whole = top_k >= vocabulary
    within = top_k <= width
    weights = (head - head[:, :1]).exp_().double()
    running = weights.cumsum(dim=-1)
    everything = (scaled - head[:, :1]).exp_().sum(dim=-1, dtype=torch.float64)
    last = (top_k - 1).clamp(max=width - 1)[:, None]
    total = torch.where(whole, everything, running.gather(1, last)[:, 0])
    kept = (running - weights < (top_p.double() * total)[:, None]).sum(dim=-1)
    every_p = top_p >= 1.0
    count = torch.where(every_p, top_k, torch.minimum(kept, top_k)).clamp(min=1)
    floor = head.gather(1, (count - 1).clamp(max=width - 1)[:, None])[:, 0]
    known = within | (whole & ((kept < width) | every_p)) | (width == vocabulary)
    return torch.where(whole & every_p, -torch.inf, floor), known
