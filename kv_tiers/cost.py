"""Measured rates of tiers, and when loading KV beats computing it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kv_tiers.commands import Tier

#: What is assumed of tiers that were not measured: bytes per second. Disks are measured before they
#: are used, and from time to time (rank_tiers).
_ASSUMED = {Tier.HOST: 8e9, Tier.DISK: 0.0}
#: A load takes at least this long: calls between threads.
_FIXED_S = 0.001
#: A rate below what is assumed of a tier that was never measured is believed less with time: it may
#: have been measured beside other work. Each time it doubles, up to that.
_DOUBLING_S = 30.0
#: Bytes after which a measurement weighs half.
_MEMORY_BYTES = 64 << 20
#: A copy so many times slower than usual counts once a second one is: the first loan of a peer
#: makes the link, which takes NCCL a second.
_OUTLIER_FACTOR = 10.0
#: One is not believed if it is the first, or comes after so many usual ones.
_FORGIVING = 8
#: A copy that takes so many times as long as it should, and longer than this, hangs.
_HANGS_FACTOR = 10.0
_HANGS_S = 0.5
#: A load is given up after so many times as long as it should take, or this.
_PATIENCE = 4.0
_PATIENCE_S = 0.1
#: The longest load while it is not known how long computing takes.
_SOON_S = 1.0


class TierRate:
    """Bytes per second of one tier, and what is queued there."""

    def __init__(self, assumed: float, *, fixed_s: float = _FIXED_S) -> None:
        """`assumed`: of a tier that was not measured yet. A load takes at least `fixed_s`."""
        self._assumed = assumed
        self._fixed_s = fixed_s
        self._measured: float | None = None
        self._measured_at = 0.0
        self._num_usual = _FORGIVING  # copies since the last outlier
        self._queued: dict[int, tuple[int, float]] = {}  # bytes and start of copies in flight

    @property
    def measured(self) -> float:
        """As it was last measured; 0 before."""
        return self._measured or 0.0

    def per_second(self, now: float) -> float:
        if self._measured is None:
            return self._assumed
        doublings = max(0.0, now - self._measured_at) / _DOUBLING_S
        grown = min(self._assumed, self._measured * math.exp2(min(doublings, 60.0)))
        return max(self._measured, grown)

    def probed(self, rate: float, now: float) -> None:
        """Measured on purpose, which counts more than what loads have told."""
        self._measured, self._measured_at = rate, now

    def begin(self, number: int, num_bytes: int, now: float) -> None:
        self._queued[number] = num_bytes, now

    def end(
        self, number: int, seconds: float, now: float, *, ok: bool, num_bytes: int | None = None
    ) -> None:
        """A copy has ended. One that failed says nothing about the rate. `num_bytes`: if it moved
        others than were expected."""
        begun, _ = self._queued.pop(number)
        num_bytes = begun if num_bytes is None else num_bytes
        if not ok or seconds <= 0 or not num_bytes:
            return
        rate = num_bytes / seconds
        slow = rate * _OUTLIER_FACTOR < self.per_second(now)
        forgiven = slow and self._num_usual >= _FORGIVING
        self._num_usual = 0 if slow else self._num_usual + 1
        if forgiven:
            return
        if self._measured is not None:
            keep = math.exp2(-num_bytes / _MEMORY_BYTES)
            rate = 1.0 / (keep / self._measured + (1.0 - keep) / rate)
        self._measured, self._measured_at = rate, now

    def load_s(self, num_bytes: int, now: float) -> float:
        """Seconds until so many bytes could be here, behind what is queued; infinity while a copy
        hangs."""
        rate = self.per_second(now)
        if not rate:
            return math.inf
        queued = sum(size for size, _ in self._queued.values())
        if self._queued:
            started = min(start for _, start in self._queued.values())
            if now - started > max(_HANGS_S, _HANGS_FACTOR * queued / rate):
                return math.inf
        return self._fixed_s + (queued + num_bytes) / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """So many leading blocks of a prompt could be here after `seconds`."""

    num_blocks: int
    seconds: float


class TierCosts:
    """What loads from the tiers below the pool take."""

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes`: of a rank."""
        self._block_bytes = block_bytes
        self.rates = {tier: TierRate(rate) for tier, rate in _ASSUMED.items()}

    def load_s(self, tiers: list[Tier], now: float) -> float:
        """Seconds for blocks that are in these tiers."""
        counts = Counter(tiers)
        counts[Tier.HOST] = len(tiers)  # what a file brings passes through host memory
        sizes = {tier: count * self._block_bytes for tier, count in counts.items()}
        return sum(self.rates[tier].load_s(size, now) for tier, size in sizes.items())

    def candidates(self, tiers: list[Tier], have: int, now: float) -> list[Candidate]:
        """Where a load of the blocks after the first `have`, which are in these tiers, may end."""
        num_host = next((i for i, tier in enumerate(tiers) if tier is Tier.DISK), len(tiers))
        return [
            Candidate(num_blocks=have, seconds=0.0),
            *(
                Candidate(num_blocks=have + count, seconds=self.load_s(tiers[:count], now))
                for count in sorted({num_host, len(tiers)} - {0})
            ),
        ]


def patience_s(load_s: float) -> float:
    """Seconds after which a load that should take `load_s` is given up."""
    return max(_PATIENCE_S, _PATIENCE * load_s)


def cheapest(candidates: list[Candidate], compute_s: Callable[[int], float]) -> Candidate:
    """The candidate after which the rest of the prompt is computed first; the first one takes no
    load. `compute_s`: how long the rest takes after so many blocks; 0 when unknown: then the most
    blocks that come soon are the best."""
    finite = [candidate for candidate in candidates if candidate.seconds < math.inf]
    if compute_s(candidates[0].num_blocks) <= 0:
        soon = [candidate for candidate in finite if candidate.seconds <= _SOON_S]
        return max(soon, key=lambda candidate: candidate.num_blocks)
    return min(finite, key=lambda one: one.seconds + compute_s(one.num_blocks))
