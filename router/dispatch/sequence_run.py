"""Runs one output: chooses workers, submits, passes tokens on, tries again, cleans up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from observability import metrics
from observability.logging import get_logger
from protocol.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from protocol.ids import RequestKey, Role
from protocol.kv_layout import KVFingerprint
from protocol.messages import PrefixSource, Submit, Ticket
from protocol.timeline import Phase, PlacedSpan, Span
from router.dispatch.attempt import Attempt, AttemptEnd, AttemptOutcome, TokenMerger, TokenSink
from router.dispatch.dispatcher import Dispatcher, WorkerPair
from router.dispatch.moves import Mover
from router.dispatch.sequence_jobs import SequenceJob
from router.workers.bookkeeping import PromptBlocks
from router.workers.policy import Need
from router.workers.worker_client import WorkerClient

log = get_logger(__name__)

#: Before a worker that refused or failed an output gets it again.
_RETRY_PAUSE_S = 0.1
#: How long a worker may take KV from another, once it has begun with a prompt or waits to.
_LOAN_S = 60.0
#: Refusals that no other worker would answer differently.
_FINAL = (InvalidRequest, PayloadTooLarge)
#: How long a submit may go without an answer before its worker is asked whether it runs.
_ANSWER_S = 0.25


class SequenceRun:
    """One output in flight.

    `run` returns when its last token was emitted, or raises a typed error. However it ends, nothing
    stays counted and no worker goes on with it. `on_submit` is called once, when the output is
    first reserved on its workers.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        job: SequenceJob,
        output: TokenSink,
        *,
        on_submit: Callable[[], None],
    ) -> None:
        self.spans: list[PlacedSpan] = []
        self.num_cached_tokens: int | None = None
        self._dispatcher = dispatcher
        self._job = job
        self._output = output
        self._on_submit = on_submit
        # A prompt whose tokens all have to run uses no cached ones.
        self._cached_blocks = PromptBlocks(()) if job.bypass_prefix_cache else job.blocks
        self._merger = TokenMerger()
        self._next_attempt = 0
        self._ended: AttemptEnd | None = None  # of the last attempt
        self._num_failures = 0
        self._num_given_back = 0
        self._goes_to: WorkerClient | None = None  # which then computes the prompt
        self._first_submit = 0.0
        self._wait_until = 0.0  # for a worker: not at all before the first failure
        self._refused: set[str] = set()
        self._failed: Counter[str] = Counter()
        self._last_refusal: BatonError | None = None
        self._began_on: KVFingerprint | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = self._job.deadline - self._dispatcher.clock()
        try:
            async with asyncio.timeout_at(loop.time() + left_s):
                while True:
                    ended = await self._attempt(await self._wait_for_pair())
                    if ended.is_complete:
                        return
                    self._count_failure(ended)
        except TimeoutError:
            if self._ended is not None and self._ended.is_complete:
                return  # at the same moment
            raise DeadlineExceeded("the request's deadline passed", param="timeout") from None

    # --- choosing ---------------------------------------------------------------------------------

    async def _wait_for_pair(self) -> WorkerPair:
        """A pair. Waits for one if a worker had accepted the request before: then it must not be
        lost."""
        dispatcher, paused = self._dispatcher, False
        while True:
            pair = self._pair_without(self._refused)
            if pair is not None:
                if paused or not self._failed[pair.decode.ref.worker_id]:
                    return pair
                # A worker that failed is better than none, but not at once.
                paused = True
                await dispatcher.workers.changed(_RETRY_PAUSE_S)
                continue
            left_s = self._wait_until - dispatcher.clock()
            if left_s <= 0:
                raise self._no_worker()
            pause_s = _RETRY_PAUSE_S if self._refused else left_s
            self._refused.clear()
            await dispatcher.workers.changed(min(left_s, pause_s))

    def _pair_without(self, refused: set[str]) -> WorkerPair | None:
        job, output_ids = self._job, self._merger.output_ids
        need = Need(
            prompt_tokens=len(job.prompt_ids) + len(output_ids),
            total_tokens=len(job.prompt_ids) + job.sampling.max_tokens,
        )
        return self._dispatcher.choose(
            need,
            self._cached_blocks,
            refused=refused,
            failed=self._failed,
            like=self._began_on if output_ids else None,
            computes=self._goes_to,
        )

    def _no_worker(self) -> BatonError:
        retry_after_s = self._dispatcher.config.retry_after_s
        refusal = self._last_refusal
        if isinstance(refusal, Overloaded):
            wait_s = refusal.retry_after_s or retry_after_s
            return Overloaded(refusal.message, param=refusal.param, retry_after_s=wait_s)
        detail = f": {refusal.message}" if refusal is not None else ""
        return Unavailable(
            f"no decode worker can take this request now{detail}", retry_after_s=retry_after_s
        )

    def _count_failure(self, ended: AttemptEnd) -> None:
        """Note how an attempt failed; raises when another one would fail as well."""
        assert ended.error is not None
        if not ended.retriable:
            raise ended.error
        if ended.outcome is AttemptOutcome.GIVEN_BACK:
            self._num_given_back += 1
            self._wait_until = self._dispatcher.clock() + self._dispatcher.config.resume_wait_s
            self._dispatcher.metrics.count(metrics.PROMPTS_GIVEN_BACK, role=str(ended.role))
            return
        cause = f"{ended.role}_{ended.outcome}"
        if ended.outcome in (AttemptOutcome.REFUSED, AttemptOutcome.UNANSWERED):
            self._refused.add(ended.worker_id)
            self._last_refusal = ended.error
            if self._merger.output_ids and not self._wait_until:  # accepted, but answered late
                self._wait_until = self._dispatcher.clock() + self._dispatcher.config.resume_wait_s
            if ended.outcome is AttemptOutcome.UNANSWERED:
                self._dispatcher.metrics.count(metrics.RESUMES, cause=cause)
            return
        self._num_failures += 1
        if self._num_failures >= self._dispatcher.config.max_attempts:
            raise ended.error
        self._wait_until = self._dispatcher.clock() + self._dispatcher.config.resume_wait_s
        self._failed[ended.worker_id] += 1
        self._dispatcher.metrics.count(metrics.RESUMES, cause=cause)
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

    async def _attempt(self, pair: WorkerPair) -> AttemptEnd:
        start, recalls = self._dispatcher.clock(), self._dispatcher.recalls
        key = self._next_key()
        self._merger.restart()
        if not self._merger.output_ids:
            self._began_on = pair.choice.decode.fingerprint
        attempt = Attempt(
            key,
            merger=self._merger,
            output=self._output,
            remote=pair.prefill is not None,
            holder=pair.decode.ref.worker_id,
            clock=self._dispatcher.clock,
            on_decode=lambda: pair.decode_began(key, self._dispatcher.clock()),
        )
        attempt.on_prompt = partial(recalls.computed, key)
        mover = Mover(
            self._dispatcher,
            self._job,
            attempt,
            pair.decode,
            next_key=self._next_key,
            submit=self._submit_of,
        )
        try:
            self._reserve(pair, attempt)
            if pair.may_change and not self._merger.output_ids:
                computes = pair.prefill or pair.decode
                recalls.placed(key, computes, num_before=self._num_given_back)
            refused = await self._submit(pair, attempt)
            if refused is not None:
                attempt.end(refused)
            else:
                self._accepted(pair, key, start)
            ended = await attempt.ended
            await self._wait_for_spans(attempt, ended)
            return ended
        finally:
            self._ended = attempt.result()
            self._goes_to = recalls.ended(key)
            mover.close()
            if self._ended is not None:
                pair.record(self._ended, attempt, mover.holder, self._dispatcher.clock())
            for worker in pair.workers:
                worker.detach(key, cancel=self._may_run_on(worker, pair))
            for worker, moved in mover.places:
                # The output may have ended before its worker heard of the move that has begun.
                begun = moved != attempt.holder_key
                worker.detach(moved, cancel=begun or self._may_run_on(worker, pair))
            self._count_cached(attempt)
            self.spans += (self._placed(span, key.attempt) for span in attempt.spans)

    def _reserve(self, pair: WorkerPair, attempt: Attempt) -> None:
        tokens = len(self._job.prompt_ids) + len(self._merger.output_ids)
        for worker, view in pair.sides:
            computes = worker is (pair.prefill or pair.decode)
            uncached = tokens - pair.cached_tokens if computes else 0
            blocks = view.layout.pages_for(tokens)
            worker.attach(
                attempt.key,
                attempt,
                self._job.blocks,
                role=Role.PREFILL if worker is pair.prefill else Role.DECODE,
                tokens=uncached,
                blocks=blocks,
            )
        if attempt.key.attempt == 0:
            self._first_submit = self._dispatcher.clock()
            self._on_submit()

    def _next_key(self) -> RequestKey:
        key = RequestKey(self._job.request_id, self._next_attempt)
        self._next_attempt += 1
        return key

    def _submit_of(self, key: RequestKey) -> Submit:
        """What a worker without a peer needs to go on with the output."""
        sampling, now = self._job.sampling, self._dispatcher.clock()
        first_due = None if self._merger.output_ids else self._job.first_due
        again = key.attempt > 0 and not self._merger.output_ids
        waited_s = max(0.0, now - self._first_submit) if again else 0.0
        if self._merger.output_ids:  # the prompt was scored before its first output token
            sampling = replace(sampling, prompt_logprobs=None)
        return Submit(
            key=key,
            router_id=self._dispatcher.router_id,
            prompt_ids=self._job.prompt_ids,
            sampling=sampling,
            time_left_s=self._job.deadline - now,
            output_ids=tuple(self._merger.output_ids),
            cache_salt=self._job.cache_salt,
            bypass_prefix_cache=self._job.bypass_prefix_cache,
            trace=self._job.trace,
            grammar=self._job.grammar,
            gap_s=self._job.gap_s,
            first_s=None if first_due is None else first_due - now + waited_s,
            waited_s=waited_s,
            keep_s=self._job.keep_s,
        )

    def _submits(self, key: RequestKey, pair: WorkerPair) -> list[Submit]:
        """The messages for decode and, if there is one, prefill: the same but for the peer."""
        submit = self._submit_of(key)
        source = self._source(key, pair, submit)
        if pair.prefill is None:
            return [replace(submit, source=source)]
        num_tokens = len(submit.prompt_ids) + len(submit.output_ids)
        ticket = Ticket(
            key=key,
            sender_epoch=pair.prefill.ref.epoch,
            receiver_epoch=pair.decode.ref.epoch,
            num_blocks=pair.choice.decode.layout.pages_for(num_tokens),
            lifetime_s=submit.time_left_s,
        ).signed(self._dispatcher.secret)
        return [
            replace(submit, peer=pair.prefill.ref, ticket=ticket),
            replace(submit, peer=pair.decode.ref, ticket=ticket, source=source),
        ]

    def _source(self, key: RequestKey, pair: WorkerPair, submit: Submit) -> PrefixSource | None:
        """Where the worker that computes the prompt may find more of its KV."""
        source, worker = pair.source, pair.choice.prefill or pair.choice.decode
        if source is None:
            return None
        ticket = Ticket(
            key=key.loan,
            sender_epoch=source.ref.epoch,
            receiver_epoch=worker.ref.epoch,
            num_blocks=worker.layout.pages_for(source.cached_tokens),
            lifetime_s=min(submit.time_left_s, _LOAN_S),
        ).signed(self._dispatcher.secret)
        return PrefixSource(worker=source.ref, ticket=ticket, num_tokens=source.cached_tokens)

    async def _submit(self, pair: WorkerPair, attempt: Attempt) -> AttemptEnd | None:
        """Submit to both at once. Returns a refusal, if any, preferably one that is final; or the
        loss of a worker before both have answered.

        Not both have answered when the attempt ends before, one has refused, or one stands still
        while others can take the prompt."""
        submits = zip(pair.workers, self._submits(attempt.key, pair), strict=True)
        calls = {worker.calls.submit(submit): worker for worker, submit in submits}
        both = asyncio.gather(*calls, return_exceptions=True)
        while not attempt.ended.done():
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait((both, attempt.ended), timeout=_ANSWER_S, return_when=first)
            answered = [call for call in calls if call.done()]
            refusals = [
                self._refusal(calls[call], error)
                for call in answered
                if (error := call.exception()) is not None
            ]
            if refusals or both.done():
                return min(refusals, key=lambda refusal: refusal.retriable, default=None)
            silent = [worker for call, worker in calls.items() if call not in answered]
            if (still := self._left_for_others(silent)) is not None:
                error = Unavailable(f"worker {still.ref.worker_id} does not answer")
                return self._refusal(still, error, AttemptOutcome.UNANSWERED)
        ended = attempt.ended.result()
        return ended if ended.outcome is AttemptOutcome.LOST else None

    def _left_for_others(self, silent: list[WorkerClient]) -> WorkerClient | None:
        """A worker that stands still, if others can take the prompt, with the weights of what there
        is of the output. Asks all that are silent."""
        for worker in silent:
            worker.calls.ask()
        still = [worker for worker in silent if worker.calls.still]
        if not still:
            return None
        other = self._pair_without(self._refused | {worker.ref.worker_id for worker in still})
        if other is None or any(worker.calls.still for worker in other.workers):
            return None
        alike = other.choice.decode.fingerprint == self._began_on
        return still[0] if alike or not self._merger.output_ids else None

    @staticmethod
    def _refusal(
        worker: WorkerClient,
        error: BaseException,
        outcome: AttemptOutcome = AttemptOutcome.REFUSED,
    ) -> AttemptEnd:
        if not isinstance(error, BatonError):
            raise error
        return AttemptEnd(
            outcome=outcome,
            role=worker.ref.role,
            worker_id=worker.ref.worker_id,
            error=error,
            retriable=not isinstance(error, _FINAL),
        )

    def _accepted(self, pair: WorkerPair, key: RequestKey, start: float) -> None:
        self._refused.clear()
        self._last_refusal = None
        choice, dispatcher = pair.choice, self._dispatcher
        if choice.local_reason is not None:
            dispatcher.metrics.count(metrics.LOCAL_PREFILLS, reason=choice.local_reason)
        dispatcher.metrics.count(
            metrics.PAIR_CHOICES, decode=choice.decode_reason, prefill=choice.prefill_reason
        )
        span = Span(
            phase=Phase.ROUTE,
            start=start,
            end=dispatcher.clock(),
            place=dispatcher.router_id,
            note=choice.note,
        )
        self.spans.append(self._placed(span, key.attempt))

    async def _wait_for_spans(self, attempt: Attempt, ended: AttemptEnd) -> None:
        """Prefill's spans come on a stream of their own and may be late for a short output."""
        if self._job.wants_timeline and ended.is_complete:
            # Well before the deadline: the output itself came in time.
            left_s = (self._job.deadline - self._dispatcher.clock()) / 2
            try:
                async with asyncio.timeout(min(self._dispatcher.config.timeline_wait_s, left_s)):
                    await attempt.prefill_reported.wait()
            except TimeoutError:
                log.info("no spans from prefill", extra={"request": self._job.request_id})

    def _count_cached(self, attempt: Attempt) -> None:
        """Tokens that any attempt has computed count as computed."""
        known = (self.num_cached_tokens, attempt.num_cached_tokens)
        self.num_cached_tokens = min((n for n in known if n is not None), default=None)

    def _may_run_on(self, worker: WorkerClient, pair: WorkerPair) -> bool:
        """Whether a worker may still hold something for the last attempt."""
        ended = self._ended
        if ended is None or ended.outcome is not AttemptOutcome.FINISHED:
            return True
        # At token 1 prefill releases decode itself; that message may get lost.
        return ended.role is Role.PREFILL and worker is pair.decode

    def _placed(self, span: Span, attempt: int) -> PlacedSpan:
        return PlacedSpan(span=span, choice=self._job.index, attempt=attempt)
