"""What both front ends call: one implementation of every operation, with its metrics."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from concurrency.event_loop import Tasks
from observability import metrics
from observability.logging import get_logger
from protocol.errors import (
    BatonError,
    ContextTooLong,
    DeadlineExceeded,
    ErrorCode,
    Internal,
    InvalidRequest,
    Overloaded,
    Unavailable,
    typed,
)
from protocol.ids import Role
from protocol.loads import RouterLoad
from protocol.sampling import MAX_SEED
from protocol.timeline import Phase, PlacedSpan, Span, TraceContext
from router.admission.limits import InflightLimits
from router.admission.load_estimate import QueuedRequest
from router.admission.queue import AdmissionQueue, AdmissionTicket
from router.auth.keys import Caller, ServiceTier, tier_name
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request_run import RequestRun, RequestText
from router.dispatch.sequence_jobs import (
    SequenceJob,
    TokenLimits,
    base_sampling,
    check_ids,
    check_prompt_ids,
    make_jobs,
)
from router.dispatch.telemetry import access_logged, record_promises, record_success, traced
from router.request.endpoints import ChatRequest, DetokenizeRequest, TokenizeRequest
from router.request.generate_request import GenerateRequest, RequestId
from router.served_model import ModelInfo, ServedModel
from router.text.reasoning import Thinking
from router.text.stop_strings import StopMatcher
from router.text.text_stream import OutputParts, TextStream

if TYPE_CHECKING:
    from observability.tracing import Tracing

log = get_logger(__name__)

#: How far past the context Tokenize counts: enough to cut a text by, not enough to stall a router.
_TOKENIZE_CONTEXTS = 8
#: After a deadline, for the error to reach a client that reads.
_UNREAD_S = 1.0


class FrontEnd(StrEnum):
    """Which front end a request came through; a label of the metrics."""

    HTTP = "http"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The answer of Tokenize."""

    ids: tuple[int, ...]
    max_model_len: int


