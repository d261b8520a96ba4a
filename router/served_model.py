"""The served model: its names, its context, its text work and grammars off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from grammar.trial import Trial
from protocol.errors import ContextTooLong, InvalidRequest, NotFound, PermissionDenied, Unsupported
from protocol.sampling import Grammar, GrammarKind
from router.auth.keys import Caller
from router.config import DefaultsOf, RouterConfig
from router.fingerprint import text_fingerprint
from router.request.chat_messages import PLAIN, AnyMessage, TemplateOptions
from router.request.endpoints import ChatRequest
from router.request.generate_request import GenerateRequest, RequestKind
from router.request.limited_text import LimitedText
from router.request.structured_output import StructuredOutput
from router.request.tools import ToolChoice, ToolUse
from router.text.free_text import limited_grammar
from router.text.reasoning import ReasoningFormat, Thinking
from router.text.reasoning_grammar import after_thought, thought_rules
from router.text.tokenizer import ModelText, PromptText
from router.text.tool_formats import ToolFormat
from router.text.tool_grammar import WITHIN_TEXT, call_grammar
from router.text.tool_parser import CallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedForm:
    """A grammar and the name of the field that asked for it; whether it names tokens that the
    process that checks grammars does not have."""

    grammar: Grammar
    param: str
    has_ids: bool


class OutputGrammars:
    """Grammars of one model's requests. Each is checked before a request relies on it, in a process
    of its own, off the event loop (grammar.trial)."""

    def __init__(self, text: ModelText) -> None:
        self._chat = text.chat
        self._has_end = bool(text.eos_ids)
        # Grammars treat all added tokens as special.
        self._special_ids = {token: i for i, token in text.added_tokens.items()}
        self._end_ids, self._vocab_size = text.eos_ids, text.vocab_size
        tool_format = text.chat.tool_format
        self._reasoning = text.reasoning
        call_marks = () if tool_format is None else tool_format.marks
        marks = {*call_marks, *text.reasoning.format.marks}
        #: Special tokens that are part of tool calls or mark thoughts.
        self.special_marks = {i: t for i, t in text.special_tokens.items() if t in marks}
        self._trial = Trial(text.added_tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def tool_format(self, request: GenerateRequest) -> ToolFormat | None:
        """How calls in the output are written; None without tools. Raises Unsupported when the
        model takes no tools."""
        return None if request.tool_use is None else self._chat.require_tools()

    async def grammar(self, request: GenerateRequest, thinking: Thinking | None) -> Grammar | None:
        """The grammar of the output, if it has one; `thinking` is where the output begins, None
        where thoughts are not looked for. Raises InvalidRequest naming the field whose grammar is
        not possible."""
        tool_format, tools = self.tool_format(request), request.tool_use
        forced = tools is not None and tools.choice is not ToolChoice.AUTO
        strict = tools is not None and tool_format in WITHIN_TEXT and tools.strict
        strict = strict and self._has_end and not request.ignore_eos
        if request.structured is None and not forced and not strict:
            return None
        if not self._has_end:
            param = "tool_choice" if request.structured is None else request.structured.param
            raise Unsupported(f"{param}: this model has no end token", param=param)
        requested = None
        if request.structured is not None:
            requested = await self._written(request.structured, tools)
        thought: tuple[str, list[str]] = ("", [])
        if thinking is not None:
            calls = tools is not None
            thought = thought_rules(self._reasoning, thinking, self._special_ids.get, calls=calls)
        if tools is None or tool_format is None:
            if requested is None or not thought[0]:
                return None if requested is None else requested.grammar
            grammar = after_thought(requested.grammar, *thought, requested.param)
            if not requested.has_ids:
                await self._check(grammar, requested.param)
            return grammar
        for i, tool in enumerate(tools.tools):
            if tool in tools.callable_tools and (forced or requested or tool.strict):
                schema = Grammar(kind=GrammarKind.JSON_SCHEMA, source=tool.schema)
                await self._check(schema, f"tools[{i}].function.parameters")
        grammar = await asyncio.to_thread(self._with_calls, requested, tools, tool_format, thought)
        await self._check(grammar, "tools")
        return grammar

    async def _written(self, form: StructuredOutput, tools: ToolUse | None) -> RequestedForm:
        """A form as a grammar that works. Raises InvalidRequest naming its field."""
        grammar, param, has_ids = form.form, form.param, False
        if isinstance(grammar, LimitedText):
            has_ids = bool(grammar.allowed_ids)
            if tools is not None:
                raise InvalidRequest(f"{param} cannot be combined with tools", param=param)
            outside = [i for i in grammar.allowed_ids if not 0 <= i < self._vocab_size]
            if outside:
                raise InvalidRequest(
                    f"{param}: id {outside[0]} is outside the vocabulary of {self._vocab_size}",
                    param=param,
                )
            for schema in grammar.schemas:  # their errors are about what the client knows
                tagged = Grammar(kind=GrammarKind.JSON_SCHEMA, source=schema)
                await self._check(tagged, param)
            try:
                grammar = await asyncio.to_thread(
                    limited_grammar, grammar, self._special_ids, self._end_ids
                )
            except InvalidRequest as error:
                raise InvalidRequest(f"{param}: {error.message}", param=param) from None
        if not has_ids:
            await self._check(grammar, param)
        return RequestedForm(grammar=grammar, param=param, has_ids=has_ids)

    def call_parser(self, request: GenerateRequest) -> CallParser | None:
        """A fresh reader of the calls in one output; None without tools."""
        tools, tool_format = request.tool_use, self.tool_format(request)
        if tools is None or tool_format is None:
            return None
        return CallParser(
            tool_format,
            {tool.name: tool.properties for tool in tools.callable_tools},
            several=tools.parallel and tools.choice is not ToolChoice.NAMED,
            forced=tools.choice is not ToolChoice.AUTO,
            hidden=self.special_marks.values() if request.skip_special_tokens else (),
        )

    def named(self, error: InvalidRequest, request: GenerateRequest) -> InvalidRequest:
        """A worker's error about the grammar, naming the request's field instead."""
        if error.param != "grammar":
            return error
        param = "tools" if request.structured is None else request.structured.param
        return InvalidRequest(f"{param}: {error.message.removeprefix('grammar: ')}", param=param)

    def begin(self) -> None:
        """Start the checking process before the first grammar."""
        self._thread.submit(self._trial.begin)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._trial.close()

    def _with_calls(
        self,
        requested: RequestedForm | None,
        tools: ToolUse,
        tool_format: ToolFormat,
        thought: tuple[str, list[str]],
    ) -> Grammar:
        source = call_grammar(
            tool_format,
            tools.callable_tools,
            several=tools.parallel and tools.choice is not ToolChoice.NAMED,
            answer=_answer(requested, tools),
            in_text=requested is None and tools.choice is ToolChoice.AUTO,
            thought=thought,
            special_id=self._special_ids.get,
        )
        return Grammar(kind=GrammarKind.LARK, source=source)

    async def _check(self, grammar: Grammar, param: str) -> None:
        """Unknown grammars are checked one at a time."""
        try:
            if not self._trial.known(grammar):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, self._trial.check, grammar)
        except InvalidRequest as error:
            raise InvalidRequest(f"{param}: {error.message}", param=param) from None


def _answer(requested: RequestedForm | None, tools: ToolUse) -> str | None:
    """The schema of an answer that the model may give instead of calls."""
    if requested is None or tools.choice is not ToolChoice.AUTO:
        return None
    if requested.grammar.kind is not GrammarKind.JSON_SCHEMA:
        raise InvalidRequest(
            f"{requested.param} cannot be combined with tools; set tool_choice to none or required",
            param=requested.param,
        )
    return requested.grammar.source


R = TypeVar("R")

#: Texts longer than this (characters) have a thread of their own, so that short ones never wait.
_LONG_TEXT = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What clients are told about a model. max_model_len: tokens of the longest sequence that some
    worker can hold now. precision: of the weights in each pool."""

    id: str
    created: int
    max_model_len: int
    fingerprint: str
    precision: Mapping[str, Sequence[str]]


