"""Named KV that workers lend each other: a prompt's beginning comes from another worker instead of
being computed. Pure: the step thread owns it.

Each loan is a hand-off of its own, under the key of its ticket: the lender sends, the borrower
receives. The borrower sets blocks aside and grants them with its question; a lender that has all of
it leases it and sends at once. One that has less leases that and says how much, and the borrower
takes the grant back and grants so many. Nothing is promised before it is leased.

    borrower:  RECEIVING -> (its blocks have their names) gone
               RECEIVING -> SHORT -> RECEIVING, with fewer blocks
               RECEIVING, SHORT -> late, failed or refused: the prompt is computed
               RECEIVING -> ENDING (blocks quarantined until no write can be in flight) -> gone

A sequence that waits for a loan has no blocks yet: whatever becomes of the loan, it starts as if it
had just arrived, and finds in the prefix cache what has come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from engine.kv.allocator import BlockAllocator
from kv_tiers.commands import Tier
from kv_tiers.cost import TierRate, patience_s
from protocol.ids import RequestKey
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from protocol.timeline import Phase
from worker_runtime.scheduling.kv_tiers import ComputeSeconds
from worker_runtime.scheduling.messages import (
    BlocksSafe,
    Borrow,
    Command,
    CommitHandoff,
    Committed,
    Delivered,
    EndHandoff,
    Granted,
    HandoffEnded,
    Lend,
    Lent,
    Push,
    StepOutput,
    TierCounters,
)
from worker_runtime.scheduling.prefix_cache import PrefixCache
from worker_runtime.scheduling.sequence import Sequence

#: A loan takes this long beside its bytes: calls between threads and event loops.
_FIXED_S = 0.004


class LoanState(Enum):
    """State of a loan on the borrower."""

    RECEIVING = "receiving"  # asked, or on its way
    SHORT = "short"  # has no blocks
    ENDING = "ending"


@dataclass(slots=True, kw_only=True, eq=False)
class _Borrowed:
    """`part`: the tokens that are asked for; it has the blocks. `sequence` waits for them until
    `cut_at`."""

    number: int
    sequence: Sequence
    part: Sequence
    names: list[bytes]
    began: float
    cut_at: float
    state: LoanState = LoanState.RECEIVING

    @property
    def wanted(self) -> bool:
        return self.state is not LoanState.ENDING


@dataclass(slots=True, kw_only=True, eq=False)
class _Loan:
    """`part`: the tokens that are lent and one more; it has the blocks. `granted`: where they go.
    `offered`: the borrower knows how many; `pushed`: they are on their way."""

    part: Sequence
    granted: Granted
    offered: bool = False
    pushed: bool = False


class PeerBlocks:
    """What one worker borrows from others and lends to them."""

    def __init__(
        self, cache: PrefixCache, blocks: BlockAllocator, *, block_bytes: int, assumed: float = 1e9
    ) -> None:
        """`cache`: over the same `blocks` and tiers as those of the schedulers. `block_bytes`: of
        all ranks. `assumed`: bytes per second of a loan, until one was measured."""
        self.output = StepOutput()  # shared with the schedulers (both_roles)
        self.counters = TierCounters()
        self.rate = TierRate(assumed, fixed_s=_FIXED_S)
        self._cache = cache
        self._blocks = blocks
        self._size = blocks.block_size
        self._block_bytes = block_bytes
        self._number = 0
        self._borrowed: dict[RequestKey, _Borrowed] = {}
        self._coming: set[bytes] = set()
        self._loans: dict[RequestKey, _Loan] = {}

    # --- borrowing ------------------------------------------------------------------------------

    def brings(self, sequence: Sequence, compute_s: ComputeSeconds, now: float) -> bool:
        """Whether a sequence without blocks should wait: a peer brings KV of its beginning. Asks
        its source for it, once, if that is the cheapest way."""
        source = sequence.source
        if source is None:
            return False
        names = self._cache.reusable(sequence)
        have = self._cache.num_in_pool(names)
        if source.ticket.key in self._borrowed or self._coming.intersection(names[have : have + 1]):
            return True
        end = min(source.num_tokens // self._size, len(names))
        if not self._is_cheaper(sequence, have, end, compute_s, now):
            sequence.source = None
            return False
        key = source.ticket.key
        part = self._part(key, names[:end], now, sequence.submit.keep_s)
        if not self._set_aside(part, end, now):
            self.counters.refuse(Tier.PEER, "full")
            sequence.source = None
            return False
        num_bytes = (end - have) * self._block_bytes
        wait_s = patience_s(self.rate.load_s(num_bytes, now))
        spared_s = compute_s(have * self._size, end * self._size) or math.inf
        self._number += 1
        self.rate.begin(self._number, num_bytes, now)
        borrowed = _Borrowed(
            number=self._number,
            sequence=sequence,
            part=part,
            names=names[have:end],
            began=now,
            cut_at=now + min(spared_s, wait_s),
        )
        self._borrowed[key] = borrowed
        self._coming.update(borrowed.names)
        sequence.stats.begin(Phase.KV_LOAD, now)
        reserve = self._cache.grant(part, end * self._size)
        asked = tuple(part.digests)
        borrow = Borrow(source=source, submit=sequence.submit, names=asked, reserve=reserve)
        self.output.borrows.append(borrow)
        return True

    def _set_aside(self, part: Sequence, num_blocks: int, now: float) -> bool:
        """Give what is asked for its blocks; False without room."""
        end = num_blocks * self._size
        del part.tokens[end:], part.digests[num_blocks:]
        return self._cache.allocate(part, end, received=end, now=now)

    def _is_cheaper(
        self, sequence: Sequence, have: int, end: int, compute_s: ComputeSeconds, now: float
    ) -> bool:
        size, num_tokens = self._size, len(sequence.tokens)
        if end * size <= self._cache.num_cached(sequence):
            return False
        peer_s = self.rate.load_s((end - have) * self._block_bytes, now)
        local_s = self._cache.expected_s(sequence, have, compute_s, now)
        if peer_s < math.inf and (
            local_s <= 0 or peer_s + compute_s(end * size, num_tokens) < local_s
        ):
            return True
        self.counters.refuse(Tier.PEER, "hangs" if peer_s == math.inf else "cost")
        return False

    def _lent(self, borrowed: _Borrowed, key: RequestKey, num_tokens: int, now: float) -> None:
        """The lender keeps so many tokens, fewer than were granted, and the grant is withdrawn:
        grant as many."""
        part, size = borrowed.part, self._size
        if borrowed.state is LoanState.ENDING:
            self._safe(key, borrowed)
            return
        self._blocks.free(part.drop_kv())
        borrowed.state = LoanState.SHORT
        num_blocks = min(num_tokens // size, len(part.digests))
        if num_blocks <= self._cache.num_in_pool(part.digests[:num_blocks]):
            self._give_up(key, borrowed, "gone", now)
        elif not self._set_aside(part, num_blocks, now):
            self._give_up(key, borrowed, "full", now)
        else:
            borrowed.state = LoanState.RECEIVING
            self.output.reserves.append(self._cache.grant(part, num_blocks * size))

    def _committed(self, borrowed: _Borrowed, now: float) -> None:
        """All of it has come: name the blocks, for the sequence to find."""
        if borrowed.state is not LoanState.RECEIVING:
            return
        part, end = borrowed.part, len(borrowed.part.tokens)
        num_fresh = end - part.num_computed
        num_bytes = num_fresh // self._size * self._block_bytes
        part.resume_at(end)
        part.tables.received(end)
        self._cache.publish(part, num_fresh)
        self._blocks.free(part.drop_kv())
        self.counters.borrowed(num_bytes)
        self.counters.hit({Tier.PEER: num_fresh // self._size}, self._size)
        borrowed.sequence.stats.num_loaded[Tier.PEER] += num_fresh
        took_s = now - borrowed.began
        moving_s = max(took_s - _FIXED_S, took_s / 2)
        self.rate.end(borrowed.number, moving_s, now, ok=True, num_bytes=num_bytes)
        self._no_more(borrowed, now)
        del self._borrowed[part.key]

    def _ended(self, borrowed: _Borrowed, now: float) -> None:
        """The hand-off is over without a commit."""
        if borrowed.wanted:
            self.counters.borrowed(None)
            self._stop(borrowed.part.key, borrowed, now)

    def _give_up(self, key: RequestKey, borrowed: _Borrowed, reason: str, now: float) -> None:
        self.counters.refuse(Tier.PEER, reason)
        self.output.ends.append(EndHandoff(key=key, released=True, error=None))
        self._stop(key, borrowed, now)

    def _stop(self, key: RequestKey, borrowed: _Borrowed, now: float) -> None:
        """Nothing more is expected; blocks are set aside until no write can reach them."""
        late = now >= borrowed.cut_at  # what is so slow is slow from now on
        self.rate.end(borrowed.number, now - borrowed.began, now, ok=late)
        self._no_more(borrowed, now)
        if borrowed.state is LoanState.RECEIVING:
            self._cache.quarantine(borrowed.part)
            borrowed.state = LoanState.ENDING
        else:
            del self._borrowed[key]

    def _no_more(self, borrowed: _Borrowed, now: float) -> None:
        borrowed.sequence.stats.end(Phase.KV_LOAD, now)
        borrowed.sequence.source = None
        self._coming.difference_update(borrowed.names)

    def expire(self, now: float) -> None:
        """Give up what has not come in time."""
        if now < self.next_deadline():
            return
        for key, borrowed in list(self._borrowed.items()):
            if borrowed.wanted and borrowed.cut_at <= now:
                self._give_up(key, borrowed, "late", now)

    def next_deadline(self) -> float:
        """When `expire` has something to do; infinity for never."""
        return min((b.cut_at for b in self._borrowed.values() if b.wanted), default=math.inf)

    # --- lending --------------------------------------------------------------------------------

    def _lend(self, command: Lend, now: float) -> None:
        """Lease what is here of some tokens: in the pool, or on its way from host memory to it."""
        key = command.granted.key
        if key in self._loans:  # asked again
            self._loans[key].offered = False
            self._loans[key].granted = command.granted
            return
        part = self._part(key, command.digests, now)
        end = self._cache.num_cached(part)
        del part.tokens[end + 1 :], part.digests[end // self._size :]
        if not end or not self._cache.allocate(part, end, chunk=self._size, now=now):
            self.output.lent.append(Lent(key=key, num_tokens=0))
        else:
            self._loans[key] = _Loan(part=part, granted=command.granted)

    def offer(self) -> None:
        """Tell borrowers what was leased for them, once it is in the pool, and send all of it."""
        for key, loan in list(self._loans.items()):
            if loan.offered or loan.part.loading is not None:
                continue
            loan.offered = True
            num_tokens = loan.part.num_computed
            self.output.lent.append(Lent(key=key, num_tokens=num_tokens))
            if not num_tokens:
                self._repaid(key)
            elif num_tokens >= loan.granted.num_tokens:
                self._granted(key, loan, loan.granted)

    def _granted(self, key: RequestKey, loan: _Loan, grant: Granted) -> None:
        """The borrower has blocks: send what it lacks of the tokens that it wants, once."""
        if loan.pushed:
            return
        loan.pushed = True
        tables, num_tokens, size = loan.part.tables, grant.num_tokens, self._size
        first, end = grant.num_cached_tokens // size, -(-num_tokens // size)
        seen = [tables.first_seen(group, num_tokens) for group in range(len(tables.groups))]
        short = any(there > start for there, start in zip(tables.first, seen, strict=True))
        if num_tokens > loan.part.num_computed or short:
            self.output.sends.append(EndHandoff(key=key, released=True, error=None))
            return
        for group, start in enumerate(max(first, number) for number in seen):
            if start < end:
                ids = tables.part(group, start, end)
                push = Push(key=key, group=group, block_ids=ids, first_block=start, after=0)
                self.output.sends.append(push)
        self.output.sends.append(CommitHandoff(key=key, tokens=()))

    def _repaid(self, key: RequestKey) -> None:
        """No read of the blocks is in flight."""
        self._blocks.free(self._loans.pop(key).part.drop_kv())

    # --- both -----------------------------------------------------------------------------------

    def handle(self, command: Command, now: float) -> bool:
        """Take a command; whether it is about a loan."""
        match command:
            case Lend():
                self._lend(command, now)
                return True
            case (
                Lent(key=key)
                | Granted(key=key)
                | Delivered(key=key)
                | Committed(key=key)
                | HandoffEnded(key=key)
                | BlocksSafe(key=key)
            ):
                if key in self._loans:
                    self._lending(key, self._loans[key], command)
                    return True
                if key in self._borrowed:
                    self._borrowing(key, self._borrowed[key], command, now)
                    return True
        return False

    def _lending(self, key: RequestKey, loan: _Loan, command: Command) -> None:
        match command:
            case Granted():
                self._granted(key, loan, command)
            case Delivered() | HandoffEnded():
                if not loan.offered:  # asked again meanwhile
                    self.output.lent.append(Lent(key=key, num_tokens=0))
                self._repaid(key)

    def _borrowing(
        self, key: RequestKey, borrowed: _Borrowed, command: Command, now: float
    ) -> None:
        match command:
            case Lent(num_tokens=num_tokens):
                self._lent(borrowed, key, num_tokens, now)
            case Committed():
                self._committed(borrowed, now)
            case HandoffEnded():
                self._ended(borrowed, now)
            case BlocksSafe() if borrowed.state is LoanState.ENDING:
                self._safe(key, borrowed)

    def _safe(self, key: RequestKey, borrowed: _Borrowed) -> None:
        """No write can reach the blocks of a loan that is given up."""
        self._blocks.unquarantine(borrowed.part.drop_kv())
        del self._borrowed[key]

    def _part(
        self, key: RequestKey, names: Iterable[bytes], now: float, keep_s: float = 0.0
    ) -> Sequence:
        """What has the blocks of a loan. Their names say which tokens they hold; it has one more
        than fill them, because a sequence always runs its last."""
        submit = Submit(
            key=key,
            router_id="",
            prompt_ids=(),
            sampling=SamplingParams(max_tokens=1),
            time_left_s=math.inf,
            keep_s=keep_s,
        )
        tables = self._blocks.new_tables()
        part = Sequence.from_submit(submit, now, digests=tuple(names), tables=tables)
        part.tokens = [0] * (len(part.digests) * self._size + 1)
        return part

    @property
    def num_active(self) -> int:
        """Loans of either kind that are not over."""
        return len(self._loans) + len(self._borrowed)