class InferenceService:
    """Generate, ListModels, Tokenize, Detokenize. Every failure leaves as a typed error."""

    def __init__(
        self, model: ServedModel, dispatcher: Dispatcher, *, tracing: Tracing | None
    ) -> None:
        self._tracing = tracing
        self.metrics = dispatcher.metrics
        self.clock = dispatcher.clock
        self._config = config = dispatcher.config
        self.limits = InflightLimits(limit=config.max_requests, retry_after_s=config.retry_after_s)
        self._model = model
        self._dispatcher = dispatcher
        #: Responses that go on without their connection.
        self.background = Tasks(lambda error: self._count_failure(FrontEnd.HTTP, typed(error).code))
        self._num_texts = 0  # in Tokenize and Detokenize
        self._queue = AdmissionQueue(
            workers=dispatcher.workers, config=config, metric_set=self.metrics, clock=self.clock
        )

    @property
    def ready(self) -> bool:
        """Whether a request would be accepted now."""
        return not self.limits.draining and self._dispatcher.workers.has_ready(Role.DECODE)

    @contextmanager
    def track(
        self,
        front_end: FrontEnd,
        endpoint: str,
        request_id: RequestId,
        *,
        overdue: Callable[[], bool] = lambda: False,
    ) -> Iterator[None]:
        """Count one call of Generate and, if it fails, its code; every failure leaves typed.

        A call that is cancelled while `overdue()` counts as past its deadline.
        """
        self.metrics.count(metrics.REQUESTS, door=front_end, endpoint=endpoint)
        fields = {"endpoint": endpoint, "request": request_id.key, "request_name": request_id.name}
        try:
            yield
        except BatonError as error:
            self._count_failure(front_end, error.code)
            if isinstance(error, Internal):
                log.error("request failed", exc_info=error, extra=fields)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = ErrorCode.DEADLINE_EXCEEDED if overdue() else ErrorCode.CANCELLED
            self._count_failure(front_end, code)
            raise
        except Exception as error:
            self._count_failure(front_end, ErrorCode.INTERNAL)
            log.exception("request failed", extra=fields)
            raise typed(error) from error

    def _count_failure(self, front_end: FrontEnd, code: ErrorCode) -> None:
        self.metrics.count(metrics.REQUEST_FAILURES, door=front_end, code=code.value)

    @asynccontextmanager
    async def generate(
        self,
        request: GenerateRequest,
        *,
        request_id: RequestId,
        arrival: float,
        caller: Caller,
        trace: TraceContext | None = None,
        time_left_s: float | None = None,
    ) -> AsyncIterator[RequestRun]:
        """Run a request for the length of the block.

        `arrival` is in seconds since the Unix epoch; `time_left_s` is until the deadline of the
        call itself, if it has one; `trace` is its parent in a trace. Raises typed errors before
        anything is submitted.
        """
        self._model.check_name(request.model, caller)
        deadline = arrival + self._time_allowed(request, time_left_s)
        if self._config.private_prefixes:
            request = structs.replace(request, cache_salt=f"{caller.name}\0{request.cache_salt}")
        traced_request = traced(
            self._tracing,
            request,
            request_id=request_id,
            arrival=arrival,
            incoming=trace,
            model=self.model_name,
            clock=self.clock,
        )
        param = "n" if request.n > 1 else "prompt"
        admitted = self.limits.enter(request.num_sequences, caller, param=param)
        logged = partial(access_logged, request, request_id, caller.name, self.clock)
        with traced_request as span, logged(span, self._config.access_log), admitted:
            tier = tier_name(request.service_tier, caller, self._config.service_tiers)
            queued = QueuedRequest(
                caller=caller,
                tier_name=tier,
                tier=self._config.service_tiers.get(tier, ServiceTier()),
                priority=request.priority,
                arrival=arrival,
                deadline=deadline,
            )
            async with self.limits.until_closed():
                async with _ended_in(deadline - self.clock(), "before it was admitted"):
                    await self._dispatcher.workers.settled()
                    span.run = await self._prepare(request, request_id, queued, span.context)
                # Outputs end by their deadline, but a client that does not read them would keep the
                # request in flight.
                left_s = deadline + _UNREAD_S - self.clock()
                unread = _ended_in(left_s, "before its output was read")
                try:
                    async with unread, span.run as run:
                        yield run
                except InvalidRequest as error:
                    raise self._model.grammars.named(error, request) from None
                finally:
                    record_promises(self.metrics, span.run, queued.tier.promises())
            pace = record_success(self.metrics, run, end=self.clock())
            if pace is not None:
                self._queue.finished(*pace)

    async def tokenize(self, request: TokenizeRequest, caller: Caller) -> Tokens:
        """Ids of `prompt`, or of `messages` and `tools` through the chat template; a few contexts
        at most."""
        with self._text_work():
            self._model.check_name(request.model, caller)
            special, limit = request.add_special_tokens, _TOKENIZE_CONTEXTS * self._model.context
            if request.messages is not None:
                ids = await self._model.encode_chat(
                    request.messages,
                    request.tool_use(),
                    request.template_options(),
                    add_special_tokens=special or False,
                    limit=limit,
                )
            else:
                assert request.prompt is not None
                add = True if special is None else special
                ids = await self._model.encode_text(
                    request.prompt, add_special_tokens=add, limit=limit
                )
            return Tokens(ids=ids, max_model_len=self._limits().total)

    async def count_prompt(self, request: ChatRequest, caller: Caller) -> int:
        """Tokens of a chat's prompt, a few contexts at most."""
        with self._text_work():
            self._model.check_name(request.model, caller)
            limit = _TOKENIZE_CONTEXTS * self._model.context
            (ids,) = await self._model.encode_request(request, limit=limit)
            return len(ids)

    async def detokenize(self, request: DetokenizeRequest, caller: Caller) -> str:
        """Text of `tokens`, special tokens included."""
        self._model.check_name(request.model, caller)
        ids, max_ids = request.tokens, _TOKENIZE_CONTEXTS * self._model.context
        if len(ids) > max_ids:
            raise ContextTooLong(f"{len(ids)} tokens are more than {max_ids}", param="tokens")
        if ids:
            check_ids(ids, self._limits(), param="tokens")
        with self._text_work():
            return await self._model.decode(ids)

    @contextmanager
    def _text_work(self) -> Iterator[None]:
        """Bound the texts of Tokenize and Detokenize that wait for threads. Raises Overloaded."""
        if self._num_texts >= self._config.max_requests:
            raise Overloaded(
                f"{self._num_texts} texts are being tokenised",
                retry_after_s=self._config.retry_after_s,
            )
        self._num_texts += 1
        try:
            yield
        finally:
            self._num_texts -= 1

    @property
    def load(self) -> RouterLoad:
        return self._queue.load()

    def share_limits(self, num_routers: int) -> None:
        self.limits.num_routers = self._queue.num_routers = num_routers
        self._queue.pump()

    @property
    def model_name(self) -> str:
        return self._model.name

    @property
    def model_named(self) -> ModelInfo:
        """What answers say of the model: without the precision of the workers there are now."""
        return self._model.named

    @property
    def model_info(self) -> ModelInfo:
        precisions = self._dispatcher.workers.precisions()
        return self._model.info(precisions, max_model_len=self._limits().total)

    def models(self, caller: Caller) -> list[ModelInfo]:
        return [self.model_info] if caller.may_use(self._model.names) else []

    def find_model(self, name: str, caller: Caller) -> ModelInfo:
        """One model by any of its names. Raises NotFound, or PermissionDenied."""
        self._model.check_name(name, caller)
        return self.model_info

    # --- parts of generate ------------------------------------------------------------------------

    def _time_allowed(self, request: GenerateRequest, time_left_s: float | None) -> float:
        max_s = self._config.max_timeout_s
        if request.timeout is not None and request.timeout > max_s:
            raise InvalidRequest(
                f"timeout must be at most {max_s}, got {request.timeout}", param="timeout"
            )
        timeout_s = request.timeout or self._config.default_timeout_s
        return timeout_s if time_left_s is None else min(timeout_s, time_left_s)

    def _limits(self) -> TokenLimits:
        """The limits of the ready decode workers; without any only the model's own."""
        context = self._model.context
        max_model_len, capacity = self._dispatcher.workers.longest() or (context, context)
        return TokenLimits(
            vocab_size=self._model.text.vocab_size,
            context=min(context, max_model_len),
            capacity=capacity,
        )

    async def _prepare(
        self,
        request: GenerateRequest,
        request_id: RequestId,
        queued: QueuedRequest,
        trace: TraceContext | None,
    ) -> RequestRun:
        limits = self._limits()
        sampling = base_sampling(
            request,
            limits,
            eos_ids=self._model.text.eos_ids,
            seed=secrets.randbelow(MAX_SEED),
            defaults=self._model.sampling_defaults,
        )
        check_prompt_ids(request, limits)
        start = self.clock()
        cut = request.truncate_prompt_tokens
        limit = limits.total if cut is None else _TOKENIZE_CONTEXTS * limits.total
        prompts = await self._model.encode_request(request, limit=limit)
        if cut is not None:
            prompts = [ids[-cut:] for ids in prompts]
        thinking = self._model.thinking(request, prompts[0])
        grammar = await self._model.grammars.grammar(request, thinking)
        echoed = await self._model.show_prompts(request, prompts) if request.echoes_prompt else {}
        jobs = make_jobs(
            request,
            prompts,
            sampling,
            limits,
            request_id=request_id,
            deadline=queued.deadline,
            grammar=grammar,
        )
        keep_s = request.returns_within(self._config.tools_keep_s)
        jobs = [replace(_promised(job, queued), trace=trace, keep_s=keep_s) for job in jobs]
        await self._dispatcher.hash_blocks(jobs)
        if not self._dispatcher.workers.has_ready(Role.DECODE):
            raise Unavailable("no decode worker is ready", retry_after_s=self._config.retry_after_s)
        span = Span(
            phase=Phase.TOKENIZE,
            start=start,
            end=self.clock(),
            place=self._dispatcher.router_id,
            counts={"tokens": sum(map(len, prompts))},
        )
        return RequestRun(
            self._dispatcher,
            request_id=request_id.key,
            jobs=jobs,
            text=RequestText(
                stream=partial(self._text_stream, request, thinking),
                token_table=self._model.text.token_table,
                echoed=echoed,
                whole=not request.stream,
            ),
            prompt_tokens=sum(map(len, prompts)),
            ticket=self._ticket(queued, jobs),
            spans=[PlacedSpan(span=span, choice=0, attempt=0)],
        )

    def _ticket(self, queued: QueuedRequest, jobs: Sequence[SequenceJob]) -> AdmissionTicket:
        lengths = [len(job.prompt_ids) for job in jobs]
        queued = replace(
            queued,
            tokens=sum(lengths),
            largest=max(lengths),
            work=max(1, self._dispatcher.work_tokens(jobs)),
            num_sequences=len(jobs),
        )
        return AdmissionTicket(self._queue, queued)

    def _text_stream(
        self, request: GenerateRequest, thinking: Thinking | None, prompt: Sequence[int]
    ) -> TextStream:
        parser = self._model.grammars.call_parser(request)
        splitter = None if thinking is None else self._model.text.reasoning.splitter(thinking)
        parsed = parser is not None or splitter is not None
        text, skip = self._model.text, request.skip_special_tokens
        # Stop strings and calls may be spelled by special tokens that are left out of the text.
        hidden = text.special_tokens if skip and request.stops else {}
        marks = self._model.grammars.special_marks if skip and parsed else {}
        return TextStream(
            text.detokenizer(skip_special_tokens=skip, prompt=prompt),
            StopMatcher(request.stops, include=request.include_stop_str_in_output),
            min_tokens=request.min_tokens,
            include_stop=request.include_stop_str_in_output,
            parts=OutputParts(
                calls=parser,
                thoughts=splitter,
                shows_thoughts=not isinstance(request, ChatRequest) or request.include_reasoning,
            ),
            hidden={i: t for i, t in hidden.items() if i not in marks} if marks else hidden,
            marks=marks,
        )


@asynccontextmanager
async def _ended_in(left_s: float, what: str) -> AsyncIterator[None]:
    """End the block by a deadline, with the typed error."""
    try:
        async with asyncio.timeout(max(0.0, left_s)):
            yield
    except TimeoutError:
        message = f"the request's deadline passed {what}"
        raise DeadlineExceeded(message, param="timeout") from None


def _promised(job: SequenceJob, queued: QueuedRequest) -> SequenceJob:
    tier = queued.tier
    first_due = None if tier.ttft_s is None else queued.arrival + tier.ttft_s
    return replace(job, gap_s=tier.gap_s, first_due=first_due)
