"""How many workers the load of each pool takes, as a fraction. Pure, with a clock passed in.

Prefill's need is work: the prompt tokens that arrive, and those that wait beyond what is promised,
in units of what one worker computes. Decode's is what its sequences occupy: KV blocks, those that
prompts wait for included, places in the batch, and the time of a step. Prompts that wait for
decode's blocks are decode's need, not prefill's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from observability.clock import Peak
from protocol.messages import WorkerLoad

#: A worker that became ready so recently still warms up: its rates and step times do not count.
SETTLE_S = 5.0
#: What a pool may be loaded with, so that chance does not make a queue.
_PREFILL_USE = 0.8
_DECODE_USE = 0.85
#: Arrivals are averaged over so long, and over a shorter time while prompts are late already.
_WINDOW_S = 15.0
_LATE_WINDOW_S = 5.0
#: Prompts beyond the promise should be gone after so many seconds.
_CATCH_UP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """A ready worker as it last reported itself. age_s: seconds since it became ready."""

    worker_id: str
    age_s: float
    load: WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSample:
    """What all routers hold and have seen since the sample before.

    waiting_tokens: uncached prompt tokens that wait for prefill. blocked_tokens: tokens of prompts
    that wait for blocks of decode. arrived_tokens: uncached tokens of prompts that arrived, refused
    ones included. refused_for_pace: requests refused because decode is too slow for their tier.
    """

    waiting_tokens: int = 0
    blocked_tokens: int = 0
    arrived_tokens: int = 0
    refused_for_pace: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """So many workers, and what makes it so, for people. overload: arrivals as a multiple of what
    the pool computes now, at least 1."""

    workers: float
    reason: str
    overload: float = 1.0


class PrefillNeed:
    """Follows the prompts that arrive. ttft_s: so long may prompts wait for prefill."""

    def __init__(self, ttft_s: float) -> None:
        self._ttft_s = ttft_s
        self._rate = Peak()
        self._arrivals: deque[tuple[float, int]] = deque()
        self._began = math.inf

    def take(
        self,
        workers: Sequence[WorkerSample],
        decodes: Sequence[WorkerSample],
        routers: RouterSample,
        now: float,
    ) -> PoolNeed:
        """The need at `now`, with the sample of this moment."""
        self._add(routers.arrived_tokens, now)
        arrival = self._arrival(_WINDOW_S, now)
        rate = self._rate_per_worker(workers, decodes, now)
        backlog = routers.waiting_tokens + _granted(workers, decodes)
        if not rate:  # nothing measured yet: one worker if there is anything to measure
            return PoolNeed(workers=float(arrival > 0), reason="its first prompts arrive")
        promised = rate * max(1, len(workers)) * self._ttft_s
        late = max(0.0, backlog - promised) / _CATCH_UP_S
        if late:
            arrival = max(arrival, self._arrival(_LATE_WINDOW_S, now))
        need = (arrival / _PREFILL_USE + late) / rate
        wait_s = backlog / (rate * max(1, len(workers)))
        reason = f"prompts arrive at {arrival:.0f} tokens/s, a worker computes {rate:.0f}"
        if late:
            reason = f"prompts wait {wait_s:.1f} s, {self._ttft_s:g} are promised; {reason}"
        overload = max(1.0, arrival / (rate * max(1, len(workers)))) if late else 1.0
        return PoolNeed(workers=need, reason=reason, overload=overload)

    def _add(self, tokens: int, now: float) -> None:
        if self._began > now:  # the first sample only begins the time that others cover
            self._began, tokens = now, 0
        self._arrivals.append((now, tokens))
        while self._arrivals[0][0] <= now - _WINDOW_S:
            self._arrivals.popleft()

    def _arrival(self, window_s: float, now: float) -> float:
        """Tokens per second of late."""
        tokens = sum(tokens for at, tokens in self._arrivals if at > now - window_s)
        return tokens / min(window_s, max(now - self._began, _LATE_WINDOW_S))

    def _rate_per_worker(
        self, workers: Sequence[WorkerSample], decodes: Sequence[WorkerSample], now: float
    ) -> float:
        """Prompt tokens per second of a busy worker; of decode's while there is no other figure."""
        rates = [w.load.tokens_per_second for w in settled(workers)]
        rate = self._rate.take(max(rates, default=0.0), now)
        if rate:
            return rate
        return max((w.load.prompt_tokens_per_second for w in settled(decodes)), default=0.0)


