"""Which queued requests of a decode worker get blocks. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from decode_worker.lifecycle import ADMITTED, QUEUED, DecodeEntry
from engine.kv.allocator import BlockAllocator
from protocol.timeline import Phase
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.entry import RequestState
from worker_runtime.scheduling.messages import Reserve
from worker_runtime.scheduling.prefix_cache import PrefixCache
from worker_runtime.scheduling.sequence import Sequence

#: Interval at which a request that found no room is matched with the prefix cache again, which
#: costs more than counting blocks.
_RETRY_S = 0.25

#: A prompt, by the name of its last full block, and the epoch of the prefill worker.
_Origin = tuple[bytes, int]


class BlockAdmission:
    """Allocates blocks for all known tokens and the next one, oldest request first.

    A watermark of blocks stays free for the growth of running sequences. A request that does not
    fit is passed over until it has waited `starvation_s`; from then on younger ones wait for it.
    """

    def __init__(
        self,
        config: WorkerConfig,
        blocks: BlockAllocator,
        cache: PrefixCache,
        brings: Callable[[Sequence, float], bool],
    ) -> None:
        """`brings`: whether another worker brings KV of a prompt that would be computed here."""
        self._config = config
        self._blocks = blocks
        self._cache = cache
        self._brings = brings
        self._chunk = config.max_num_batched_tokens
        self._watermark = int(config.watermark * blocks.num_blocks)
        #: When a hand-off stops waiting for another one with the same prompt.
        self.next_check = math.inf

    def admit(self, entries: Collection[DecodeEntry], now: float) -> list[Reserve]:
        """Move queued requests to RUNNING or RECEIVING; returns the blocks to grant for the latter.
        `entries` come oldest first."""
        self.next_check = math.inf
        num_admitted = sum(e.state in ADMITTED for e in entries)
        if num_admitted >= self._config.max_num_seqs or num_admitted == len(entries):
            return []
        queued = [e for e in entries if e.state in QUEUED]
        arriving = self._arriving(entries)
        reserves = []
        for entry in queued:
            spare = self._watermark if num_admitted else 0
            if not self._try(entry, arriving, now, spare):
                if num_admitted and self._reserves_room(entry, now, spare):
                    break
                continue
            num_admitted += 1
            if entry.state is RequestState.RECEIVING:
                num_tokens = num_received(entry.sequence, self._blocks.block_size)
                reserves.append(self._cache.grant(entry.sequence, num_tokens))
                arriving |= self._arriving((entry,))
            if num_admitted >= self._config.max_num_seqs:
                break
        return reserves

    def num_needed(self, sequence: Sequence, *, computes: bool) -> int:
        """Blocks for all known tokens plus the next one, if output is wanted; with KV windows for
        as much of them as a step at a time needs."""
        chunk = self._chunk if computes else 1
        return self._blocks.pages_for(_num_tokens(sequence), chunk)

    def num_free_for_new(self, queued: Iterable[DecodeEntry]) -> int:
        """Blocks that a new request could get, after the watermark and the `queued` requests. One
        that cannot fit however many finish takes nothing."""
        usable = self._num_usable()
        promised = sum(e.num_blocks for e in queued if e.num_blocks <= usable)
        return max(0, self._blocks.num_available - self._watermark - promised)

    def _num_usable(self) -> int:
        """Blocks that become available once every request has finished."""
        return self._blocks.num_blocks - self._blocks.num_quarantined

    def _reserves_room(self, entry: DecodeEntry, now: float, spare: int) -> bool:
        """Whether younger requests wait for this one: it has waited long, and fits once requests
        that were admitted have finished. Otherwise it would hold them all up for nothing."""
        overdue = now - entry.sequence.arrival > self._config.starvation_s
        return overdue and entry.num_blocks + spare <= self._num_usable()

    def _try(self, entry: DecodeEntry, arriving: set[_Origin], now: float, spare: int) -> bool:
        if entry.num_blocks + spare > self._blocks.num_available and now < entry.retry_at:
            return False  # counting is enough for most of a thousand that wait
        sequence = entry.sequence
        if sequence.in_flight or self._follows(entry, arriving, now):
            return False  # in flight: preempted, and its last step has not landed
        computes = entry.state is RequestState.WAITING
        if computes and self._brings(sequence, now):
            return False
        fits = self._cache.allocate(
            sequence,
            _num_tokens(sequence),
            chunk=self._chunk if computes else None,
            received=None if computes else num_received(sequence, self._blocks.block_size),
            spare=spare,
            now=now,
        )
        if not fits:
            entry.retry_at = now + _RETRY_S
            return False
        sequence.stats.end(Phase.CREDIT_WAIT, now)
        entry.move(RequestState.RUNNING if computes else RequestState.RECEIVING)
        return True

    def _arriving(self, entries: Iterable[DecodeEntry]) -> set[_Origin]:
        """Prompts that hand-offs bring and whose KV is not here yet."""
        origins = {self._origin(e.sequence) for e in entries if e.state is RequestState.RECEIVING}
        return {origin for origin in origins if origin[0] and not self._blocks.find(origin[:1])}

    def _follows(self, entry: DecodeEntry, arriving: set[_Origin], now: float) -> bool:
        """Whether a hand-off waits for another that brings the same prompt from the same worker,
        which computes it once: little is left to send then. Bounded, as the other may fail."""
        until = entry.sequence.arrival + self._config.starvation_s
        follows = (
            bool(arriving)
            and entry.state is RequestState.AWAITING_GRANT
            and now < until
            and self._origin(entry.sequence) in arriving
        )
        if follows:  # nothing else may wake the step loop before
            self.next_check = min(until, self.next_check)
        return follows

    def _origin(self, sequence: Sequence) -> _Origin:
        peer = sequence.submit.peer
        return self._cache.last_name(sequence) or b"", 0 if peer is None else peer.epoch


def num_received(sequence: Sequence, block_size: int) -> int:
    """Tokens whose KV a hand-off brings: all known ones of a prompt. Of a sequence that runs on the
    sender only full blocks, which never change; a step here computes the rest."""
    num_tokens = len(sequence.tokens)
    if sequence.submit.live:
        return (num_tokens - 1) // block_size * block_size
    return num_tokens


def _num_tokens(sequence: Sequence) -> int:
    """All known tokens plus the next one, if output is wanted."""
    return len(sequence.tokens) + min(1, sequence.sampling.max_tokens)
