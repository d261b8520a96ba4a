"""One attempt at one output: merges the events of both workers and decides when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from observability.logging import get_logger
from protocol.errors import BatonError, HandoffFailed, Internal, Unavailable
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import FailEvent, PromptEvent, ScoreEvent, SpanEvent, TokenEvent
from protocol.timeline import Phase, Span
from router.workers.event_sink import AttemptEvent

log = get_logger(__name__)
E = TypeVar("E", TokenEvent, ScoreEvent)


class TokenSink(Protocol):
    """Takes an output, over all attempts at it."""

    def take(self, event: TokenEvent) -> bool:
        """Add one token, in order. Returns True to cut the output there (a stop string)."""

    def score(self, event: ScoreEvent) -> None:
        """Add log-probabilities of the prompt; they may repeat earlier ones."""


class AttemptOutcome(StrEnum):
    """How an attempt ended."""

    FINISHED = "finished"  # the last token came
    CUT = "cut"  # the router needs no more
    REFUSED = "refused"  # a worker would not take it
    UNANSWERED = "unanswered"  # a worker stands still, and others can take it
    FAILED = "failed"  # a worker gave it up
    GIVEN_BACK = "given_back"  # a worker that was asked for it had not begun
    LOST = "lost"  # a worker's event stream broke


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """The end of an attempt. `worker_id` names the worker that refused, failed or was lost.

    `retriable`: another attempt may succeed; otherwise `error` goes to the client.
    """

    outcome: AttemptOutcome
    role: Role | None = None
    worker_id: str = ""
    error: BatonError | None = None
    retriable: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the client has the whole output."""
        return self.outcome in (AttemptOutcome.FINISHED, AttemptOutcome.CUT)


class TokenMerger:
    """Orders the tokens of an output over all its attempts: token 1 may come from prefill and the
    rest from decode, on two streams that race. Early tokens wait; late ones of a lost attempt are
    dropped. A new attempt gets `output_ids` as input, so its workers repeat none."""

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self._early: dict[int, TokenEvent] = {}

    def add(self, event: TokenEvent) -> list[TokenEvent]:
        """Add one token. Returns the tokens that are now in order."""
        if event.index != len(self.output_ids):
            if event.index > len(self.output_ids):
                self._early[event.index] = event
            return []
        self.output_ids.append(event.token)
        ready = [event]
        while self._early:
            following = self._early.pop(len(self.output_ids), None)
            if following is None:
                break
            self.output_ids.append(following.token)
            ready.append(following)
        return ready

    @property
    def waits(self) -> bool:
        """Whether a token is missing before those that have come."""
        return bool(self._early)

    def restart(self) -> None:
        """A new attempt begins: it computes the tokens that were early again."""
        self._early.clear()