class DecodeNeed:
    """What sequences occupy. step_s: the promised time of a step without prompts; max_num_seqs:
    places in a worker's batch; block_size: tokens of a block."""

    def __init__(self, *, step_s: float, max_num_seqs: int, block_size: int) -> None:
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._shortest_s = math.inf

    def take(self, workers: Sequence[WorkerSample], routers: RouterSample) -> PoolNeed:
        """The need now, with the sample of this moment."""
        parts = [self._kv(workers, routers), self._places(workers), self._steps(workers, routers)]
        return max(parts, key=lambda need: need.workers)

    def _kv(self, workers: Sequence[WorkerSample], routers: RouterSample) -> PoolNeed:
        total = max((w.load.total_blocks for w in workers), default=0)
        if not total:
            return PoolNeed(workers=0.0, reason="")
        held = sum(w.load.held_blocks + w.load.quarantined_blocks for w in workers)
        wanted = sum(w.load.queued_blocks for w in workers)
        wanted += -(-routers.blocked_tokens // self._block_size)
        percent = 100 * held / sum(w.load.total_blocks for w in workers)
        reason = f"KV blocks are {percent:.0f} % in use"
        if wanted:
            reason += f", prompts wait for {wanted} more"
        return PoolNeed(workers=(held + wanted) / (total * _DECODE_USE), reason=reason)

    def _places(self, workers: Sequence[WorkerSample]) -> PoolNeed:
        sequences = sum(w.load.running + w.load.waiting for w in workers)
        return PoolNeed(
            workers=sequences / (self._max_num_seqs * _DECODE_USE),
            reason=f"batches hold {sequences} sequences, a worker runs {self._max_num_seqs}",
        )

    def _steps(self, workers: Sequence[WorkerSample], routers: RouterSample) -> PoolNeed:
        """Steps grow with the batch from a shortest one: each worker uses its share of the time
        between that and the promise."""
        times = [w.load.decode_step_s for w in settled(workers) if w.load.decode_step_s > 0]
        self._shortest_s = min([self._shortest_s, *times])
        spare_s = self._step_s - self._shortest_s
        busy = [w.load for w in settled(workers) if w.load.running and w.load.decode_step_s > 0]
        longest_s = max((load.decode_step_s for load in busy), default=0.0)
        reason = f"decode steps take {1000 * longest_s:.1f} ms of {1000 * self._step_s:g} promised"
        # When even a lone sequence takes longer, more workers would not help.
        used = sum((load.decode_step_s - self._shortest_s) / spare_s for load in busy)
        need = max(0.0, used) / _DECODE_USE if spare_s > 0 else 0.0
        if routers.refused_for_pace and spare_s > 0 and need <= len(workers):
            return PoolNeed(workers=len(workers) + 0.5, reason=f"requests refused: {reason}")
        return PoolNeed(workers=need, reason=reason)


def settled(workers: Sequence[WorkerSample]) -> list[WorkerSample]:
    """The workers whose figures are not those of a cold start."""
    return [worker for worker in workers if worker.age_s >= SETTLE_S]


def _granted(prefills: Sequence[WorkerSample], decodes: Sequence[WorkerSample]) -> int:
    """Prompt tokens on prefill workers, less those that wait for blocks of decode."""
    tokens = sum(w.load.waiting_tokens for w in prefills)
    waiting = sum(w.load.waiting for w in prefills)
    blocked = sum(w.load.waiting for w in decodes if w.load.queued_blocks)
    return round(tokens * (1 - min(1.0, blocked / waiting))) if waiting else tokens
