"""Chooses the workers of each output: the policy over live workers and their circuit breakers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from observability.export import MetricSet
from protocol.errors import HandoffFailed, Overloaded
from protocol.ids import RequestKey, Role
from protocol.kv_layout import KVFingerprint
from router.config import RouterConfig
from router.dispatch.attempt import Attempt, AttemptEnd, AttemptOutcome
from router.dispatch.recalls import Recalls
from router.dispatch.sequence_jobs import SequenceJob
from router.workers.bookkeeping import PromptBlocks
from router.workers.policy import (
    LocalReason,
    Need,
    WorkerChoice,
    WorkerView,
    choose,
    choose_decode,
    choose_source,
    has_room,
    work_tokens,
)
from router.workers.worker_client import WorkerClient
from router.workers.worker_set import WorkerSet

#: Prompts of more tokens than this are hashed in a thread: about a tenth of a millisecond.
_HASHED_INLINE = 4096
#: How often a prefill worker may fail one output before decode prefills it.
_PREFILL_TRIES = 2
#: Ends for which no worker is at fault.
_NO_FAILURE = (AttemptOutcome.GIVEN_BACK, AttemptOutcome.UNANSWERED)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPair:
    """The workers of one attempt, and why they were chosen. `source`: another one that has more of
    the prompt than the one that computes it, as it was seen at the choice."""

    choice: WorkerChoice
    decode: WorkerClient
    prefill: WorkerClient | None
    source: WorkerView | None = None

    @property
    def sides(self) -> list[tuple[WorkerClient, WorkerView]]:
        """The workers with their views at the choice."""
        decode = (self.decode, self.choice.decode)
        if self.prefill is None or self.choice.prefill is None:
            return [decode]
        return [decode, (self.prefill, self.choice.prefill)]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that need not be computed."""
        view = self.choice.prefill or self.choice.decode
        source = self.source
        return max(view.expected_tokens, 0 if source is None else source.cached_tokens)

    @property
    def may_change(self) -> bool:
        """Whether another worker could as well compute the prompt."""
        anywhere = self.choice.local_reason in (None, LocalReason.PREFILL_BUSY)
        return anywhere and not self.cached_tokens

    @property
    def workers(self) -> list[WorkerClient]:
        return [worker for worker, _ in self.sides]

    # --- circuit breakers -------------------------------------------------------------------------

    def decode_began(self, key: RequestKey, now: float) -> None:
        """The first token of decode has come: prefill did its part. Long outputs end much later."""
        self.decode.breaker.began(key, now)
        if self.prefill is not None:
            self.prefill.breaker.succeeded(key)
            self.prefill.breaker.ended(key)

    def record(self, ended: AttemptEnd, attempt: Attempt, holder: WorkerClient, now: float) -> None:
        """An attempt has ended, its output on `holder`. A failed hand-off between live workers
        counts for both: either may be at fault, and a worker's next success takes it back."""
        places = [(holder, attempt.holder_key)]
        if self.prefill is not None and attempt.decode_started is None:  # else its part was over
            places.append((self.prefill, attempt.key))
        for worker, key in places:
            if ended.is_complete:
                worker.breaker.succeeded(key)
            elif (
                ended.retriable
                and ended.outcome not in _NO_FAILURE
                and not isinstance(ended.error, Overloaded)
                and (
                    worker.ref.worker_id == ended.worker_id
                    or (
                        isinstance(ended.error, HandoffFailed)
                        and ended.outcome is not AttemptOutcome.LOST
                    )
                )
            ):
                worker.breaker.failed(key, now)