class Attempt:
    """Takes the events of one attempt, on the event loop (router.workers.event_sink.EventSink).
    `ended` resolves exactly once; later events are dropped, except spans. `remote`: a prefill
    worker takes part; `on_decode` is called with decode's first token, `on_prompt` (if it was set)
    when the prompt is computed.

    `holder` is the id of the worker that decodes the output, `holder_key` the key that it has
    there; both change when the output moves (router.dispatch.moves, which sets `on_unload` and
    `relocate`). `moving`: another worker may have it by now.
    """

    def __init__(
        self,
        key: RequestKey,
        *,
        merger: TokenMerger,
        output: TokenSink,
        remote: bool,
        holder: str,
        clock: Callable[[], float],
        on_decode: Callable[[], None] = lambda: None,
    ) -> None:
        self.key = key
        self.ended: asyncio.Future[AttemptEnd] = asyncio.get_running_loop().create_future()
        self.spans: list[Span] = []
        self.prefill_reported = asyncio.Event()
        self.decode_started: float | None = None  # when its first token came
        self.num_cached_tokens: int | None = None  # of the prompt, once that is known
        self.holder = holder
        self.holder_key = key
        self.moving = False
        self.on_prompt: Callable[[], None] = lambda: None
        self.forget_mover()
        self._gone: dict[RequestKey, WorkerRef] = {}  # decode workers that have handed it over
        self._merger = merger
        self._num_before = len(merger.output_ids)  # tokens of earlier attempts
        self._output = output
        self._clock = clock
        self._on_decode = on_decode
        if not remote:
            self.prefill_reported.set()

    def forget_mover(self) -> None:
        """The output stays with its holder from now on."""
        self.on_unload: Callable[[], None] = lambda: None
        self.relocate: Callable[[], bool] = lambda: False

    def on_token(self, event: TokenEvent, role: Role) -> None:
        """Merge one token; a worker's last one carries its spans."""
        self._add_spans(event.spans, role)
        if self.ended.done():
            return
        if role is Role.DECODE and self.decode_started is None:
            self.decode_started = self._clock()
            self._on_decode()
            self.on_unload()
        self._guarded(self._forward, event, role)

    def on_event(self, event: AttemptEvent, ref: WorkerRef) -> None:
        """Take any other event; `FailEvent` ends the attempt."""
        if isinstance(event, PromptEvent):
            self.num_cached_tokens = event.num_cached_tokens
            self.on_prompt()
            return
        self._add_spans(event.spans, ref.role)
        if isinstance(event, ScoreEvent) and not self.ended.done():
            self._guarded(self._score, event, ref.role)
        elif isinstance(event, SpanEvent):
            self._handed_over(event.key, ref)
        elif isinstance(event, FailEvent) and not self._is_old(event.key, ref):
            self.end(
                AttemptEnd(
                    outcome=AttemptOutcome.GIVEN_BACK
                    if event.given_back
                    else AttemptOutcome.FAILED,
                    role=ref.role,
                    worker_id=ref.worker_id,
                    error=event.error.to_error(),
                    retriable=event.retriable,
                )
            )

    def on_lost(self, ref: WorkerRef, reason: str) -> None:
        """A lost worker ends the attempt, unless it has handed over all that it had of it: prefill
        by its own word, or when decode has started and token 1 has come."""
        if ref.role is Role.PREFILL:
            handed_over = self.prefill_reported.is_set()
            self.prefill_reported.set()
            began = self.decode_started is not None
            if handed_over or (began and len(self._merger.output_ids) > self._num_before):
                return
        elif self.moving and self._gone.get(self.holder_key) == ref:
            return  # the next worker has it, or the move will be found to have failed
        elif ref.worker_id != self.holder and not self._merger.waits:
            return  # the output has moved on, and all tokens from there have come
        error_class = HandoffFailed if ref.role is Role.PREFILL else Unavailable
        self.end(
            AttemptEnd(
                outcome=AttemptOutcome.LOST,
                role=ref.role,
                worker_id=ref.worker_id,
                error=error_class(f"{ref.role} worker {ref.worker_id} was lost: {reason}"),
                retriable=True,
            )
        )

    def stayed(self) -> None:
        """A move has failed. If the holder has handed the output over nevertheless, its receiver
        was told to forget it."""
        if (ref := self._gone.get(self.holder_key)) is not None:
            self.on_lost(ref, "its output was moved, and the move then cancelled")

    def _is_old(self, key: RequestKey, ref: WorkerRef) -> bool:
        """Whether the output has moved on from this decode worker."""
        return ref.role is Role.DECODE and key != self.holder_key

    def _handed_over(self, key: RequestKey, ref: WorkerRef) -> None:
        """Spans of a worker that has ended its part: after prefill's commit, or a move's."""
        if ref.role is Role.DECODE:
            self._gone[key] = ref
            if not self.moving:
                self.stayed()

    def result(self) -> AttemptEnd | None:
        """How it ended; None while it runs, or when the task that awaits it was cancelled."""
        if not self.ended.done() or self.ended.cancelled():
            return None
        return self.ended.result()

    def end(self, ended: AttemptEnd) -> None:
        """Resolve, unless it has ended already."""
        if not self.ended.done():
            self.ended.set_result(ended)

    def _forward(self, event: TokenEvent, role: Role) -> None:
        for token in self._merger.add(event):
            cut = self._output.take(token)
            if token.finish is not None:
                self.end(AttemptEnd(outcome=AttemptOutcome.FINISHED, role=role))
                return
            if cut:
                self._add_cut_span()
                self.end(AttemptEnd(outcome=AttemptOutcome.CUT))
                return

    def _score(self, event: ScoreEvent, role: Role) -> None:
        self._output.score(event)
        if event.finish is not None:
            self.end(AttemptEnd(outcome=AttemptOutcome.FINISHED, role=role))

    def _guarded(self, take: Callable[[E, Role], None], event: E, role: Role) -> None:
        """Confine a defect in this output's text to this output: the worker's event stream serves
        all. Another attempt would meet the same defect."""
        try:
            take(event, role)
        except Exception as error:
            log.exception("processing an output failed", extra={"request": self.key.request_id})
            internal = Internal(f"{type(error).__name__}: {error}")
            self.end(AttemptEnd(outcome=AttemptOutcome.FAILED, error=internal))

    def _add_cut_span(self) -> None:
        """Decode does not report its part of an output that the router has cut."""
        if self.decode_started is not None:
            span = Span(
                phase=Phase.DECODE,
                start=self.decode_started,
                end=self._clock(),
                note="cut at a stop string",
            )
            self.spans.append(span)

    def _add_spans(self, spans: tuple[Span, ...], role: Role) -> None:
        if spans:
            self.spans.extend(spans)
            if role is Role.PREFILL:
                self.prefill_reported.set()
