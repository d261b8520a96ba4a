"""One output of a request on its way to the client: worker tokens in, deltas out, which the HTTP
and gRPC front ends encode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from protocol.messages import ScoreEvent, TokenEvent
from protocol.sampling import TokenLogprobs
from protocol.states import FinishReason
from router.dispatch.sequence_jobs import SequenceJob
from router.text.detokenizer import TokenTable
from router.text.text_stream import TextStream
from router.text.tokenizer import PromptText
from router.text.tool_parser import CallDelta


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
    delta, one for every prompt token. `calls` is what it adds to tool calls.
    """

    index: int
    text: str
    token_ids: list[int]
    finish: FinishReason | None
    scores: list[Score] | None = None
    prompt_scores: list[Score] | None = None
    calls: Sequence[CallDelta] = ()

    @property
    def num_scores(self) -> int:
        return len(self.scores or ()) + len(self.prompt_scores or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestText:
    """The text side of a request.

    stream: makes the text stream of a choice. token_table: single tokens as text. echoed: prompts
    to be sent before the output, by their ids. whole: each choice is sent at its end.
    """

    stream: Callable[[], TextStream]
    token_table: TokenTable
    echoed: Mapping[tuple[int, ...], PromptText]
    whole: bool


class OutputStream:
    """Holds tokens, with their scores, back until their text is certain, or to the end.

    `measure` is called before each token is processed, `emit` takes the deltas.
    """

    def __init__(
        self,
        job: SequenceJob,
        text: RequestText,
        *,
        measure: Callable[[], None],
        emit: Callable[[Delta], None],
    ) -> None:
        self.job = job
        self.stream = text.stream()
        self._whole = text.whole
        self._token_table = text.token_table
        self._echo = echo = text.echoed.get(job.prompt_ids)
        self._offset = 0 if echo is None else len(echo.text)
        self._measure = measure
        self._emit = emit
        # The next delta.
        self._texts = [] if echo is None else [echo.text]
        self._ids: list[int] = []
        self._calls: list[CallDelta] = []
        self._scores: list[Score] | None = [] if job.sampling.logprobs is not None else None
        scored = job.sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs] | None = [] if scored else None

    def take(self, event: TokenEvent) -> bool:
        """Add one token, in order. Returns whether the output is cut here."""
        self._measure()
        stream = self.stream
        before = stream.characters
        text = stream.push(event.token, event.finish)
        if self._scores is not None:
            begin = self._token_table[event.token].begins(before, stream.characters)
            self._scores.append(Score(event.token, event.logprobs, self._offset + begin))
        self._ids.append(event.token)
        if text:
            self._texts.append(text)
        if stream.calls:
            self._add_calls(stream.calls)
        ended = stream.finish is not None
        if ended or (not self._whole and (text or stream.calls)):
            self._send()
        return ended

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

    def _send(self) -> None:
        text = self._texts[0] if len(self._texts) == 1 else "".join(self._texts)
        delta = Delta(self.job.index, text, self._ids, self.stream.finish, self._scores)
        delta.calls = self._calls
        self._texts, self._ids, self._calls = [], [], []
        if self._scores is not None:
            self._scores = []
        if self._prompt_logprobs is not None:
            delta.prompt_scores = self._prompt_scores(self._prompt_logprobs)
            self._prompt_logprobs = None
        self._emit(delta)

    def _prompt_scores(self, logprobs: list[TokenLogprobs]) -> list[Score]:
        ids = self.job.prompt_ids
        offsets = (0,) * len(ids) if self._echo is None else self._echo.offsets
        return [Score(*entry) for entry in zip(ids, [None, *logprobs], offsets, strict=True)]