class ServedModel:
    """One model under its names. Tokenising runs in threads, without the interpreter's lock."""

    def __init__(self, config: RouterConfig) -> None:
        self.name = config.model_name
        self.names = frozenset({self.name, *config.model_aliases})
        self._created = int(time.time())
        self.text = ModelText(
            Path(config.model_path),
            neutralise_control_tokens=config.neutralise_control_tokens,
            chat_template=config.chat_template,
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
        )
        context = config.max_model_len or self.text.max_position
        if context is None:
            raise ValueError("max_model_len must be set: the model's config does not state it")
        self.context = context
        self._fingerprint = text_fingerprint(Path(config.model_path), config.chat_template)
        #: What answers say of the model.
        self.named = self.info({}, max_model_len=self.context)
        own = config.sampling_defaults is DefaultsOf.MODEL
        self.sampling_defaults: Mapping[str, Any] = self.text.sampling_defaults if own else {}
        self.grammars = OutputGrammars(self.text)
        self._short = ThreadPoolExecutor(config.text_threads, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")

    def check_name(self, name: str | None, caller: Caller) -> None:
        """Raise NotFound unless `name` is a name of this model (None means the served one),
        PermissionDenied unless the caller may use it."""
        if name is not None and name not in self.names:
            hint = f"; the one served here is {self.name!r}" if caller.may_use(self.names) else ""
            raise NotFound(f"the model {name!r} does not exist{hint}", param="model")
        if not caller.may_use(self.names):
            raise PermissionDenied(
                f"the API key {caller.name!r} may not use the model {self.name!r}", param="model"
            )

    def info(self, precision: Mapping[str, Sequence[str]], *, max_model_len: int) -> ModelInfo:
        return ModelInfo(
            precision=precision,
            id=self.name,
            created=self._created,
            max_model_len=max_model_len,
            fingerprint=self._fingerprint,
        )

    async def show_prompts(
        self, request: GenerateRequest, ids: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], PromptText]:
        """The prompts of a completion, by their ids, as they can be shown again."""

        def show_all() -> dict[tuple[int, ...], PromptText]:
            skip = request.skip_special_tokens
            pairs = zip(request.prompts, ids, strict=True)
            return {t: self.text.show(p, t, skip_special_tokens=skip) for p, t in pairs}

        return await self._in_thread(show_all, sum(map(len, request.prompts)))

    async def encode_request(
        self, request: GenerateRequest, *, limit: int
    ) -> list[tuple[int, ...]]:
        """The ids of each prompt of a request.

        Raises ContextTooLong for text of far more than `limit` tokens without tokenising all of it.
        """
        if isinstance(request, ChatRequest):
            return [
                await self.encode_chat(
                    request.messages, request.tool_use, request.template_options, limit=limit
                )
            ]
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        if not texts:
            return [tuple(prompt) for prompt in request.prompts if not isinstance(prompt, str)]

        def encode_all() -> list[tuple[int, ...]]:
            self._check_lengths(texts, limit, "prompt")
            return [
                self.text.encode(p) if isinstance(p, str) else tuple(p) for p in request.prompts
            ]

        return await self._in_thread(encode_all, sum(map(len, texts)))

    async def encode_text(
        self, text: str, *, add_special_tokens: bool, limit: int
    ) -> tuple[int, ...]:
        """The ids of one text. Raises ContextTooLong as above."""

        def encode() -> tuple[int, ...]:
            self._check_lengths([text], limit, "prompt")
            return self.text.encode(text, add_special_tokens=add_special_tokens)

        return await self._in_thread(encode, len(text))

    async def encode_chat(
        self,
        messages: Sequence[AnyMessage],
        tools: ToolUse | None = None,
        options: TemplateOptions = PLAIN,
        *,
        add_special_tokens: bool = False,
        limit: int,
    ) -> tuple[int, ...]:
        """The ids of a chat through the model's template. Raises ContextTooLong as above, and
        Unsupported when the model cannot be given tools."""
        texts = [message.text for message in messages]
        definitions: Sequence[Mapping[str, Any]] = ()
        schemas: list[str] = []
        if tools is not None:
            self.text.chat.require_tools()
            definitions, schemas = tools.definitions, [tool.schema for tool in tools.tools]

        def encode() -> tuple[int, ...]:
            self._check_lengths(texts, limit, "messages")
            self._check_lengths(schemas, limit, "tools")
            return self.text.encode_chat(
                messages, definitions, options, add_special_tokens=add_special_tokens, limit=limit
            )

        return await self._in_thread(encode, sum(map(len, [*texts, *schemas])))

    def thinking(self, request: GenerateRequest, prompt: Sequence[int]) -> Thinking | None:
        """Where an output begins; None where thoughts are not looked for."""
        reasoning = self.text.reasoning
        if request.kind is not RequestKind.CHAT or reasoning.format is ReasoningFormat.NONE:
            return None
        decode = partial(self.text.decode, skip_special_tokens=False)
        continues = isinstance(request, ChatRequest) and request.continue_final_message
        return reasoning.thinking(prompt, decode, continues=continues)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return await self._in_thread(
            lambda: self.text.decode(ids, skip_special_tokens=False), len(ids)
        )

    def close(self) -> None:
        self.grammars.close()
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    def _check_lengths(self, texts: Sequence[str], limit: int, param: str) -> None:
        for text in texts:
            if self.text.longer_than(text, limit):
                raise ContextTooLong(
                    f"{param}: a text of {len(text)} characters has more than {limit} tokens",
                    param=param,
                )

    async def _in_thread(self, work: Callable[[], R], size: int) -> R:
        pool = self._long if size > _LONG_TEXT else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, work)
