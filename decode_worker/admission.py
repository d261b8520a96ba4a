"""Who gets blocks: the waiting sequences of a decode worker, by age. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from decode_worker.lifecycle import ADMITTED, WAITING, DecodeEntry, DecodeState, Reserve
from engine.kv.allocator import BlockAllocator
from protocol.timeline import Phase
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.prefix_cache import PrefixCache
from worker_runtime.scheduling.sequence import Sequence

#: A sequence that finds no room even with what it could share looks for that again after so long:
#: it costs more than counting blocks.
_LOOK_AGAIN_S = 0.25

#: A prompt, by the name of its last full block, and the incarnation it comes from.
_Origin = tuple[bytes, int]


class BlockAdmission:
    """Gives blocks for everything known and the next token, those in the prefix cache first.

    A watermark of blocks stays free for the growth of sequences that run already.
    """

    def __init__(self, config: WorkerConfig, blocks: BlockAllocator, cache: PrefixCache) -> None:
        self._config = config
        self._blocks = blocks
        self._cache = cache
        self._watermark = int(config.watermark * blocks.num_blocks)
        #: When a hand-off that waits for another has waited long enough, if one does.
        self.look_at: float | None = None

    def admit(self, entries: Collection[DecodeEntry], now: float) -> list[Reserve]:
        """Let sequences run, or arrive: then their blocks are to be granted. `entries` come oldest
        first; one that does not fit is passed over, until it has waited `starvation_s`: then
        younger ones wait for it."""
        self.look_at = None
        num_admitted = sum(e.state in ADMITTED for e in entries)
        if num_admitted >= self._config.max_num_seqs or num_admitted == len(entries):
            return []
        waiting = [e for e in entries if e.state in WAITING]
        arriving = self._arriving(entries)
        reserves = []
        for entry in waiting:
            spare = self._watermark if num_admitted else 0
            if self._has_no_room(entry, now, spare) or not self._take(entry, arriving, now, spare):
                if now - entry.sequence.arrival > self._config.starvation_s:
                    break
                continue
            num_admitted += 1
            if entry.state is DecodeState.ARRIVING:
                reserves.append(self._reserve(entry.sequence))
                arriving |= self._arriving((entry,))
            if num_admitted >= self._config.max_num_seqs:
                break
        return reserves

    def _has_no_room(self, entry: DecodeEntry, now: float, spare: int) -> bool:
        """Whether it does not fit, as far as counting tells: of a thousand that wait most end
        here."""
        return entry.needed + spare > self._blocks.num_available and now < entry.look_again

    def credits(self, num_promised: int) -> int:
        """Blocks that a new request could get: free and cached ones, less the watermark and less
        what those already waiting will take."""
        return max(0, self._blocks.num_available - self._watermark - num_promised)

    def needed(self, sequence: Sequence) -> int:
        """Blocks for everything known plus the next token, if there is to be one."""
        num_next = min(1, sequence.sampling.max_tokens)
        return self._blocks.blocks_for(len(sequence.tokens) + num_next)

    def _take(self, entry: DecodeEntry, arriving: set[_Origin], now: float, spare: int) -> bool:
        sequence = entry.sequence
        if self._follows(entry, arriving, now) or sequence.num_in_flight:
            return False  # or it was preempted, and its last step has not landed
        local = entry.state is DecodeState.WAITING
        if not self._cache.take(sequence, entry.needed, computes=local, spare=spare):
            entry.look_again = now + _LOOK_AGAIN_S
            return False
        sequence.mark_end(Phase.CREDIT_WAIT, now)
        entry.state = DecodeState.RUNNING if local else DecodeState.ARRIVING
        return True

    def _reserve(self, sequence: Sequence) -> Reserve:
        num_granted = self._blocks.blocks_for(len(sequence.tokens))
        return Reserve(
            key=sequence.key,
            block_ids=tuple(sequence.block_ids[:num_granted]),
            num_cached_blocks=sequence.num_computed // self._blocks.block_size,
            num_tokens=len(sequence.tokens),
        )

    def _arriving(self, entries: Iterable[DecodeEntry]) -> set[_Origin]:
        """What hand-offs are bringing here and is not here yet."""
        origins = {self._origin(e.sequence) for e in entries if e.state is DecodeState.ARRIVING}
        return {origin for origin in origins if origin[0] and not self._blocks.find(origin[:1])}

    def _follows(self, entry: DecodeEntry, arriving: set[_Origin], now: float) -> bool:
        """Whether a hand-off should wait for another that brings the same prompt from the same
        worker, which computes it once: then there is little left to send. Not for long, because
        that one may fail."""
        until = entry.sequence.arrival + self._config.starvation_s
        follows = (
            bool(arriving)
            and entry.state is DecodeState.WAITING_ROOM
            and now < until
            and self._origin(entry.sequence) in arriving
        )
        if follows:  # the other may be silent, and nothing else happen here
            self.look_at = min(until, self.look_at or until)
        return follows

    def _origin(self, sequence: Sequence) -> _Origin:
        peer = sequence.submit.peer
        return self._cache.last_name(sequence) or b"", 0 if peer is None else peer.epoch
