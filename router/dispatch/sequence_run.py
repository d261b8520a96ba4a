"""The life of one output: choose workers, submit, relay tokens, try again, clean up."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from observability import metrics
from observability.export import MetricSet
from observability.logging import get_logger
from protocol.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from protocol.grammar import Grammar
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from protocol.ticket import Ticket
from protocol.timeline import Phase, PlacedSpan, Span
from protocol.trace import TraceContext
from router.config import RouterConfig
from router.dispatch.attempt import Attempt, AttemptEnd, AttemptOutcome, TokenMerger, TokenSink
from router.workers.policy import Need, WorkerChoice, WorkerView, choose
from router.workers.prefix_view import PromptBlocks
from router.workers.worker_client import WorkerClient
from router.workers.worker_set import WorkerSet

log = get_logger(__name__)

#: Prompts of more tokens than this are hashed in a thread: about a tenth of a millisecond.
_HASHED_AT_ONCE = 4096
#: Before a worker that refused or failed is asked again.
_ROUND_PAUSE_S = 0.1
#: Refusals that no other worker would answer differently.
_FINAL = (InvalidRequest, PayloadTooLarge)
#: The client has the whole output.
_WHOLE = (AttemptOutcome.FINISHED, AttemptOutcome.CUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceJob:
    """One output to make. `index` is its place among the request's choices, `deadline` in seconds
    since the Unix epoch. The outputs of one prompt have the same `blocks`. `request_name` is for
    logs."""

    request_id: str
    request_name: str
    index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline: float
    blocks: PromptBlocks
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    wants_timeline: bool = False
    trace: TraceContext | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    choice: WorkerChoice
    decode: WorkerClient
    prefill: WorkerClient | None

    @property
    def sides(self) -> list[tuple[WorkerClient, WorkerView]]:
        """The members with what the choice knew of them."""
        decode = (self.decode, self.choice.decode)
        if self.prefill is None or self.choice.prefill is None:
            return [decode]
        return [decode, (self.prefill, self.choice.prefill)]

    @property
    def members(self) -> list[WorkerClient]:
        return [member for member, _ in self.sides]


class Dispatcher:
    """What every output shares: the workers, the secret of the tickets, settings, chance."""

    def __init__(
        self,
        *,
        router_id: str,
        members: WorkerSet,
        secret: bytes,
        config: RouterConfig,
        metric_set: MetricSet,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.router_id = router_id
        self.members = members
        self.config = config
        self.metrics = metric_set
        self.clock = clock
        self.secret = secret
        self._rng = rng

    def choose(self, need: Need, blocks: PromptBlocks, excluded: set[str]) -> _Pair | None:
        """A pair of ready workers, none of them excluded; None when no decode worker is left."""
        decodes, prefills = (
            {m.ref: m for m in self.members.ready(role) if m.ref.worker_id not in excluded}
            for role in (Role.DECODE, Role.PREFILL)
        )
        choice = choose(
            need,
            [member.view(blocks) for member in decodes.values()],
            [member.view(blocks) for member in prefills.values()],
            config=self.config,
            rng=self._rng,
        )
        if choice is None:
            return None
        prefill = None if choice.prefill is None else prefills[choice.prefill.ref]
        return _Pair(choice=choice, decode=decodes[choice.decode.ref], prefill=prefill)

    def cached_tokens(self, jobs: Sequence[SequenceJob]) -> int:
        """Prompt tokens of these outputs that some prefill worker (without any: decode worker) has
        in its prefix cache, or is about to have."""
        members = self.members.ready(Role.PREFILL) or self.members.ready(Role.DECODE)
        counts = Counter(job.blocks for job in jobs if not job.bypass_prefix_cache)
        return sum(
            count * max((member.view(blocks).expected_tokens for member in members), default=0)
            for blocks, count in counts.items()
        )

    async def hash_blocks(self, jobs: Sequence[SequenceJob]) -> None:
        """Make ready what the choice needs to know of long prompts, off the event loop."""
        long = {job.blocks for job in jobs if job.blocks.num_tokens > _HASHED_AT_ONCE}
        statuses = [m.status for m in self.members.all() if m.prefix.speaks]
        kinds = {(s.fingerprint, s.layout.block_size) for s in statuses if s is not None}
        if long and kinds:
            await asyncio.to_thread(lambda: [blocks.hints(*k) for blocks in long for k in kinds])


class SequenceRun:
    """One output on its way.

    `run` returns when its last token was emitted, or raises a typed error. Whatever happens,
    nothing stays counted and no worker goes on with it.
    """

    def __init__(self, relay: Dispatcher, job: SequenceJob, output: TokenSink) -> None:
        self.spans: list[PlacedSpan] = []
        self.num_cached_tokens: int | None = None
        self._relay = relay
        self._job = job
        self._output = output
        self._merger = TokenMerger()
        self._next_attempt = 0
        self._ended: AttemptEnd | None = None  # how the last attempt did
        self._failures = 0
        self._wait_until = 0.0  # how long to wait for a worker: not at all before the first failure
        self._refused: set[str] = set()
        self._avoided: set[str] = set()
        self._last_refusal: BatonError | None = None

    async def run(self) -> None:
        """Until the end, or until the deadline."""
        loop = asyncio.get_running_loop()
        left_s = self._job.deadline - self._relay.clock()
        try:
            async with asyncio.timeout_at(loop.time() + left_s):
                while True:
                    ended = await self._attempt(await self._choose())
                    if ended.outcome in _WHOLE:
                        return
                    self._learn(ended)
        except TimeoutError:
            if self._ended is not None and self._ended.outcome in _WHOLE:
                return  # at the same moment
            raise DeadlineExceeded("the request's deadline passed", param="timeout") from None

    # --- choosing ---------------------------------------------------------------------------------

    async def _choose(self) -> _Pair:
        """A pair, waiting for one if a worker had the request before: it must not be lost then."""
        need = Need(
            prompt_tokens=len(self._job.prompt_ids) + len(self._merger.output_ids),
            total_tokens=len(self._job.prompt_ids) + self._job.sampling.max_tokens,
        )
        while True:
            pair = self._relay.choose(need, self._job.blocks, self._refused | self._avoided)
            if pair is None and self._avoided:
                # A worker that failed is better than none, but not at once.
                await self._relay.members.changed(_ROUND_PAUSE_S)
                self._avoided.clear()
                continue
            if pair is not None:
                return pair
            left_s = self._wait_until - self._relay.clock()
            if left_s <= 0:
                raise self._no_worker()
            pause_s = _ROUND_PAUSE_S if self._refused else left_s
            self._refused.clear()
            await self._relay.members.changed(min(left_s, pause_s))

    def _no_worker(self) -> BatonError:
        retry_after_s = self._relay.config.retry_after_s
        refusal = self._last_refusal
        if isinstance(refusal, Overloaded):
            wait_s = refusal.retry_after_s or retry_after_s
            return Overloaded(refusal.message, param=refusal.param, retry_after_s=wait_s)
        detail = f": {refusal.message}" if refusal is not None else ""
        return Unavailable(
            f"no decode worker can take this request now{detail}", retry_after_s=retry_after_s
        )

    def _learn(self, ended: AttemptEnd) -> None:
        """Take in how an attempt failed; raises when there is no point in another one."""
        assert ended.error is not None
        if not ended.retriable:
            raise ended.error
        if ended.outcome is AttemptOutcome.REFUSED:
            self._refused.add(ended.worker_id)
            self._last_refusal = ended.error
            return
        self._failures += 1
        if self._failures >= self._relay.config.max_attempts:
            raise ended.error
        self._wait_until = self._relay.clock() + self._relay.config.resume_wait_s
        self._avoided.add(ended.worker_id)
        self._relay.metrics.count(metrics.RESUMES, cause=f"{ended.role}_{ended.outcome}")
        log.warning(
            "request resumed",
            extra={
                "request": self._job.request_id,
                "request_name": self._job.request_name,
                "attempt": self._next_attempt,
                "output_tokens": len(self._merger.output_ids),
                "cause": ended.error.message,
            },
        )

    # --- one attempt ------------------------------------------------------------------------------

    async def _attempt(self, pair: _Pair) -> AttemptEnd:
        start = self._relay.clock()
        key = RequestKey(self._job.request_id, self._next_attempt)
        self._next_attempt += 1
        self._merger.restart()
        attempt = Attempt(
            key,
            merger=self._merger,
            output=self._output,
            remote=pair.prefill is not None,
            clock=self._relay.clock,
        )
        tokens = len(self._job.prompt_ids) + len(self._merger.output_ids)
        granted = -(-tokens // pair.choice.decode.block_size)
        try:
            for member, view in pair.sides:
                computes = member is (pair.prefill or pair.decode)
                uncached = tokens - view.expected_tokens if computes else 0
                blocks = -(-tokens // view.block_size)
                member.attach(key, attempt, self._job.blocks, tokens=uncached, blocks=blocks)
            refused = await self._submit(pair, self._submits(key, pair, granted))
            if refused is not None:
                attempt.end(refused)
            else:
                self._accept(pair, start)
            ended = await attempt.ended
            await self._wait_for_spans(attempt, ended)
            return ended
        finally:
            for member in pair.members:
                member.detach(key)
            self._ended = attempt.result()
            self._cancel_rest(pair, attempt)
            self._count_cached(attempt)
            self.spans += (self._placed(span, key.attempt) for span in attempt.spans)

    def _submits(self, key: RequestKey, pair: _Pair, blocks: int) -> list[Submit]:
        """The messages for decode and, if there is one, prefill: the same but for the peer."""
        sampling = self._job.sampling
        if self._merger.output_ids:  # the prompt was scored before its first output token
            sampling = replace(sampling, prompt_logprobs=None)
        time_left_s = self._job.deadline - self._relay.clock()
        base = Submit(
            key=key,
            router_id=self._relay.router_id,
            prompt_ids=self._job.prompt_ids,
            sampling=sampling,
            time_left_s=time_left_s,
            output_ids=tuple(self._merger.output_ids),
            cache_salt=self._job.cache_salt,
            bypass_prefix_cache=self._job.bypass_prefix_cache,
            trace=self._job.trace,
            grammar=self._job.grammar,
        )
        if pair.prefill is None:
            return [base]
        ticket = Ticket(
            key=key,
            prefill_epoch=pair.prefill.ref.epoch,
            decode_epoch=pair.decode.ref.epoch,
            num_blocks=blocks,
            lifetime_s=time_left_s,
        ).signed(self._relay.secret)
        return [
            replace(base, peer=peer, ticket=ticket) for peer in (pair.prefill.ref, pair.decode.ref)
        ]

    async def _submit(self, pair: _Pair, submits: list[Submit]) -> AttemptEnd | None:
        """Submit to both at once; the most final refusal, if any."""
        answers = await asyncio.gather(
            *(m.submit(s) for m, s in zip(pair.members, submits, strict=True)),
            return_exceptions=True,
        )
        refusals = []
        for member, answer in zip(pair.members, answers, strict=True):
            if isinstance(answer, BatonError):
                refusals.append(_refusal(member.ref, answer))
            elif answer is not None:
                raise answer
        return min(refusals, key=lambda refusal: refusal.retriable, default=None)

    def _accept(self, pair: _Pair, start: float) -> None:
        self._refused.clear()
        self._last_refusal = None
        choice = pair.choice
        if choice.local_reason is not None:
            self._relay.metrics.count(metrics.LOCAL_PREFILLS, reason=choice.local_reason)
        self._relay.metrics.count(
            metrics.PAIR_CHOICES, decode=choice.decode_ground, prefill=choice.prefill_ground
        )
        span = Span(
            phase=Phase.ROUTE,
            start=start,
            end=self._relay.clock(),
            place=self._relay.router_id,
            note=choice.why,
        )
        self.spans.append(self._placed(span, self._next_attempt - 1))

    async def _wait_for_spans(self, attempt: Attempt, ended: AttemptEnd) -> None:
        """Prefill's spans come on a stream of their own and may be late for a short output."""
        if self._job.wants_timeline and ended.outcome in _WHOLE:
            # Well before the deadline: the output itself came in time.
            left_s = (self._job.deadline - self._relay.clock()) / 2
            try:
                async with asyncio.timeout(min(self._relay.config.timeline_wait_s, left_s)):
                    await attempt.prefill_reported.wait()
            except TimeoutError:
                log.info("no spans from prefill", extra={"request": self._job.request_id})

    def _count_cached(self, attempt: Attempt) -> None:
        """Tokens that any attempt has computed count as computed."""
        known = (self.num_cached_tokens, attempt.num_cached_tokens)
        self.num_cached_tokens = min((n for n in known if n is not None), default=None)

    def _cancel_rest(self, pair: _Pair, attempt: Attempt) -> None:
        """Cancel on every worker that may still hold something for this attempt."""
        ended = self._ended
        if ended is None or ended.outcome is not AttemptOutcome.FINISHED:
            for member in pair.members:
                member.cancel(attempt.key)
        elif ended.role is Role.PREFILL:
            # It ended at token 1: prefill releases decode itself; this is for when that gets lost.
            pair.decode.cancel(attempt.key)

    def _placed(self, span: Span, attempt: int) -> PlacedSpan:
        return PlacedSpan(span=span, choice=self._job.index, attempt=attempt)


def _refusal(ref: WorkerRef, error: BatonError) -> AttemptEnd:
    return AttemptEnd(
        outcome=AttemptOutcome.REFUSED,
        role=ref.role,
        worker_id=ref.worker_id,
        error=error,
        retriable=not isinstance(error, _FINAL),
    )