class Dispatcher:
    """What all outputs share: the workers, the secret of the tickets, settings, randomness."""

    def __init__(
        self,
        *,
        router_id: str,
        workers: WorkerSet,
        secret: bytes,
        config: RouterConfig,
        metric_set: MetricSet,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.router_id = router_id
        self.workers = workers
        self.config = config
        self.metrics = metric_set
        self.clock = clock
        self.secret = secret
        self.recalls = Recalls(workers, config=config, rng=rng)
        self._rng = rng

    def choose(
        self,
        need: Need,
        blocks: PromptBlocks,
        *,
        refused: set[str],
        failed: Counter[str],
        like: KVFingerprint | None = None,
        computes: WorkerClient | None = None,
    ) -> WorkerPair | None:
        """A pair of ready workers; None when no decode worker is left.

        like: of the worker that began the output. While the weights change, others would go on with
        other tokens: they are taken only if no decode worker is left that is alike.

        computes: which should compute the prompt, if it can.

        Workers that `refused` the output are left out. Those that `failed` it, fail others or stand
        still are taken only if there is no other; a prefill worker that failed it then once more,
        before decode prefills.
        """
        sample = self.workers.candidates(blocks, self._rng)
        if computes is not None and computes.ready:
            sample[computes.role] = list(dict.fromkeys((*sample[computes.role], computes)))
        among = partial(
            self._choose_among,
            need,
            blocks,
            refused=refused,
            failed=failed,
            like=like,
            computes=computes,
        )
        found = among(sample)
        other = found is not None and like not in (None, found.choice.decode.fingerprint)
        if found is None or found.choice.decode.failing or other:
            ready = {role: self.workers.ready(role) for role in Role}
            if any(len(ready[role]) > len(sample[role]) for role in Role):  # others may do better
                found = among(ready)
        return found

    def _choose_among(
        self,
        need: Need,
        blocks: PromptBlocks,
        workers: Mapping[Role, Sequence[WorkerClient]],
        *,
        refused: set[str],
        failed: Counter[str],
        like: KVFingerprint | None,
        computes: WorkerClient | None,
    ) -> WorkerPair | None:
        decodes, prefills = (
            {w.ref: w for w in workers[role] if w.ref.worker_id not in refused}
            for role in (Role.DECODE, Role.PREFILL)
        )
        if like is not None:
            alike = {r: w for r, w in decodes.items() if w.status and w.status.fingerprint == like}
            decodes = alike or decodes
        now = self.clock()
        failing = {
            worker.ref: worker.ref.worker_id in failed or not worker.takes(now)
            for worker in (*decodes.values(), *prefills.values())
        }
        if all(failing[ref] for ref in prefills):
            for ref, worker in prefills.items():
                tries = failed[ref.worker_id]
                failing[ref] = tries >= _PREFILL_TRIES or not worker.takes(now)
        views = [
            [worker.view(blocks, failing=failing[ref]) for ref, worker in each.items()]
            for each in (decodes, prefills)
        ]
        wanted = None if computes is None else computes.ref
        choice = choose(need, *views, config=self.config, rng=self._rng, computes=wanted)
        if choice is None:
            return None
        prefill = None if choice.prefill is None else prefills[choice.prefill.ref]
        leaving = [worker.view(blocks) for worker in self.workers.leaving()]
        return WorkerPair(
            choice=choice,
            decode=decodes[choice.decode.ref],
            prefill=prefill,
            source=choose_source(choice.prefill or choice.decode, [*views[0], *views[1], *leaving]),
        )

    def choose_receiver(
        self, num_tokens: int, total_tokens: int, *, source: WorkerClient
    ) -> tuple[WorkerClient, WorkerView] | None:
        """Another decode worker for a running sequence of `num_tokens` tokens that may grow to
        `total_tokens`; None when none has room and takes its KV."""
        return self._receiver(
            num_tokens, total_tokens, source, self.workers.sample(Role.DECODE, self._rng)
        ) or self._receiver(num_tokens, total_tokens, source, self.workers.ready(Role.DECODE))

    def _receiver(
        self, num_tokens: int, total_tokens: int, source: WorkerClient, among: list[WorkerClient]
    ) -> tuple[WorkerClient, WorkerView] | None:
        assert source.status is not None
        nothing, now = PromptBlocks(()), self.clock()
        workers = {
            worker.ref: worker for worker in among if worker is not source and worker.takes(now)
        }
        views = [worker.view(nothing) for worker in workers.values()]
        alike = [view for view in views if view.fingerprint == source.status.fingerprint]
        need = Need(prompt_tokens=num_tokens, total_tokens=total_tokens)
        chosen = choose_decode(need, alike, self._rng, self.config)
        if chosen is None or not has_room(need, chosen):
            return None
        return workers[chosen.ref], chosen

    def work_tokens(self, jobs: Sequence[SequenceJob]) -> int:
        """Prompt tokens of these outputs that workers will have to compute."""
        total = sum(job.blocks.num_tokens for job in jobs if job.bypass_prefix_cache)
        counts = Counter(job.blocks for job in jobs if not job.bypass_prefix_cache)
        for blocks, count in counts.items():
            workers = self.workers.candidates(blocks, self._rng)
            total += count * work_tokens(
                blocks.num_tokens,
                [worker.view(blocks) for worker in workers[Role.DECODE]],
                [worker.view(blocks) for worker in workers[Role.PREFILL]],
                self.config,
            )
        return total

    async def hash_blocks(self, jobs: Sequence[SequenceJob]) -> None:
        """Hash the blocks of long prompts for the choice, off the event loop."""
        long = {job.blocks for job in jobs if job.blocks.num_tokens > _HASHED_INLINE}
        if not long:
            return
        sample = [w for role in Role for w in self.workers.sample(role, self._rng)]
        statuses = [w.status for w in sample if w.prefix.reports]
        kinds = {(s.fingerprint, s.layout.block_size) for s in statuses if s is not None}
        if kinds:
            await asyncio.to_thread(lambda: [blocks.hints(*k) for blocks in long for k in kinds])
