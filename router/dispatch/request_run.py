"""One request in flight: its outputs, and the deltas that are ready to be sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from msgspec.structs import asdict

from observability import metrics
from observability.export import MetricSet
from observability.metrics import Metric
from protocol.errors import BatonError, typed
from protocol.messages import ScoreEvent, TokenEvent
from protocol.sampling import TokenLogprobs
from protocol.states import FinishReason
from protocol.timeline import PlacedSpan
from router.admission.queue import AdmissionTicket
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.sequence_jobs import SequenceJob
from router.dispatch.sequence_run import SequenceRun
from router.text.detokenizer import TokenTable
from router.text.text_stream import TextStream
from router.text.tokenizer import PromptText
from router.text.tool_parser import CallDelta
from router.workers.bookkeeping import PromptBlocks


@dataclass(slots=True)
class Score:
    """A token and how likely it was; the first token of a prompt has no log-probabilities.

    `offset` is where its text begins in the text of its choice, in characters.
    """

    token: int
    logprobs: TokenLogprobs | None
    offset: int


@dataclass(slots=True)
class Delta:
    """What one message adds to one choice. Mutable only for speed of construction.

    `scores` are those of `token_ids`, None when not requested. `prompt_scores` come with the first
    delta, one for every prompt token. `calls` is what it adds to tool calls. `stop` is the stop
    string or token that ended the output, if one of the request's did. `reasoning` is what it adds
    to the thoughts before the text.
    """

    index: int
    text: str
    token_ids: list[int]
    finish: FinishReason | None
    scores: list[Score] | None = None
    prompt_scores: list[Score] | None = None
    calls: Sequence[CallDelta] = ()
    stop: str | int | None = None
    reasoning: str = ""

    @property
    def num_scores(self) -> int:
        return len(self.scores or ()) + len(self.prompt_scores or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestText:
    """The text side of a request.

    stream: makes the text stream of a choice, given the ids of its prompt. token_table: single
    tokens as text. echoed: prompts to be sent before the output, by their ids. whole: each choice
    is sent at its end.
    """

    stream: Callable[[Sequence[int]], TextStream]
    token_table: TokenTable
    echoed: Mapping[tuple[int, ...], PromptText]
    whole: bool


class OutputStream:
    """Sends tokens, with their scores, as they come; held back are those whose text may become
    part of a stop string, a call or thoughts, and, of whole answers, all.

    `measure` is called before each token is processed and returns the time, `emit` takes the
    deltas. `first_token` and `last_token` are when they came, 0 before.
    """

    def __init__(
        self,
        job: SequenceJob,
        text: RequestText,
        *,
        measure: Callable[[], float],
        emit: Callable[[Delta], None],
    ) -> None:
        self.job = job
        self.stream = text.stream(job.prompt_ids)
        self.first_token = self.last_token = 0.0
        self.longest_gap = 0.0  # seconds between two tokens
        self._whole = text.whole
        self._token_table = text.token_table
        self._echo = echo = text.echoed.get(job.prompt_ids)
        self._offset = 0 if echo is None else len(echo.text)
        self._measure = measure
        self._emit = emit
        # The next delta.
        self._texts = [] if echo is None else [echo.text]
        self._thoughts: list[str] = []
        self._ids: list[int] = []
        self._calls: list[CallDelta] = []
        self._scores: list[Score] | None = [] if job.sampling.logprobs is not None else None
        scored = job.sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs] | None = [] if scored else None

    def take(self, event: TokenEvent) -> bool:
        """Add one token, in order. Returns whether the output is cut here."""
        now = self._measure()
        if not self.first_token:
            self.first_token = now
        elif now - self.last_token > self.longest_gap:
            self.longest_gap = now - self.last_token
        self.last_token = now
        stream = self.stream
        before = stream.characters
        text = stream.push(event.token, event.finish)
        if self._scores is not None:
            begin = self._token_table[event.token].begins(before, stream.characters)
            self._scores.append(Score(event.token, event.logprobs, self._offset + begin))
        self._ids.append(event.token)
        if text:
            self._texts.append(text)
        if stream.reasoning:
            self._thoughts.append(stream.reasoning)
        if stream.calls:
            self._add_calls(stream.calls)
        ended = stream.finish is not None
        if ended or (not self._whole and (text or self._has_news())):
            self._send(0 if ended else stream.num_held)
        return ended

    def _has_news(self) -> bool:
        """Whether anything can be sent without text: a token by itself, too, while its character is
        incomplete, unless a parser may hold its text back."""
        stream = self.stream
        if stream.calls or stream.reasoning:
            return True
        return stream.plain and len(self._ids) > stream.num_held

    def score(self, event: ScoreEvent) -> None:
        """Add log-probabilities of the prompt, without those that came before, in this attempt or
        another."""
        if self._prompt_logprobs is not None:
            known = len(self._prompt_logprobs) + 1 - event.start
            self._prompt_logprobs += event.logprobs[known:]
        if event.finish is not None:
            self.stream.finish = event.finish
            self._send()

    def close(self) -> None:
        """Break the reference cycle with the RequestRun: a garbage collection would hold up every
        stream."""
        del self._measure, self._emit

    def _add_calls(self, calls: Sequence[CallDelta]) -> None:
        for call in calls:
            if self._calls and self._calls[-1].index == call.index:
                self._calls[-1].arguments += call.arguments
            else:
                self._calls.append(call)

    def _send(self, num_held: int = 0) -> None:
        """Send what there is but for the last `num_held` tokens, whose text is held back."""
        text = self._texts[0] if len(self._texts) == 1 else "".join(self._texts)
        cut, scores = len(self._ids) - num_held, None
        ids, self._ids = self._ids[:cut], self._ids[cut:]
        if self._scores is not None:
            scores, self._scores = self._scores[:cut], self._scores[cut:]
        delta = Delta(self.job.index, text, ids, self.stream.finish, scores)
        delta.calls = self._calls
        if self._thoughts:
            delta.reasoning, self._thoughts = "".join(self._thoughts), []
        if self.stream.finish is FinishReason.STOP:
            delta.stop = self._stop(ids)
        self._texts, self._calls = [], []
        if self._prompt_logprobs is not None:
            delta.prompt_scores = self._prompt_scores(self._prompt_logprobs)
            self._prompt_logprobs = None
        self._emit(delta)

    def _stop(self, ids: Sequence[int]) -> str | int | None:
        last = ids[-1] if ids else None
        if self.stream.stop is None and last in self.job.sampling.stop_token_ids:
            return last
        return self.stream.stop

    def _prompt_scores(self, logprobs: list[TokenLogprobs]) -> list[Score]:
        ids = self.job.prompt_ids
        offsets = (0,) * len(ids) if self._echo is None else self._echo.offsets
        return [Score(*entry) for entry in zip(ids, [None, *logprobs], offsets, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request: each prompt counted once, however many choices it has. `cached_tokens`
    of the prompts were not computed for any choice."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """Usage as OpenAI writes it; the gRPC message has the same names."""
        thought = {"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **(thought if self.reasoning_tokens else {}),
        }


class RequestRun:
    """Runs the outputs of one request, as a context: leaving it ends them all.

    Entering waits for admission and raises when it is refused. Iterating yields lists of deltas in
    the order they were made; it ends when every choice has finished and raises the first failure.
    Outputs do not wait for the reader: stop strings and deadlines take effect without it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        request_id: str,
        jobs: Sequence[SequenceJob],
        text: RequestText,
        prompt_tokens: int,
        ticket: AdmissionTicket,
        spans: Sequence[PlacedSpan] = (),
    ) -> None:
        self.request_id = request_id
        self.arrival = ticket.request.arrival
        self.tier_name = ticket.request.tier_name
        self.first_token = self.last_token = 0.0  # when they came
        self.token_table = text.token_table
        self.prompts = [job.prompt_ids for job in jobs]
        self._dispatcher = dispatcher
        self._ticket = ticket
        self._metrics: MetricSet = dispatcher.metrics
        self._gaps = dispatcher.metrics.series(metrics.INTER_TOKEN_LATENCY, {})
        self._prompt_tokens = prompt_tokens
        self.choices = [
            OutputStream(job, text, measure=self._measure, emit=self._emit) for job in jobs
        ]
        self._runs = [
            SequenceRun(dispatcher, choice.job, choice, on_submit=ticket.submitted)
            for choice in self.choices
        ]
        self._spans = list(spans)
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: list[Delta] = []
        self._reader: asyncio.Future[None] | None = None
        self._running = len(jobs)
        self.error: BatonError | None = None
        self._gauge: Metric | None = None

    async def __aenter__(self) -> Self:
        self._count_as(metrics.REQUESTS_WAITING)
        try:
            await self._ticket.wait()
        except BaseException:
            self._count_as(None)
            raise
        self._spans += self._ticket.spans(self._dispatcher.router_id)
        self._metrics.count(metrics.PROMPT_TOKENS, self._prompt_tokens)
        for run in self._runs:
            task = asyncio.create_task(run.run())
            task.add_done_callback(self._run_ended)
            self._tasks.append(task)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for choice in self.choices:
                choice.close()
        finally:  # the client may disconnect just now
            usage = self.usage
            made = usage.completion_tokens
            self._count_as(None)
            self._ticket.end(made)
            self._metrics.count(metrics.GENERATION_TOKENS, made)
            self._count_for_key(usage)

    def _count_for_key(self, usage: Usage) -> None:
        """Account for the tokens of a caller that has a key."""
        key = self._ticket.request.caller.name
        kinds = {
            "input": usage.prompt_tokens - usage.cached_tokens,
            "cached": usage.cached_tokens,
            "output": usage.completion_tokens,
        }
        for kind, count in kinds.items() if key else ():
            self._metrics.count(metrics.KEY_TOKENS, count, key=key, kind=kind)

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        while True:
            if self._ready:
                ready, self._ready = self._ready, []
                yield ready
            elif self.error is not None:
                raise self.error
            elif not self._running:
                return
            else:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader

    @property
    def usage(self) -> Usage:
        made = sum(choice.stream.tokens for choice in self.choices)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=made,
            cached_tokens=self._cached_tokens(),
            reasoning_tokens=sum(choice.stream.reasoning_tokens for choice in self.choices),
        )

    def _cached_tokens(self) -> int:
        fewest: dict[PromptBlocks, int] = {}
        for choice, run in zip(self.choices, self._runs, strict=True):
            blocks, cached = choice.job.blocks, run.num_cached_tokens or 0
            fewest[blocks] = min(fewest.get(blocks, cached), cached)
        return sum(fewest.values())

    @property
    def finishes(self) -> list[FinishReason | None]:
        return [choice.stream.finish for choice in self.choices]

    @property
    def spans(self) -> list[PlacedSpan]:
        return [*self._spans, *(span for run in self._runs for span in run.spans)]

    def timeline(self) -> dict[str, Any]:
        """The spans so far, by their start; the gRPC message has the same names. Times are seconds
        since the Unix epoch, `first_token` is 0 when there was none."""
        ordered = sorted(self.spans, key=lambda placed: (placed.span.start, placed.span.end))
        return {
            "request_id": self.request_id,
            "arrival": self.arrival,
            "first_token": self.first_token,
            "end": self._dispatcher.clock(),
            "spans": [
                asdict(placed.span) | {"choice": placed.choice, "attempt": placed.attempt}
                for placed in ordered
            ],
        }

    def _emit(self, delta: Delta) -> None:
        self._ready.append(delta)
        self._wake_reader()

    def _measure(self) -> float:
        now = self._dispatcher.clock()
        if self.first_token:
            if len(self.choices) == 1:  # tokens of several choices interleave
                gap = now - self.last_token
                self._gaps.observe(gap if gap > 0.0 else 0.0)
        else:
            self.first_token = now
            self._ticket.started()
            self._metrics.observe(metrics.TIME_TO_FIRST_TOKEN, max(0.0, now - self.arrival))
            if self._gauge is not None:
                self._count_as(metrics.REQUESTS_RUNNING)
        self.last_token = now
        return now

    def _count_as(self, gauge: Metric | None) -> None:
        """Count the request in this gauge and in no other."""
        if self._gauge is not None:
            self._metrics.add(self._gauge, -1)
        self._gauge = gauge
        if gauge is not None:
            self._metrics.add(gauge, 1)

    def _run_ended(self, task: asyncio.Task[None]) -> None:
        self._running -= 1
        if not task.cancelled():
            error = task.exception()
            if error is not None and self.error is None:
                self.error = typed(error)
                for other in self._tasks:
                    other.cancel()
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
